"""Concentration bounds: confidence bounds on a surrogate from a finite batch (app:groupconc, app:finite-sample).

Every bound here is on the mean of independent *groups* (a problem and its G episodes), not of single messages, which
are correlated within a group. Two conditions that the paper does not state:

- the policy that is evaluated must not have been fitted to the same groups (otherwise they are not an independent
  sample for it): evaluate on held-out groups, or on the fresh batch that the next step samples anyway;
- ``weight`` replaces the paper's 1/(1 - gamma): it is the largest total discount that one agent's messages of one
  episode can carry. With at most K messages and gamma = 1 it is K, where the paper's form would be infinite.

A KL radius in this module is the *normalized* one of eq:kltokdef: the discounted sum over an episode divided by
``weight``. Functions take numbers or arrays and broadcast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats


def hoeffding_tail(epsilon: ArrayLike, count: ArrayLike, bound: ArrayLike) -> Floats:
    """P(|mean - expectation| > epsilon) <= 2 exp(-N epsilon^2 / (2 B^2)), lem:grouphoeffding; never above 1.

    For ``count`` independent groups with values in [-bound, bound].
    """
    epsilon, count, bound = _floats(epsilon, count, bound)
    _positive("hoeffding_tail", count=count, bound=bound)
    return np.minimum(1.0, 2.0 * np.exp(-count * epsilon**2 / (2.0 * bound**2)))


def hoeffding_width(count: ArrayLike, bound: ArrayLike, delta: ArrayLike, *, two_sided: bool = True) -> Floats:
    """The epsilon at which ``hoeffding_tail`` is ``delta``: B sqrt(2 log(2/delta) / N).

    A lower bound needs only one tail, and log(1/delta): ``two_sided=False``. cor:empL prints the two-sided one.
    """
    count, bound, delta = _floats(count, bound, delta)
    _positive("hoeffding_width", count=count, bound=bound)
    _confidence("hoeffding_width", delta)
    return bound * np.sqrt(2.0 * np.log((2.0 if two_sided else 1.0) / delta) / count)


def bernstein_width(
    variance: ArrayLike, count: ArrayLike, bound: ArrayLike, delta: ArrayLike, *, two_sided: bool = True
) -> Floats:
    """Empirical Bernstein (Maurer and Pontil 2009, theorem 4), our replacement for Hoeffding where variance is small.

    With probability at least 1 - delta the expectation exceeds the mean of N independent values in [-B, B] by at
    most sqrt(2 V log(2/delta) / N) + 7 (2B) log(2/delta) / (3 (N - 1)), where V is the *sample* variance with
    denominator N - 1. (The printed theorem is for the range [0, 1]; the range 2B scales both terms.) The 2 in the
    logarithm accounts for estimating V. Both sides at once: delta/2 for each, so log(4/delta).

    Smaller than Hoeffding's if V is well below B^2 and N is large compared with log(1/delta): the first term is
    Hoeffding's with sqrt(V) for B. This is the usual case: group-normalized advantages are seldom near their clip.
    """
    variance, count, bound, delta = _floats(variance, count, bound, delta)
    _positive("bernstein_width", bound=bound)
    _confidence("bernstein_width", delta)
    if (count < 2).any() or (variance < 0).any():
        raise ValueError("bernstein_width: a sample variance needs at least 2 groups and cannot be negative")
    log = np.log((4.0 if two_sided else 2.0) / delta)
    return np.sqrt(2.0 * variance * log / count) + 14.0 * bound * log / (3.0 * (count - 1.0))


def smaller_width(
    variance: ArrayLike, count: ArrayLike, bound: ArrayLike, delta: ArrayLike, *, two_sided: bool = True
) -> Floats:
    """The smaller of Hoeffding's and Bernstein's width, each at delta/2: the choice depends on the sample, so both must
    hold at once."""
    half = _floats(delta)[0] / 2.0
    return np.minimum(
        hoeffding_width(count, bound, half, two_sided=two_sided),
        bernstein_width(variance, count, bound, half, two_sided=two_sided),
    )


def surrogate_range(a_clip: ArrayLike, eps_w: ArrayLike, weight: ArrayLike) -> Floats:
    """B = (1 + eps_w) A_clip * weight, the range of a group's contribution with both sides clipped (cor:empL).

    Not the range of what PPO averages: min(w A, clip(w) A) is not bounded below (A < 0 and w large gives w A).
    """
    a_clip, eps_w, weight = _floats(a_clip, eps_w, weight)
    return (1.0 + eps_w) * a_clip * weight


def ratio_clip_term(a_clip: ArrayLike, radius: ArrayLike, weight: ArrayLike) -> Floats:
    """weight * A_clip * sqrt(2 radius): the largest bias of ratio clipping within the trust region (cor:clipbias-tr).

    With turn weights c_t that add up to at most W and the normalized radius D = (1/W) E sum c_t KL_t, Pinsker and
    Cauchy-Schwarz give E sum c_t A sqrt(2 KL_t) <= A sqrt(2 W E sum c_t KL_t) = A W sqrt(2 D). With c_t = gamma^t
    and W = 1/(1 - gamma) it is the paper's term.
    """
    a_clip, radius, weight = _floats(a_clip, radius, weight)
    return weight * a_clip * np.sqrt(2.0 * radius)


@dataclass(frozen=True)
class Correction:
    """An empirical surrogate and the terms to subtract from it, one entry per step (cor:empL)."""

    surrogate: Floats
    sampling: Floats
    ratio_bias: Floats

    @property
    def lower(self) -> Floats:
        """A lower bound of the population surrogate with the stated confidence."""
        return np.asarray(self.surrogate - self.sampling - self.ratio_bias)


def empirical_correction(
    surrogate: ArrayLike,
    groups: ArrayLike,
    *,
    a_clip: ArrayLike,
    eps_w: ArrayLike,
    weight: ArrayLike,
    radius: ArrayLike,
    delta: ArrayLike,
    variance: ArrayLike | None = None,
    two_sided: bool = True,
) -> Correction:
    """L >= L_hat - B sqrt(2 log(2/delta) / N) - weight A_clip sqrt(2 radius) with probability 1 - delta (cor:empL).

    ``surrogate`` is the mean over ``groups`` of their clipped, importance-weighted contribution; clipped on both
    sides, w_clip A (for PPO's minimum see ``surrogate_range``). With the sample ``variance`` of the groups'
    contributions, empirical Bernstein replaces Hoeffding. ``two_sided=True`` is as printed; one side suffices.
    """
    bound = surrogate_range(a_clip, eps_w, weight)
    if variance is None:
        sampling = hoeffding_width(groups, bound, delta, two_sided=two_sided)
    else:
        sampling = bernstein_width(variance, groups, bound, delta, two_sided=two_sided)
    (value,) = _floats(surrogate)
    return Correction(value, sampling, ratio_clip_term(a_clip, radius, weight))


@dataclass(frozen=True)
class StageBound:
    """thm:stage-hp term by term, one entry per step along the last axis."""

    correction: Correction
    occupancy_I: Floats
    zeta_I: Floats

    @property
    def lower(self) -> Floats:
        """A lower bound of the stage's true gain with the stated confidence."""
        return np.asarray((self.correction.lower - self.occupancy_I - self.zeta_I).sum(axis=-1))


def stage_high_probability(
    surrogates_I: ArrayLike,
    occupancy_I: ArrayLike,
    zeta_I: ArrayLike,
    groups_I: ArrayLike,
    *,
    a_clip: float,
    eps_w: float,
    weight: float,
    radii_I: ArrayLike,
    delta_conf: float,
    variances_I: ArrayLike | None = None,
    two_sided: bool = True,
) -> StageBound:
    """The stage's gain is at least ``.lower`` with probability 1 - delta_conf (thm:stage-hp).

    Each of the n steps gets delta_conf / n. ``occupancy_I`` are the steps' occupancy penalties from the certificate in
    use (the paper's: sqrt(2) gamma A_max sqrt(delta_i) / (1 - gamma)^2; ours are smaller), and ``zeta_I`` their
    estimation errors already multiplied by ``weight``. With ``variances_I`` the sampling term is empirical Bernstein's.
    The radii must hold in the population: if they are enforced on an estimate, the probability that the estimate is
    inside and the true value is not must be added to ``delta_conf``.
    """
    surrogates, occupancy, zeta = _floats(surrogates_I, occupancy_I, zeta_I)
    steps = surrogates.shape[-1]
    correction = empirical_correction(
        surrogates,
        groups_I,
        a_clip=a_clip,
        eps_w=eps_w,
        weight=weight,
        radius=radii_I,
        delta=delta_conf / steps,
        variance=variances_I,
        two_sided=two_sided,
    )
    return StageBound(correction, occupancy, zeta)


# -- dependent groups -------------------------------------------------------------------------------------------


def markov_beta(transition_XX: ArrayLike, lag: int) -> Floats:
    """beta(lag) of a stationary finite Markov chain: the mean over x ~ pi of TV(P^lag(x, .), pi). Vectorized.

    By the Markov property the past enters only through its last state, and the whole future only through its first, so
    the supremum over future events in the definition (app:finite-sample) is the total variation at one time.
    For two states with P(0 -> 1) = p and P(1 -> 0) = q it is 2 pi_0 pi_1 |1 - p - q|^lag.
    """
    (transition,) = _floats(transition_XX)
    if lag < 0:
        raise ValueError(f"markov_beta: the lag must be at least 0, got {lag}")
    pi = stationary(transition)
    ahead = np.linalg.matrix_power(transition, lag)
    distance = 0.5 * np.abs(ahead - pi[..., None, :]).sum(axis=-1)
    return np.asarray((pi * distance).sum(axis=-1))


def stationary(transition_XX: ArrayLike) -> Floats:
    """The stationary law of an irreducible finite Markov chain, exactly: pi (I - P + 1) = 1 (row of ones)."""
    (transition,) = _floats(transition_XX)
    states = transition.shape[-1]
    system = np.eye(states) - transition + np.ones((states, states))
    solution = np.linalg.solve(np.swapaxes(system, -1, -2), np.ones((*transition.shape[:-2], states, 1)))
    return np.asarray(solution[..., 0])


def blocks(count: int, block: int) -> int:
    """m = floor(N / 2l), the number of odd blocks of length l that fit (lem:beta-block)."""
    if block < 1 or count < 2 * block:
        raise ValueError(f"blocks: needs a block of at least 1 and at least two blocks' groups, got {block} of {count}")
    return count // (2 * block)


def blocking_tail(epsilon: ArrayLike, count: int, block: int, bound: ArrayLike, beta: ArrayLike) -> Floats:
    """P(|odd-block mean - expectation| > epsilon) <= 2 exp(-m epsilon^2 / (2 B^2)) + (m - 1) beta, at most 1.

    lem:beta-block with the constant that its proof gives; printed is 2 (m - 1) beta(l). ``beta`` is the mixing
    coefficient at lag l + 1: odd block k ends at (2k - 1) l and the next begins at 2kl + 1.

    Proof. TV(joint law of (past, future), product of their laws) = E sup_B |P(B | past) - P(B)| <= beta(l + 1) for a
    past up to block k and a future from block k + 1 on. Replace the blocks by independent copies one at a time: the
    joint law of m blocks is within (m - 1) beta(l + 1) of the product law, in the total variation that is the largest
    difference of probabilities of *any* event. The two-sided deviation is one event, so the distance enters once.
    Under the product law the block means are independent, in [-B, B], with the right expectation by stationarity:
    Hoeffding. For m = 2 the distance is exactly beta(l + 1), so the factor cannot be improved.
    """
    epsilon, bound, beta = _floats(epsilon, bound, beta)
    m = blocks(count, block)
    independent = 2.0 * np.exp(-m * epsilon**2 / (2.0 * bound**2))
    return np.minimum(1.0, independent + (m - 1) * beta)


def blocking_width(count: int, block: int, bound: ArrayLike, beta: ArrayLike, delta: ArrayLike) -> Floats:
    """The epsilon at which ``blocking_tail`` is ``delta``; inf if the mixing term alone exceeds delta."""
    bound, beta, delta = _floats(bound, beta, delta)
    m = blocks(count, block)
    left = np.asarray(delta - (m - 1) * beta)
    possible = left > 0
    return np.where(possible, bound * np.sqrt(2.0 * np.log(2.0 / np.where(possible, left, 1.0)) / m), math.inf)


# -- biases of the group advantage ----------------------------------------------------------------------------


def shrinkage(group_size: ArrayLike) -> Floats:
    """1 - 1/G: E[R_g - group mean | tau_g] = (1 - 1/G) (R_g - mu), because the mean holds R_g itself (lem:shrinkage).

    The factor is common to all rollouts, so it does not change the gradient's direction, and G / (G - 1) reverses it.
    It concerns only R - mean: division by the group's own deviation (eq:group_adv) has a bias of its own.
    """
    (size,) = _floats(group_size)
    _positive("shrinkage", group_size=size)
    return np.asarray(1.0 - 1.0 / size)


def baseline_bias(a_ret: ArrayLike, group_size: ArrayLike) -> Floats:
    """|A_ret| / G, the exact bias of return minus group mean, and its bound if A_ret is a bound (cor:baselinebias).

    It is the bias of the *mean*. Division by the group's deviation has its own, which does not vanish with G.
    """
    a_ret, size = _floats(a_ret, group_size)
    _positive("baseline_bias", group_size=size)
    return np.abs(a_ret) / size


@dataclass(frozen=True)
class ClipBias:
    """The bias of clipping Z at +-c, and the paper's bounds on it, each at least as large as the one before it, except
    that the last two each bound ``overflow`` independently."""

    bias: Floats
    distance: Floats
    overflow: Floats
    by_largest: Floats
    by_second_moment: Floats


def clip_bias(values_X: ArrayLike, probabilities_X: ArrayLike, limit: ArrayLike) -> ClipBias:
    """|E clip(Z) - E Z| <= E|Z - clip(Z)| <= E|Z| 1{|Z| > c} (lem:clipbias) <= max|Z| P(|Z| > c) and
    <= sqrt(E Z^2 P(|Z| > c)) (cor:clipbias-prob), for a law on finitely many values (last axis).

    ``distance`` is E(|Z| - c)+, which ``zeta_clip`` measures on a batch. Prefer it: it is smaller than ``overflow`` by
    c P(|Z| > c).
    """
    values, probabilities = _floats(values_X, probabilities_X)
    c = _floats(limit)[0][..., None]
    if (probabilities < 0).any() or not np.allclose(probabilities.sum(axis=-1), 1.0, atol=1e-9):
        raise ValueError("clip_bias: the probabilities of each law must be at least 0 and add up to 1")
    clipped = np.clip(values, -c, c)
    above = np.abs(values) > c
    largest = np.where(probabilities > 0, np.abs(values), 0.0).max(axis=-1)
    share = (probabilities * above).sum(axis=-1)
    return ClipBias(
        bias=np.abs((probabilities * (clipped - values)).sum(axis=-1)),
        distance=(probabilities * np.abs(clipped - values)).sum(axis=-1),
        overflow=(probabilities * np.abs(values) * above).sum(axis=-1),
        by_largest=largest * share,
        by_second_moment=np.sqrt((probabilities * values**2).sum(axis=-1) * share),
    )


def _floats(*values: ArrayLike) -> tuple[Floats, ...]:
    return tuple(np.asarray(value, dtype=np.float64) for value in values)


def _positive(where: str, **values: Floats) -> None:
    for name, value in values.items():
        if not (value > 0).all():
            raise ValueError(f"{where}: {name} must be above 0, got {value}")


def _confidence(where: str, delta: Floats) -> None:
    if not ((delta > 0) & (delta < 1)).all():
        raise ValueError(f"{where}: delta is a probability strictly between 0 and 1, got {delta}")
