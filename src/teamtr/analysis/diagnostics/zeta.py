"""Zeta proxies of a run (tab:zeta-proxy): the size of the estimation term relative to other terms of the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.records import Record, accepted, mapping, mappings, number, whole

PARTS = ("zeta_norm", "zeta_clip", "zeta_ratio")


@dataclass(frozen=True)
class Spread:
    mean: float
    p50: float
    p90: float


@dataclass(frozen=True)
class ZetaProxy:
    """The rows of the paper's table, in units of the normalized advantage: each part per update, their sum (``proxy``)
    per update and per stage, and the share of the estimation term in the total penalty of a stage's certificates (the
    paper's; None if none was logged)."""

    updates: int
    zeta_norm: Spread
    zeta_clip: Spread
    zeta_ratio: Spread
    proxy: Spread
    per_stage: Spread
    penalty_share: Spread | None


def zeta_proxy(updates: Sequence[Record]) -> ZetaProxy | None:
    """The proxies over all kept updates; None if there are none."""
    kept = [update for update in updates if accepted(update)]
    if not kept:
        return None
    parts = {part: [number(update, part) or 0.0 for update in kept] for part in PARTS}
    sums = np.sum(list(parts.values()), axis=0)
    stages: dict[int | None, list[int]] = {}
    for k, update in enumerate(kept):
        stages.setdefault(whole(update, "stage"), []).append(k)
    shares = [share for own in stages.values() if (share := _penalty_share([kept[k] for k in own])) is not None]
    return ZetaProxy(
        updates=len(kept),
        **{part: _spread(values) for part, values in parts.items()},
        proxy=_spread(sums.tolist()),
        per_stage=_spread([float(sums[own].sum()) for own in stages.values()]),
        penalty_share=_spread(shares) if shares else None,
    )


def _spread(values: Sequence[float]) -> Spread:
    p50, p90 = np.quantile(values, [0.5, 0.9])
    return Spread(float(np.mean(values)), float(p50), float(p90))


def _penalty_share(updates: Sequence[Record]) -> float | None:
    """The share of the estimation term in the total penalty of the paper's certificates of these updates."""
    estimation = occupancy = 0.0
    for update in updates:
        for certificate in mappings(update, "certificates"):
            terms = mapping(certificate, "terms")
            pair = number(terms, "estimation"), number(terms, "occupancy")
            if certificate.get("kind") == "single_step" and None not in pair:
                estimation, occupancy = estimation + (pair[0] or 0.0), occupancy + (pair[1] or 0.0)
    return estimation / (estimation + occupancy) if estimation + occupancy < 0.0 else None
