"""The zeta proxy against hand arithmetic and against the error it stands for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from teamtr.theory.advantages import group_advantages
from teamtr.theory.gain import LOG_RATIO_BOUND
from teamtr.theory.zeta import zeta_clip, zeta_norm, zeta_ratio


def test_zeta_clip_by_hand() -> None:
    # |4 - 3|, |-5 + 3|, 0, 0: 3 / 4
    assert zeta_clip([[4.0, -5.0], [1.0, 0.0]], [[3.0, -3.0], [1.0, 0.0]]) == 0.75
    with pytest.raises(ValueError, match="same rollouts"):
        zeta_clip([1.0], [1.0, 2.0])


def test_zeta_clip_of_real_advantages_bounds_the_clipping_bias() -> None:
    """lem:clipbias: |E[clipped] - E[raw]| <= E|raw - clipped|; here with equality, one side alone being clipped."""
    got = group_advantages([[1.0, 0.0, 0.0, 0.0]], a_clip=1.5, eps_norm=0.0)
    assert zeta_clip(got.raw_PG, got.values_PG) == pytest.approx((math.sqrt(3.0) - 1.5) / 4, rel=1e-13)
    bias = abs(got.values_PG.mean() - got.raw_PG.mean())
    assert zeta_clip(got.raw_PG, got.values_PG) == pytest.approx(bias, rel=1e-13)


def test_zeta_ratio_by_hand() -> None:
    # w = (2, 0.5, 1.1), clipped to [0.8, 1.3]: distances 0.7, 0.3, 0; |A| = (1, 2, 5): (0.7 + 0.6) / 3
    got = zeta_ratio([1.0, -2.0, 5.0], np.log([2.0, 0.5, 1.1]), 0.2, 0.3)
    assert got == pytest.approx(1.3 / 3, rel=1e-13)
    assert zeta_ratio([1.0, -2.0], [0.0, 0.0], 0.2, 0.2) == 0.0
    assert zeta_ratio([1.0], [1e4], 0.2, 0.2) == pytest.approx(math.exp(LOG_RATIO_BOUND) - 1.2)
    assert math.isnan(zeta_ratio([1.0], [math.nan], 0.2, 0.2))
    with pytest.raises(ValueError, match="at least one message"):
        zeta_ratio([], [], 0.2, 0.2)


def test_zeta_ratio_is_bounded_by_the_kl() -> None:
    """lem:clipbias-kl on an exact pair of laws: |A|max E|w - clip(w)| <= |A|max sqrt(2 KL)."""
    cur, new = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    # a batch in the proportions of cur: 5, 3 and 2 messages
    log_ratio_M = np.repeat(np.log(new / cur), [5, 3, 2])
    kl = float(np.sum(cur * np.log(cur / new)))
    got = zeta_ratio(np.full(10, 2.0), log_ratio_M, 0.2, 0.2)
    # w = (0.4, 0.667, 3): (5 * 0.4 + 3 * 0.1333 + 2 * 1.8) / 10 * 2 = 1.2
    assert got == pytest.approx(1.2, rel=1e-12)
    assert got <= 2.0 * math.sqrt(2.0 * kl)


@pytest.mark.parametrize(
    ("returns", "a_clip", "expected"),
    [
        # halves (1, 0) and (0, 1) have the same moments
        ([1.0, 0.0, 0.0, 1.0], math.inf, 0.0),
        # halves (1, 1) and (0, 0): mu differs by 1, deviations are both 0; sigma = 1/2, e = 1 / (1/2) / 2 = 1
        ([1.0, 0.0, 1.0, 0.0], math.inf, 1.0),
        # the same with a = +-1, clipped at 1.5: |clip(2) - clip(0)| / 2 = 0.75
        ([1.0, 0.0, 1.0, 0.0], 1.5, 0.75),
        # halves (3, 1) and (1, 1): mu 2 and 1, deviations 1 and 0; sigma = sqrt(3)/2, a = (sqrt 3, 3 x -1/sqrt 3)
        # e = (1 + a) / (2 sigma), all positive, and a averages to 0: mean e = 1 / (2 sigma) = 1/sqrt 3
        ([3.0, 1.0, 1.0, 1.0], math.inf, 1.0 / math.sqrt(3.0)),
        # two rollouts: halves 1 and 0, sigma 1/2, e = 1: all of a = +-1 is luck
        ([1.0, 0.0], math.inf, 1.0),
        # three rollouts: halves (3, 1) and (0): mu differs by 2, and only that is counted, not the deviations 1 and 0
        # mu = 4/3, variance (25 + 16 + 1) / 27 = 14/9; e = 2 / (sqrt 14 / 3) * sqrt(2 * 1) / 3 = 2 / sqrt 7
        ([3.0, 0.0, 1.0], math.inf, 2.0 / math.sqrt(7.0)),
        # one rollout is never informative
        ([1.0], math.inf, 0.0),
    ],
)
def test_zeta_norm_by_hand(returns: list[float], a_clip: float, expected: float) -> None:
    assert zeta_norm([returns], a_clip, 0.0) == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_zeta_norm_without_normalisation_by_hand() -> None:
    # halves (3, 1) and (1, 1): |2 - 1| / 2
    assert zeta_norm([[3.0, 1.0, 1.0, 1.0]], math.inf, 1e-6, normalize=False) == pytest.approx(0.5, rel=1e-15)


def test_epsilon_counts_in_the_deviations_of_zeta_norm() -> None:
    # halves (1, 1) and (0, 0), eps = 2: sigma = sqrt(1/4 + 2) = 1.5, e = 1 / 1.5 / 2 = 1/3
    assert zeta_norm([[1.0, 0.0, 1.0, 0.0]], math.inf, 2.0) == pytest.approx(1 / 3, rel=1e-13)


def test_groups_without_signal_or_without_sense_contribute_zero_to_zeta_norm() -> None:
    useful = [1.0, 0.0, 1.0, 0.0]  # 1, by hand above
    batch = [useful, [5.0] * 4, [math.nan, 0.0, 1.0, 1.0], [math.inf] * 4]
    assert zeta_norm(batch, math.inf, 0.0) == pytest.approx(0.25, rel=1e-13)
    assert zeta_norm(batch[1:], 3.0, 0.0) == 0.0


def test_zeta_norm_of_sparse_rewards_is_not_blown_up_by_a_constant_half() -> None:
    # one success in eight: the odd half is constant; its own deviation, 1e-3, would give hundreds
    assert zeta_norm([[1.0] + [0.0] * 7], math.inf, 1e-6) < 1.0


def test_zeta_norm_measures_the_error_of_the_group_mean() -> None:
    """Without normalization and for normal returns, exactly: (mu_even - mu_odd) / 2 is distributed like mu_G - mu,
    so the expectation is E|mu_G - mu| = sigma sqrt(2 / (pi G))."""
    rng, group_size = np.random.default_rng(0), 8
    returns_PG = 5.0 + 2.0 * rng.standard_normal((20000, group_size))
    expected = 2.0 * math.sqrt(2.0 / (math.pi * group_size))
    deviation = 2.0 / math.sqrt(group_size) * math.sqrt(1.0 - 2.0 / math.pi)
    got = zeta_norm(returns_PG, math.inf, 0.0, normalize=False)
    assert abs(got - expected) < 4 * deviation / math.sqrt(20000)


@pytest.mark.parametrize("group_size", [15, 16])
def test_zeta_norm_measures_the_error_of_the_normalised_advantage(group_size: int) -> None:
    """Against what it stands for: mean |a with the group's moments - a with the true ones|, which only a simulation
    knows. First order in 1/sqrt(G), so within a tenth at G = 16, odd groups alike."""
    returns_PG = 5.0 + 2.0 * np.random.default_rng(1).standard_normal((20000, group_size))
    used = group_advantages(returns_PG, a_clip=math.inf, eps_norm=0.0).raw_PG
    truth = (returns_PG - 5.0) / 2.0
    assert zeta_norm(returns_PG, math.inf, 0.0) == pytest.approx(float(np.abs(used - truth).mean()), rel=0.1)
