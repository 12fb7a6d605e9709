"""Trajectory importance weights, app:exp:isdeg: what it would take to reuse rollouts of an older team."""

from __future__ import annotations

import numpy as np

from teamtr.types import Floats


def normalised_weights(log_weights_E: Floats) -> Floats:
    """exp(log w) with mean one. Computed relative to the largest, so that nothing overflows."""
    shifted_E = np.exp(log_weights_E - log_weights_E.max())
    return np.asarray(shifted_E / shifted_E.mean())


def effective_sample_share(log_weights_E: Floats) -> float:
    """ESS / B = (sum w)^2 / (B sum w^2), one when all weights are equal, 1/B when one episode carries all."""
    weights_E = normalised_weights(log_weights_E)
    return float(weights_E.sum() ** 2 / (len(weights_E) * (weights_E**2).sum()))
