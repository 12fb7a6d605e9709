"""The three parts of the proxy for the estimation error zeta_i (eq:bias), app:exp:zeta.

The proxy is a diagnostic from data that an update has, not an unbiased estimate of zeta_i, because the true advantage
is not observed. All values are in units of the advantage.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from teamtr.theory.advantages import group_advantages
from teamtr.theory.gain import bound_log_ratio
from teamtr.types import Floats


def zeta_clip(raw: ArrayLike, clipped: ArrayLike) -> float:
    """Mean |a - Ã| over rollouts: the effect of clipping advantages (app:exp:zeta, lem:clipbias)."""
    before, after = np.asarray(raw, dtype=np.float64), np.asarray(clipped, dtype=np.float64)
    if before.shape != after.shape or before.size == 0:
        raise ValueError(
            "zeta_clip: raw and clipped advantages of the same rollouts are needed, got "
            f"{before.shape} and {after.shape}"
        )
    return float(np.abs(before - after).mean())


def zeta_ratio(advantages_M: ArrayLike, log_ratio_M: ArrayLike, clip_low: float, clip_high: float) -> float:
    """Mean |Ã| |w - clip(w)| over messages: the effect of clipping ratios (app:exp:zeta, lem:clipbias-kl)."""
    advantages, log_ratio = np.asarray(advantages_M, dtype=np.float64), np.asarray(log_ratio_M, dtype=np.float64)
    if advantages.shape != log_ratio.shape or advantages.size == 0:
        raise ValueError(
            "zeta_ratio: one advantage and one log-ratio for each of at least one message are needed, got "
            f"{advantages.shape} and {log_ratio.shape}"
        )
    ratio = np.exp(bound_log_ratio(log_ratio))
    return float((np.abs(advantages) * np.abs(ratio - np.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))).mean())


def zeta_norm(returns_PG: ArrayLike, a_clip: float, eps_norm: float, normalize: bool = True) -> float:
    """The error of advantages due to sampling noise in the group's mean and deviation, by half-split (app:exp:zeta).

    Rollouts of a group are exchangeable, so its even and its odd positions are two independent halves. To first
    order, an advantage a = (R - mu) / sigma computed with the moments of one half differs from that computed with the
    other by ((mu_even - mu_odd) + a (sigma_even - sigma_odd)) / sigma. A difference of two halves of n1 and n2
    rollouts has 1/n1 + 1/n2 times the variance of one rollout, the moments of all G have 1/G: so the error of
    the moments actually used is that difference times sqrt(n1 n2) / G (one half for even G). Call it e; the
    result is the mean over all rollouts of |clip(a + e) - clip(a - e)| / 2, which is |e| where nothing is clipped.

    We divide by the whole group's sigma, not by each half's: with 0/1 rewards a half is often constant, and its own
    deviation, sqrt(eps_norm), would inflate noise to thousands.

    Groups without signal and groups with returns that are not finite contribute 0. Below G = 4 a half holds a
    single rollout and has no deviation, so only the mean's part is counted, as without ``normalize``.
    """
    returns = np.asarray(returns_PG, dtype=np.float64)
    advantages = group_advantages(returns, a_clip=a_clip, eps_norm=eps_norm, normalize=normalize)
    informative = advantages.informative_P
    if not informative.any():
        return 0.0
    group_size = returns.shape[1]
    a_PG, returns = advantages.raw_PG[informative], returns[informative]
    even, odd = returns[:, 0::2], returns[:, 1::2]
    difference_PG = np.broadcast_to(even.mean(axis=1, keepdims=True) - odd.mean(axis=1, keepdims=True), a_PG.shape)
    if normalize:
        if group_size >= 4:
            difference_PG = difference_PG + a_PG * (_deviation(even, eps_norm) - _deviation(odd, eps_norm))
        difference_PG = difference_PG / _deviation(returns, eps_norm)
    error_PG = difference_PG * math.sqrt(even.shape[1] * odd.shape[1]) / group_size
    high, low = np.clip(a_PG + error_PG, -a_clip, a_clip), np.clip(a_PG - error_PG, -a_clip, a_clip)
    return float(np.abs(high - low).mean() / 2.0 * informative.mean())


def _deviation(returns_PG: Floats, eps_norm: float) -> Floats:
    """Population deviation with epsilon inside the root, as in eq:group_adv, one per group."""
    deviation: Floats = np.sqrt(returns_PG.var(axis=1, keepdims=True) + eps_norm)
    return deviation


def true_zeta_of_binary_rewards(
    success_cur: float, success_new: float, group_size: int, *, a_clip: float, eps_norm: float, normalize: bool = True
) -> float:
    """The exact zeta_i of eq:bias in a case where it can be computed: one turn, right or wrong, the group estimator.

    With success p under the old policy, the other G - 1 returns of a group hold k right ones with probability
    Binomial(k; G - 1, p), so the expected estimate of an episode with return r is a sum over k, and its true advantage
    is r - p. eq:bias averages the difference over the new policy, whose success is ``success_new``.

    The paper compares the normalized estimate with the plain advantage, which is in other units: most of this zeta is
    the factor 1 / sigma, which the proxies do not include. With ``normalize=False`` both have the same unit; what
    remains is the shrinkage by 1 - 1/G (lem:shrinkage).
    """
    if not (0.0 <= success_cur <= 1.0 and 0.0 <= success_new <= 1.0) or group_size < 2:
        raise ValueError(
            "true_zeta_of_binary_rewards: successes in [0, 1] and groups of at least two are needed, got "
            f"{success_cur}, {success_new} and {group_size}"
        )
    others = group_size - 1
    gap = 0.0
    for reward, share in ((1.0, success_new), (0.0, 1.0 - success_new)):
        expected = 0.0
        for k in range(others + 1):
            chance = math.comb(others, k) * success_cur**k * (1.0 - success_cur) ** (others - k)
            returns_PG = np.array([[reward] + [1.0] * k + [0.0] * (others - k)])
            advantages = group_advantages(returns_PG, a_clip=a_clip, eps_norm=eps_norm, normalize=normalize)
            expected += chance * float(advantages.values_PG[0, 0])
        gap += share * (expected - (reward - success_cur))
    return abs(gap)
