"""Reliability of sampled KLs as a gate: the estimates k1 (the paper's, eq:emp_tok_kl) and k3 against the exact KL.

All three are logged for every update. An estimate *flips* the gate if it and the exact KL lie on different sides of the
radius, which matters near the threshold (the exact KL within half a radius of it; app:exp:klcal).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.records import Record, number
from teamtr.types import Floats


@dataclass(frozen=True)
class Estimator:
    """One sampled estimate against the exact KL. Errors are in radii; rates are None if no update counts."""

    name: str
    updates: int
    bias_in_radii: float | None
    rmse_in_radii: float | None
    flip_rate: float | None
    near_updates: int
    near_flip_rate: float | None


def kl_reliability(updates: Sequence[Record], *, near: float = 0.5) -> tuple[Estimator, ...]:
    """k1 and k3 over the updates that moved the policy and whose radius is per message."""
    moved = [u for u in updates if u.get("unit", "message") == "message" and (number(u, "kl_full") or 0.0) > 0.0]
    return tuple(_estimator(name, moved, near) for name in ("kl_k1", "kl_k3"))


def _estimator(name: str, updates: Sequence[Record], near: float) -> Estimator:
    rows = [(number(u, name), number(u, "kl_full"), number(u, "radius")) for u in updates]
    found = np.array([row for row in rows if None not in row and row[2]], dtype=np.float64).reshape(-1, 3)
    sampled_U, exact_U, radius_U = found.T
    error_U = (sampled_U - exact_U) / radius_U
    flips_U = (sampled_U <= radius_U) != (exact_U <= radius_U)
    near_U = np.abs(exact_U - radius_U) <= near * radius_U
    return Estimator(
        name=name,
        updates=len(found),
        bias_in_radii=_mean(error_U),
        rmse_in_radii=float(np.sqrt((error_U**2).mean())) if len(found) else None,
        flip_rate=_mean(flips_U),
        near_updates=int(near_U.sum()),
        near_flip_rate=_mean(flips_U[near_U]),
    )


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if values.size else None
