"""Trajectory importance weights, app:exp:isdeg: what it would take to reuse rollouts of an older team."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats


def normalized_weights(log_weights_E: Floats) -> Floats:
    """exp(log w) with mean one. Computed relative to the largest, so that nothing overflows."""
    shifted_E = np.exp(log_weights_E - log_weights_E.max())
    return np.asarray(shifted_E / shifted_E.mean())


def effective_sample_share(log_weights_E: Floats) -> float:
    """ESS / B = (sum w)^2 / (B sum w^2), one when all weights are equal, 1/B when one episode carries all."""
    weights_E = normalized_weights(log_weights_E)
    return float(weights_E.sum() ** 2 / (len(weights_E) * (weights_E**2).sum()))


@dataclass(frozen=True)
class Degeneracy:
    """Of the weights w of B episodes: ESS / B, high percentiles, the largest, and Pr[w > 10].

    ``total_variation`` is D_occ by importance weights, with its standard error: the total variation between the laws of
    whole conversations under the two teams, E max(0, 1 - w), which bounds that of every context in them from above.
    It needs no context to repeat, and each term lies in [0, 1] however heavy the weights' tail is.
    """

    episodes: int
    effective_share: float
    p95: float
    p99: float
    largest: float
    above_ten: float
    total_variation: float
    total_variation_error: float


def weight_degeneracy(log_weights_E: ArrayLike) -> Degeneracy:
    """From trajectory log-weights; one that is not finite is an error, never a figure."""
    logs = np.asarray(log_weights_E, dtype=np.float64)
    if logs.ndim != 1 or not logs.size or not np.isfinite(logs).all():
        raise ValueError(f"weight_degeneracy needs finite log-weights, one per episode, got shape {logs.shape}")
    weights = np.exp(np.minimum(logs, 700.0))  # beyond that a float64 overflows, and nothing is left to tell apart
    lost = np.maximum(-np.expm1(np.minimum(logs, 0.0)), 0.0)
    p95, p99 = np.quantile(weights, [0.95, 0.99])
    return Degeneracy(
        episodes=len(logs),
        effective_share=effective_sample_share(logs),
        p95=float(p95),
        p99=float(p99),
        largest=float(weights.max()),
        above_ten=float((weights > 10.0).mean()),
        total_variation=float(lost.mean()),
        total_variation_error=float(lost.std() / np.sqrt(len(lost))),
    )
