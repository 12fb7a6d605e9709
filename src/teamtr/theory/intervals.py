"""Confidence intervals of means over problems: of a gain, and the upper bound of a KL that the gate checks.

Messages and episodes of one problem are correlated, so the problem is the unit of counting and resampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from teamtr.randomness import resampled_range
from teamtr.theory.concentration import bernstein_width
from teamtr.types import Floats

_NORMAL = NormalDist()

Method = Literal["t", "bootstrap", "bernstein"]


@dataclass(frozen=True)
class Measured:
    """An estimate from P problems and its two-sided interval."""

    estimate: float
    lower: float
    upper: float
    confidence: float
    method: Method
    problems: int


def measured_gain(
    returns_before_PG: ArrayLike,
    returns_after_PG: ArrayLike,
    *,
    confidence: float = 0.95,
    method: Method = "t",
    reward_range: float | None = None,
    rng: np.random.Generator | None = None,
) -> Measured:
    """The measured gain of an update: mean returns of the *same* problems after it minus before it.

    The batch that the next agent is trained on was sampled under the updated team, so the estimate costs nothing and is
    unbiased for the change of the mean return *on these problems and similar ones*. Rows are paired: row p is one
    problem in both; the two sides may hold different numbers of episodes. Problems differ in difficulty far more than
    an update changes them, and pairing removes that variance. Unbiased over the draw of both batches; given one
    particular update, the sampling noise of the batch that it was trained on remains in the estimate.
    """
    before, after = (np.asarray(r, dtype=np.float64) for r in (returns_before_PG, returns_after_PG))
    if before.ndim != 2 or after.ndim != 2 or len(before) != len(after):
        raise ValueError(
            "measured_gain: returns of the same problems, one row each, are needed on both sides, got "
            f"{before.shape} and {after.shape}"
        )
    return mean_interval(
        after.mean(axis=1) - before.mean(axis=1),
        confidence=confidence,
        method=method,
        bound=reward_range,
        rng=rng,
    )


def mean_interval(
    values_P: ArrayLike,
    *,
    problem_P: ArrayLike | None = None,
    confidence: float = 0.95,
    method: Method = "t",
    bound: float | None = None,
    rng: np.random.Generator | None = None,
    draws: int = 2000,
) -> Measured:
    """The mean over problems and its interval. ``problem_P`` numbers the problems, where one may occur several times:
    it counts as one, with the sum of its values.

    "t": Student's, for means of many problems. "bootstrap": percentiles over problems drawn with replacement, needs
    ``rng``. "bernstein": empirical Bernstein, valid for any law and any number of problems, and wide; needs
    ``bound``, the largest |value|.
    """
    values = np.asarray(values_P, dtype=np.float64)
    if problem_P is not None:
        _, cluster_P = np.unique(problem_P, return_inverse=True)
        sums = np.bincount(cluster_P, weights=values).astype(np.float64)
        values = sums * (len(sums) / len(values))  # so that their mean is that of all rows
    if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all():
        raise ValueError(f"an interval needs at least two problems with finite values, got {values.shape}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    count, mean, deviation = len(values), float(values.mean()), float(values.std(ddof=1))
    if method == "bootstrap":
        if rng is None:
            raise ValueError("a bootstrap interval needs rng")
        low, high = resampled_range(values, confidence, draws=draws, rng=rng)
        return Measured(mean, min(low, mean), max(high, mean), confidence, method, count)
    if method == "bernstein":
        if bound is None or (np.abs(values) > bound * (1.0 + 1e-12)).any():
            raise ValueError(f"a Bernstein interval needs a bound on every |value|, got {bound}")
        width = float(bernstein_width(deviation**2, count, bound, 1.0 - confidence)) if bound > 0.0 else 0.0
    else:
        width = student_quantile((1.0 + confidence) / 2.0, count - 1) * deviation / math.sqrt(count)
    return Measured(mean, mean - width, mean + width, confidence, method, count)


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t for whole degrees of freedom, by bisection of its finite series.

    With x = atan(t / sqrt(n)), P(|T| < t) is (n even) sin x (1 + 1/2 cos^2 x + 1*3/(2*4) cos^4 x + ...), and (n odd)
    2/pi (x + sin x (cos x + 2/3 cos^3 x + 2*4/(3*5) cos^5 x + ...)), up to the power n - 2 of cos.
    """
    if not 0.0 < probability < 1.0 or degrees < 1:
        raise ValueError(
            f"student_quantile: a probability in (0, 1) and n >= 1 are needed, got {probability}, {degrees}"
        )
    even = degrees % 2 == 0
    k = np.arange(1, (degrees - 2) // 2 + 1 if even else (degrees - 1) // 2)
    factors = (2 * k - 1) / (2 * k) if even else (2 * k) / (2 * k + 1)

    def within(x: float) -> float:
        terms = np.cumprod(factors * math.cos(x) ** 2)
        if even:
            return float(math.sin(x) * (1.0 + terms.sum()))
        series = math.cos(x) * (1.0 + terms.sum()) if degrees > 1 else 0.0
        return float(2.0 / math.pi * (x + math.sin(x) * series))

    target = abs(2.0 * probability - 1.0)
    low, high = 0.0, math.pi / 2.0
    while low < (middle := 0.5 * (low + high)) < high:
        low, high = (middle, high) if within(middle) < target else (low, middle)
    return math.copysign(math.sqrt(degrees) * math.tan(low), probability - 0.5)


# -- the gate's bound ----------------------------------------------------------------------------------------


def times_drawn(problems: int, draws: int, rng: np.random.Generator) -> Floats:
    """Bootstrap counts [draws, problems]: how often each problem occurs in a draw of ``problems`` with replacement."""
    return rng.multinomial(problems, np.full(problems, 1.0 / problems), size=draws).astype(np.float64)


@dataclass(frozen=True)
class SharedDraws:
    """Bootstrap draws shared by several bounds, so that they differ by their values and not by chance: draws for the
    same number of problems are made once and reused. ``begin`` creates the generator for each number of problems."""

    begin: Callable[[], np.random.Generator]
    _known: dict[tuple[int, int], Floats] = field(default_factory=dict, init=False)

    def times_drawn_DP(self, problems: int, draws: int) -> Floats:
        found = self._known.get((problems, draws))
        if found is None:
            found = self._known[problems, draws] = times_drawn(problems, draws, self.begin())
        return found


def bootstrap_upper(
    value_M: ArrayLike,
    problem_M: ArrayLike,
    *,
    weights_M: ArrayLike | None = None,
    confidence: float = 0.95,
    draws: int = 1000,
    rng: np.random.Generator | SharedDraws,
) -> float:
    """Upper bound of the mean value per message, where the value is a KL or a negated gain.

    ``weights_M``: importance weights, for messages that another team wrote; the mean is then sum(w v) / sum(w), and the
    bound is that of the effective number of problems. ``rng``: fresh draws, or draws that several bounds share.

    Messages of one problem are correlated, so whole problems are drawn with replacement, and each draw's mean is the
    ratio of its sums (problems may hold different numbers of messages). The bound is a quantile of the draws (the
    larger neighbor, never interpolated), and never below the mean itself. ``corrected_level`` selects the quantile: the
    plain one covers too little, because few problems underestimate the variance and their mean is skewed.

    - With one problem there is nothing to resample, and the bound is the largest value of a message.
    - All values zero: exactly 0. A value that is not finite: inf, which exceeds every finite radius.
    - It is approximate. On simulated batches whose problems and messages vary with log-deviations of 0.5 and 1, a 95 %
      bound held in 89, 90, 92 and 94 % of those with 8, 16, 32 and 64 problems (the plain quantile: 83, 87, 90 and 92;
      ``experiments/bound.py``). Means dominated by rare large messages have lower coverage.
    """
    values, problem = np.asarray(value_M, dtype=np.float64), np.asarray(problem_M)
    if values.ndim != 1 or values.shape != problem.shape or values.size == 0:
        raise ValueError(
            "bootstrap_upper: at least one message, with one value and one problem number each, is needed; got "
            f"{values.shape} and {problem.shape}"
        )
    weights = np.ones_like(values) if weights_M is None else np.asarray(weights_M, dtype=np.float64)
    if weights.shape != values.shape or not (weights >= 0.0).all():
        raise ValueError(f"bootstrap_upper: one weight of at least 0 per message is needed, got {weights.shape}")
    if not 0.0 < confidence < 1.0 or draws < 1:
        raise ValueError(
            f"bootstrap_upper: confidence must be in (0, 1) and draws at least 1, got {confidence} and {draws}"
        )
    if not np.isfinite(values).all() or not 0.0 < weights.sum() < math.inf:
        return math.inf
    _, cluster_M = np.unique(problem, return_inverse=True)
    counts_P = np.bincount(cluster_M, weights=weights)
    sums_P = np.bincount(cluster_M, weights=weights * values)
    problems = len(counts_P)
    mean = float(values.mean()) if weights_M is None else float(np.average(values, weights=weights))
    if problems == 1:
        return max(mean, float(values.max()))  # rounding can put the mean of equal numbers above them
    if isinstance(rng, SharedDraws):
        times_drawn_DP = rng.times_drawn_DP(problems, draws)
    else:
        times_drawn_DP = times_drawn(problems, draws, rng)
    with np.errstate(invalid="ignore"):  # a draw may hold only problems with weight 0
        means_D = (times_drawn_DP @ sums_P) / (times_drawn_DP @ counts_P)
    means_D = np.where(np.isfinite(means_D), means_D, np.inf)
    effective = problems if weights_M is None else max(2, int(counts_P.sum() ** 2 / (counts_P**2).sum()))
    level = corrected_level(confidence, means_D, mean, sums_P - mean * counts_P, effective)
    return max(mean, float(np.quantile(means_D, level, method="higher")))


def corrected_level(
    confidence: float, means_D: Floats, mean: float, influence_P: Floats, problems: int | None = None
) -> float:
    """The quantile of the draws to take for an upper bound of this confidence (bias-corrected, accelerated, expanded).

    - Expanded: the deviation of P problems is estimated from them and, by resampling, sqrt((P-1)/P) too small; the
      normal deviate becomes Student's, times sqrt(P/(P-1)). Weighted problems count as their effective number.
    - Bias-corrected: by the share of draws below the mean.
    - Accelerated: the deviation grows with the mean if the influence of problems on it is skewed.
    """
    problems = problems or len(influence_P)
    deviate = math.sqrt(problems / (problems - 1)) * student_quantile(confidence, problems - 1)
    near = np.isclose(means_D, mean, rtol=1e-12, atol=0.0)
    below = float(np.where(near, 0.5, means_D < mean).mean())
    bias = _NORMAL.inv_cdf(min(max(below, 1.0 / len(means_D)), 1.0 - 1.0 / len(means_D)))
    spread = float((influence_P**2).sum())
    skew = float((influence_P**3).sum()) / (6.0 * spread**1.5) if spread > 0.0 else 0.0
    room = 1.0 - skew * (bias + deviate)
    return _NORMAL.cdf(bias + (bias + deviate) / room) if room > 0.0 else 1.0
