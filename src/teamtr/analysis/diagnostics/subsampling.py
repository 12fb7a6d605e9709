"""Stability of the paper's sampled KL under subsampling of token positions (app:exp:klcal, tab:kl-reliability).

The paper compares its monitor with itself: the estimate from a random share of the positions with that from all. This
measures the noise of positions, not the distance of the estimate from the KL, so we also compare with the exact KL of
the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.records import Record, mapping, mappings, number, numbers
from teamtr.types import Floats

NEAR = 0.2
"""Near the threshold: the estimate from all positions is within this share of it (app:exp:klcal: [0.8, 1.2])."""


@dataclass(frozen=True)
class Subsample:
    """One share of positions over the probed updates. Deviations are in radii; rates are None if nothing was counted.

    ``near_updates`` counts updates whose estimate from all positions is within a fifth of the radius of it;
    ``near_flip_rate`` is the share of draws for these that lie on the other side of the radius than that estimate.
    ``exact_flip_rate`` is the share of all draws that lie on the other side than the exact KL of the same messages.
    """

    share: float
    updates: int
    median_in_radii: float | None
    p90_in_radii: float | None
    near_updates: int
    near_flip_rate: float | None
    exact_flip_rate: float | None


def subsample_reliability(updates: Sequence[Record]) -> tuple[Subsample, ...]:
    """Subsample statistics by share, over the probed updates whose radius is per message; empty without probes."""
    rows: dict[float, list[tuple[Floats, float, float, float]]] = {}
    for update in updates:
        logged = mapping(mapping(mapping(update, "probe"), "token_shift"), "sampled_kl")
        whole, exact, radius = number(logged, "k1"), number(logged, "exact"), number(update, "radius")
        if update.get("unit", "message") != "message" or whole is None or exact is None or not radius:
            continue
        for drawn in mappings(logged, "draws"):
            share, values = number(drawn, "share"), numbers(drawn.get("k1"))
            if share is not None and values.size:
                rows.setdefault(share, []).append((values, whole, exact, radius))
    return tuple(_subsample(share, rows[share]) for share in sorted(rows))


def _subsample(share: float, rows: Sequence[tuple[Floats, float, float, float]]) -> Subsample:
    deviation = np.concatenate([np.abs(values - whole) / radius for values, whole, _, radius in rows])
    flips = [(values <= radius) != (whole <= radius) for values, whole, _, radius in rows]
    wrong = [(values <= radius) != (exact <= radius) for values, _, exact, radius in rows]
    near = [k for k, (_, whole, _, radius) in enumerate(rows) if abs(whole - radius) <= NEAR * radius * (1 + 1e-12)]
    return Subsample(
        share=share,
        updates=len(rows),
        median_in_radii=float(np.median(deviation)),
        p90_in_radii=float(np.quantile(deviation, 0.9)),
        near_updates=len(near),
        near_flip_rate=float(np.concatenate([flips[k] for k in near]).mean()) if near else None,
        exact_flip_rate=float(np.concatenate(wrong).mean()),
    )
