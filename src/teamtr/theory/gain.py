"""The unclipped surrogate: the gain of an update on a batch, from the log-ratios of its messages."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from teamtr.types import Floats

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before ``exp``, so that one extreme message cannot overflow a batch in float32
(exp(20) is 5e8). Beyond the bound the gradient is zero. Relevant log-ratios are far smaller: a ratio clip of 0.2 is
0.18 in logs. The clamp hides no errors: a log-ratio that is not finite becomes nan, which the caller rejects."""


def surrogate_gain(log_ratio_M: ArrayLike, advantages_M: ArrayLike, weights_M: ArrayLike | None = None) -> float:
    """The unclipped gain of an update on its own batch: mean of (w - 1) A, in units of the advantage.

    eq:surrogate is E[w A]. At w = 1 it is E[A], which is 0 in expectation (lem:centerapp), but not on a batch whose
    advantages are clipped or whose episodes hold unequal numbers of messages. Subtracting it keeps the expectation and
    removes noise that is unrelated to the step: without a step the gain is exactly 0. Not finite if a log-ratio is not;
    otherwise log-ratios are clamped to ``LOG_RATIO_BOUND``.
    """
    log_ratio = np.asarray(log_ratio_M, dtype=np.float64)
    advantages = np.asarray(advantages_M, dtype=np.float64)
    if log_ratio.ndim != 1 or log_ratio.shape != advantages.shape:
        raise ValueError(
            f"surrogate_gain: one log-ratio and one advantage per message, got {log_ratio.shape} and {advantages.shape}"
        )
    if log_ratio.size == 0:
        raise ValueError("surrogate_gain: no messages; skip the update of an agent that never spoke")
    gain_M = gain_by_message(log_ratio, advantages)
    if weights_M is not None:
        weights = np.asarray(weights_M, dtype=np.float64)
        if weights.shape != gain_M.shape:
            raise ValueError(
                f"surrogate_gain: one weight per message, got {weights.shape} for {gain_M.shape[0]} messages"
            )
        gain_M = gain_M * weights
    return float(gain_M.mean())


def gain_by_message(log_ratio_M: Floats, advantages_M: Floats) -> Floats:
    """(w - 1) A of every message, unclipped."""
    return np.asarray(np.expm1(bound_log_ratio(log_ratio_M)) * advantages_M)


def bound_log_ratio(log_ratio_M: Floats | NDArray[np.floating]) -> Floats:
    """Log-ratios clamped to ``LOG_RATIO_BOUND``; nan where one is not finite."""
    bounded = np.clip(log_ratio_M, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return np.where(np.isfinite(log_ratio_M), bounded, np.nan)
