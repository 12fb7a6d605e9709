"""Intervals of gains and the bound of the gate: by hand, at their edges, and how often they hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from teamtr.theory.intervals import (
    SharedDraws,
    bootstrap_upper,
    corrected_level,
    mean_interval,
    measured_gain,
    student_quantile,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_student_quantile_agrees_with_scipy() -> None:
    for degrees in (1, 2, 3, 4, 7, 30, 255, 1000):
        for probability in (0.025, 0.5, 0.6, 0.95, 0.999):
            expected = stats.t.ppf(probability, degrees)
            assert student_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_measured_gain_by_hand() -> None:
    # means before 0, 1/2, 1; after 1/2, 1, 1: differences 1/2, 1/2, 0: mean 1/3, deviation sqrt(1/12)
    got = measured_gain([[0, 0], [1, 0], [1, 1]], [[0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
    width = stats.t.ppf(0.975, 2) * math.sqrt(1 / 12) / math.sqrt(3)
    assert (got.estimate, got.lower, got.upper) == pytest.approx((1 / 3, 1 / 3 - width, 1 / 3 + width))
    assert got.problems == 3
    with pytest.raises(ValueError, match="same problems"):
        measured_gain([[0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="two problems"):
        measured_gain([[0.0, 1.0]], [[0.0, 1.0]])
    with pytest.raises(ValueError, match="needs rng"):
        measured_gain([[0.0], [1.0]], [[0.0], [1.0]], method="bootstrap")
    with pytest.raises(ValueError, match="bound"):
        measured_gain([[0.0], [1.0]], [[0.0], [1.0]], method="bernstein")


def test_a_problem_that_occurs_twice_counts_as_one() -> None:
    """Twice the same two problems are no four; unequal counts keep the mean over rows, 7/3 of 1, 3 and 3."""
    assert mean_interval([1.0, 3.0, 1.0, 3.0], problem_P=[0, 1, 0, 1]) == mean_interval([1.0, 3.0])
    assert mean_interval([1.0, 3.0, 3.0], problem_P=[4, 9, 9]) == mean_interval([2 / 3, 4.0])
    with pytest.raises(ValueError, match="two problems"):
        mean_interval([1.0, 3.0], problem_P=[5, 5])


@pytest.mark.long
def test_measured_intervals_cover() -> None:
    """64 problems of unequal difficulty, 8 episodes before and after: 95 % intervals hold in about 95 % of batches."""
    draw = rng(5)
    trials, problems, group, gain = 300, 64, 8, 0.03
    held = {"t": 0, "bootstrap": 0, "bernstein": 0}
    widths = {"paired": 0.0, "unpaired": 0.0}
    for _ in range(trials):
        rate = draw.uniform(0.1, 0.85, size=(problems, 1))
        before = (draw.random((problems, group)) < rate).astype(float)
        after = (draw.random((problems, group)) < rate + gain).astype(float)
        for method in held:
            got = measured_gain(before, after, method=method, reward_range=1.0, rng=draw)
            held[method] += got.lower <= gain <= got.upper
            if method == "t":
                widths["paired"] += got.upper - got.lower
        unpaired = measured_gain(before, after[draw.permutation(problems)])
        widths["unpaired"] += unpaired.upper - unpaired.lower
    # 300 trials: a standard error of 1.3 %
    assert 0.91 < held["t"] / trials < 0.98
    assert 0.89 < held["bootstrap"] / trials < 0.98
    assert held["bernstein"] / trials > 0.99
    assert widths["paired"] < 0.75 * widths["unpaired"]


def test_bernstein_interval_by_hand() -> None:
    # V = 0.02 with denominator N - 1; sqrt(2 V log(80) / 4) + 7 * 2 * log(80) / (3 * 3) for two sides at 95 %
    values = [0.1, -0.1, 0.1, 0.3]
    variance = float(np.var(values, ddof=1))
    width = math.sqrt(2 * variance * math.log(80) / 4) + 14 * math.log(80) / 9
    got = mean_interval(values, method="bernstein", bound=1.0)
    assert got.upper - got.estimate == pytest.approx(width)
    assert mean_interval([0.0, 0.0], method="bernstein", bound=0.0).upper == 0.0


# -- the gate's bound ----------------------------------------------------------------------------------------


def test_bootstrap_by_hand_two_problems() -> None:
    # one message of KL 1 and three of KL 0, two problems: draws AA, AB, BB with probability 1/4, 1/2, 1/4 have the
    # ratio of sums 1/1, 1/4, 0/6; the cumulative probability is 0.25 at 0, 0.75 at 0.25, 1 at 1
    kl_M, problem_M = [1.0, 0.0, 0.0, 0.0], [7, 3, 3, 3]
    assert bootstrap_upper(kl_M, problem_M, confidence=0.95, rng=rng()) == 1.0
    assert bootstrap_upper(kl_M, problem_M, confidence=0.6, rng=rng()) == 0.25
    # the 10 % quantile is 0, below the mean: the mean is returned
    assert bootstrap_upper(kl_M, problem_M, confidence=0.1, rng=rng()) == 0.25


def test_bounds_that_share_their_draws_are_those_of_one_generator() -> None:
    """Each bound draws as if it were alone, and equally many problems are drawn once."""
    made: list[np.random.Generator] = []

    def begin() -> np.random.Generator:
        made.append(rng(2))
        return made[-1]

    value_M, problem_M = rng(1).random((2, 24)), np.arange(24) // 3
    draws = SharedDraws(begin)
    for values in value_M:
        assert bootstrap_upper(values, problem_M, rng=draws) == bootstrap_upper(values, problem_M, rng=rng(2))
    assert len(made) == 1
    fewer = slice(0, 12)
    alone = bootstrap_upper(value_M[0][fewer], problem_M[fewer], rng=rng(2))
    assert bootstrap_upper(value_M[0][fewer], problem_M[fewer], rng=draws) == alone
    assert len(made) == 2


def test_bootstrap_edge_cases() -> None:
    assert bootstrap_upper(np.zeros(12), np.arange(12) // 3, rng=rng()) == 0.0
    assert bootstrap_upper([0.1, 0.5, 0.2], [4, 4, 4], rng=rng()) == 0.5  # one problem: the largest
    for bad in (math.nan, math.inf):
        assert bootstrap_upper([0.1, bad], [0, 1], rng=rng()) == math.inf
    with pytest.raises(ValueError, match="at least one message"):
        bootstrap_upper([], [], rng=rng())
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_upper([0.1], [0], confidence=1.0, rng=rng())
    with pytest.raises(ValueError, match="one problem number each"):
        bootstrap_upper([0.1], [0, 1], rng=rng())


def test_bootstrap_is_reproducible_and_blind_to_order_and_names() -> None:
    data = rng(1)
    kl_M, problem_M = data.exponential(size=60), np.arange(60) // 4
    upper = bootstrap_upper(kl_M, problem_M, rng=rng(2))
    assert bootstrap_upper(kl_M, problem_M, rng=rng(2)) == upper
    assert bootstrap_upper(kl_M, problem_M, rng=rng(3)) != upper
    # another order of messages changes nothing but rounding; neither do other names that sort alike
    order = data.permutation(60)
    assert bootstrap_upper(kl_M[order], 10 * problem_M[order] + 5, rng=rng(2)) == pytest.approx(upper, rel=1e-12)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 4)), min_size=1, max_size=20),
    st.floats(0.01, 0.99),
)
def test_bootstrap_is_never_below_the_mean_nor_above_the_worst(rows: list[tuple[float, int]], level: float) -> None:
    kl_M, problem_M = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    upper = bootstrap_upper(kl_M, problem_M, confidence=level, draws=50, rng=rng())
    assert kl_M.mean() <= upper <= kl_M.max() * (1 + 1e-12) + 1e-300


@pytest.mark.long
def test_bootstrap_covers_the_true_mean_when_problems_are_resampled() -> None:
    """400 batches of 60 problems x 4 messages that share their problem's luck: 95 % within three standard errors.

    The control resamples messages as if they were independent, and covers far too little.
    """
    data, draw, batches = rng(11), rng(12), 400
    by_problem = by_message = 0
    for _ in range(batches):
        problem_kl_P = 1.0 + 0.3 * data.standard_normal(60)
        kl_M = np.repeat(problem_kl_P, 4) + 0.05 * data.standard_normal(240)
        by_problem += bootstrap_upper(kl_M, np.arange(240) // 4, draws=200, rng=draw) >= 1.0
        by_message += bootstrap_upper(kl_M, np.arange(240), draws=200, rng=draw) >= 1.0
    standard_error = math.sqrt(0.95 * 0.05 / batches)  # 0.011
    assert abs(by_problem / batches - 0.95) < 3 * standard_error
    # deviations half as wide as they should be: Phi(1.645 / 2) = 0.79
    assert by_message / batches < 0.87


@pytest.mark.long
def test_bootstrap_agrees_with_the_normal_bound_for_many_problems() -> None:
    # one message a problem: the bootstrap deviation of the mean is the population deviation / sqrt(P)
    kl_M = 1.0 + 0.2 * rng(5).standard_normal(400)
    expected = kl_M.mean() + 1.6449 * kl_M.std() / math.sqrt(400)
    got = bootstrap_upper(kl_M, np.arange(400), draws=10000, rng=rng(6))
    # the standard error of a 95 % quantile of n normal draws is 2.11 sd / sqrt(n)
    assert abs(got - expected) < 4 * 2.11 * kl_M.std() / math.sqrt(400) / math.sqrt(10000) + 1e-4


# -- which quantile --------------------------------------------------------------------------------------------


def test_level_by_hand() -> None:
    # no bias (as many draws below the mean as above) and no skew: Student's deviate alone, widened
    means_D = np.array([-2.0, -1.0, 1.0, 2.0])
    influence_P = np.array([-1.0, 1.0])
    widened = math.sqrt(2.0) * math.tan(math.pi * 0.3)  # Student's with one degree of freedom, at 80 %
    assert corrected_level(0.8, means_D, 0.0, influence_P) == pytest.approx(stats.norm.cdf(widened))
    # one influence of 2 against two of -1: the sum of cubes is 6, of squares 6, the acceleration 6 / (6 * 6^1.5)
    skewed_P, skew = np.array([2.0, -1.0, -1.0]), 6.0**-1.5
    deviate = math.sqrt(1.5) * 0.6 / math.sqrt(2 * 0.8 * 0.2)  # two degrees of freedom
    expected = stats.norm.cdf(deviate / (1.0 - skew * deviate))
    assert corrected_level(0.8, means_D, 0.0, skewed_P) == pytest.approx(expected)
    # three draws of four below the mean: the mean of the draws is biased downwards
    assert corrected_level(0.5, means_D, 1.5, influence_P) == pytest.approx(stats.norm.cdf(2 * stats.norm.ppf(0.75)))


def test_level_is_one_where_the_skew_leaves_no_room_and_plain_where_nothing_varies() -> None:
    assert corrected_level(0.999, np.array([0.0, 0.0, 3.0]), 1.0, np.array([5.0] + [-0.01] * 5)) == 1.0
    assert corrected_level(0.9, np.zeros(100), 0.0, np.zeros(50)) == pytest.approx(0.9, abs=0.01)


@pytest.mark.long
def test_skewed_problems_are_covered_better_than_by_the_plain_quantile() -> None:
    """16 problems x 8 messages, unequal by log-deviations 0.5 and 1; 600 batches, standard error 1 %."""
    data, draw, held, plain = rng(21), rng(22), 0, 0
    problem_M = np.repeat(np.arange(16), 8)
    for _ in range(600):
        kl_PG = np.exp(data.normal(0, 0.5, (16, 1)) - 0.125) * np.exp(data.normal(0, 1, (16, 8)) - 0.5)
        held += bootstrap_upper(kl_PG.reshape(-1), problem_M, draws=300, rng=draw) >= 1.0
        drawn = draw.multinomial(16, np.full(16, 1 / 16), size=300) @ kl_PG.mean(1) / 16
        plain += max(kl_PG.mean(), np.quantile(drawn, 0.95, method="higher")) >= 1.0
    assert 0.87 < held / 600 < 0.95
    assert held > plain + 12
