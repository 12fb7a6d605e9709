"""Group-normalized advantages against hand arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from teamtr.batches import RolloutBatch
from teamtr.theory.advantages import discounted_return, group_advantages
from teamtr.theory.estimators import GroupAdvantage
from teamtr.types import Episode, Problem, Turn, Verdict


def test_discounted_return_by_hand() -> None:
    # 1 + 0.5 * 2 + 0.25 * 4 = 3
    assert discounted_return([1.0, 2.0, 4.0], 0.5) == 3.0
    assert discounted_return([1.0, 2.0, 4.0], 1.0) == 7.0
    assert discounted_return([1.0, 2.0, 4.0], 0.0) == 1.0  # 0 ** 0 = 1: the first turn counts
    assert discounted_return([], 0.9) == 0.0


def test_discounted_return_refuses_bad_input() -> None:
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], got 1.5"):
        discounted_return([1.0], 1.5)
    with pytest.raises(ValueError, match="one axis"):
        discounted_return([[1.0]], 0.9)


def test_discounted_return_agrees_with_a_batch_of_terminal_rewards() -> None:
    def turn(k: int) -> Turn:
        ids = np.zeros(1, np.int32)
        return Turn("a", k, ids, ids, np.zeros(1, np.float32), "stop", "v", "x")

    episodes = tuple(
        Episode("p", g, tuple(turn(k) for k in range(n)), "x", Verdict("right", 2.0), "v") for g, n in enumerate((1, 3))
    )
    batch = RolloutBatch((Problem("p", "?"),), episodes, 2)
    expected = [discounted_return([2.0], 0.9), discounted_return([0.0, 0.0, 2.0], 0.9)]
    np.testing.assert_allclose(batch.returns_PG(0.9), [expected], rtol=1e-15)


def test_population_deviation_with_epsilon_inside_the_root() -> None:
    # mu = 1, deviations (-1, -1, 1, 1), population variance 1, sigma = sqrt(1 + 3) = 2
    got = group_advantages([[0.0, 0.0, 2.0, 2.0]], a_clip=3.0, eps_norm=3.0)
    np.testing.assert_array_equal(got.values_PG, [[-0.5, -0.5, 0.5, 0.5]])
    np.testing.assert_array_equal(got.raw_PG, got.values_PG)
    assert got.clip_rate == 0.0
    assert got.informative_P.tolist() == [True]
    assert got.non_finite_P.tolist() == [False]


def test_clipping_by_hand() -> None:
    # mu = 1/4, variance 3/16, sigma = sqrt(3)/4: (3/4) / sigma = sqrt(3), (-1/4) / sigma = -1/sqrt(3) = -0.577
    got = group_advantages([[1.0, 0.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]], a_clip=1.5, eps_norm=0.0)
    np.testing.assert_allclose(got.raw_PG[0], [math.sqrt(3.0)] + 3 * [-1.0 / math.sqrt(3.0)], rtol=1e-15)
    np.testing.assert_allclose(got.values_PG[0], [1.5] + 3 * [-1.0 / math.sqrt(3.0)], rtol=1e-15)
    assert got.clip_rate == 0.25  # one of the four rollouts of the one informative group, not one of eight


def test_without_normalisation_only_the_mean_goes_and_clipping_stays() -> None:
    # mu = 3: deviations (-3, -2, 5)
    got = group_advantages([[0.0, 1.0, 8.0]], a_clip=4.0, eps_norm=1e-6, normalize=False)
    np.testing.assert_array_equal(got.raw_PG, [[-3.0, -2.0, 5.0]])
    np.testing.assert_array_equal(got.values_PG, [[-3.0, -2.0, 4.0]])
    assert got.clip_rate == 1 / 3


def test_infinite_clip_never_clips() -> None:
    got = group_advantages([[0.0] * 99 + [1.0]], a_clip=math.inf, eps_norm=0.0)
    assert got.values_PG[0, -1] == pytest.approx(math.sqrt(99.0), rel=1e-12)
    assert got.clip_rate == 0.0


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("eps_norm", [0.0, 1e-6])
def test_equal_returns_are_exactly_zero_and_finite(normalize: bool, eps_norm: float) -> None:
    # the mean of seven times 0.1 is not 0.1 in binary: without care the difference, 1e-17, would be normalized
    got = group_advantages([[0.1] * 7, [1.0] + [0.0] * 6], a_clip=3.0, eps_norm=eps_norm, normalize=normalize)
    assert (got.values_PG[0] == 0.0).all()
    assert (got.raw_PG[0] == 0.0).all()
    assert got.informative_P.tolist() == [False, True]
    assert got.non_finite_P.tolist() == [False, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e308, 1e200])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_non_finite_group_is_silenced_and_counted_and_the_next_is_untouched(bad: float, everywhere: bool) -> None:
    # 1e308 overflows in the sum, 1e200 in the square: the returns are finite, their normalized form is not
    first = [bad] * 4 if everywhere else [bad, -bad, 0.0, 1.0]
    got = group_advantages([first, [0.0, 0.0, 2.0, 2.0]], a_clip=3.0, eps_norm=0.0)
    finite_and_equal = everywhere and math.isfinite(bad)
    assert (got.values_PG[0] == 0.0).all()
    assert (got.raw_PG[0] == 0.0).all()
    assert got.non_finite_P.tolist() == [not finite_and_equal, False]
    assert got.informative_P.tolist() == [False, True]
    np.testing.assert_array_equal(got.values_PG[1], [-1.0, -1.0, 1.0, 1.0])


def test_bad_settings_are_refused() -> None:
    good = [[0.0, 1.0]]
    with pytest.raises(ValueError, match="P x G"):
        group_advantages([0.0, 1.0], a_clip=3.0, eps_norm=0.0)
    for a_clip in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="a_clip must be positive"):
            group_advantages(good, a_clip=a_clip, eps_norm=0.0)
    for eps_norm in (-1e-6, math.nan, math.inf):
        with pytest.raises(ValueError, match="eps_norm"):
            group_advantages(good, a_clip=3.0, eps_norm=eps_norm)


returns = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(-100, 100, width=16))


@pytest.mark.long
@settings(max_examples=100)
@given(returns, st.floats(0.1, 5.0))
def test_informative_groups_are_centred_standardised_and_bounded(returns_PG: np.ndarray, a_clip: float) -> None:
    got = group_advantages(returns_PG, a_clip=a_clip, eps_norm=1e-6)
    group_size = returns_PG.shape[1]
    np.testing.assert_allclose(got.raw_PG.mean(axis=1), 0.0, atol=1e-9)
    variance_P = returns_PG.var(axis=1)
    # raw has variance var / (var + eps) by eq:group_adv
    np.testing.assert_allclose(got.raw_PG.var(axis=1), variance_P / (variance_P + 1e-6), atol=1e-9)
    assert (np.abs(got.values_PG) <= a_clip).all()
    assert (np.abs(got.raw_PG) <= math.sqrt(group_size - 1) + 1e-9).all()  # Samuelson
    assert not got.non_finite_P.any()
    assert got.informative_P.tolist() == [len(set(row)) > 1 for row in returns_PG.tolist()]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("clip", [1.5, 3.0, math.inf])
def test_no_advantage_exceeds_the_largest_that_certificates_assume(normalize: bool, clip: float) -> None:
    estimator = GroupAdvantage(normalize=normalize, clip=clip)
    one_right = [[100.0, *[0.0] * 7]]  # normalized: sqrt(7) = 2.6; otherwise 87.5, before clipping
    found = float(np.abs(estimator.estimate(np.array(one_right)).values_PG).max())
    assert found == pytest.approx(min(clip, math.sqrt(7.0) if normalize else 87.5), rel=1e-6)
    assert found <= estimator.largest(8, 100.0)
    # A true advantage in units of reward is as large as rewards: that of one right episode in a million is almost 100.
    assert estimator.largest(8, 100.0) == (min(clip, math.sqrt(7.0)) if normalize else 100.0)
