"""Evaluation statistics against hand-computed values, enumeration and simulation."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from teamtr.evaluation.metrics import (
    avg_at_k,
    bootstrap_interval,
    consensus_on_correct,
    majority_at_k,
    over_seeds,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    share_interval,
    summarise,
)
from teamtr.reports import Interval
from teamtr.sweep.problems import difference_by_seed
from teamtr.types import Verdict

RIGHT = Verdict("right", 1.0)
WRONG = Verdict("wrong", 0.25)


def test_avg_at_k_by_hand() -> None:
    assert avg_at_k([[1, 0, 1, 1], [0, 0, 0, 1]]) == 0.5
    with pytest.raises(ValueError, match="problems x samples"):
        avg_at_k([1, 0])


def test_pass_at_k_by_hand() -> None:
    # 1 - C(3,3)/C(5,3) = 1 - 1/10
    assert pass_at_k([2], n=5, k=3) == pytest.approx([0.9], abs=1e-15)
    # k = 1 is the average; k = n is "at least one".
    assert pass_at_k([0, 1, 5], n=5, k=1) == pytest.approx([0.0, 0.2, 1.0], abs=1e-15)
    assert pass_at_k([0, 1, 5], n=5, k=5).tolist() == [0.0, 1.0, 1.0]


def test_pass_at_k_equals_enumeration_of_all_subsets() -> None:
    n = 7
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k([c], n, k)[0] == pytest.approx(share, abs=1e-14)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over all outcomes of n samples is the chance that k samples hold a right one, exactly."""
    n, k, p = 9, 4, 0.3
    chance_c = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert np.dot(chance_c, pass_at_k(np.arange(n + 1), n, k)) == pytest.approx(1 - (1 - p) ** k, abs=1e-14)
    # The obvious estimate, 1 - (1 - c/n)^k, is not.
    plug_in = [1 - (1 - c / n) ** k for c in range(n + 1)]
    assert abs(np.dot(chance_c, plug_in) - (1 - (1 - p) ** k)) > 0.02


def test_pass_at_k_is_stable_where_binomials_overflow() -> None:
    n, c, k = 4000, 3, 1500
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k([c], n, k)[0] == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(("correct", "n", "k"), [([1], 4, 5), ([1], 4, 0), ([5], 4, 2), ([-1], 4, 2)])
def test_pass_at_k_refuses_the_impossible(correct: list[int], n: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(correct, n, k)


def test_pass_hat_k_by_hand() -> None:
    # C(3,2)/C(5,2) = 3/10; C(4,3)/C(6,3) = 4/20
    assert pass_hat_k([3], n=5, k=2) == pytest.approx([0.3], abs=1e-15)
    assert pass_hat_k([4], n=6, k=3) == pytest.approx([0.2], abs=1e-15)
    # k = 1 is the average; k = n is "all of them"; fewer right ones than k are never k.
    assert pass_hat_k([0, 1, 5], n=5, k=1) == pytest.approx([0.0, 0.2, 1.0], abs=1e-15)
    assert pass_hat_k([0, 4, 5], n=5, k=5).tolist() == [0.0, 0.0, 1.0]
    assert pass_hat_k([1], n=5, k=2).tolist() == [0.0]


def test_pass_hat_k_equals_enumeration_of_all_subsets() -> None:
    n = 7
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            share = sum(all(subset) for subset in subsets) / len(subsets)
            assert pass_hat_k([c], n, k)[0] == pytest.approx(share, abs=1e-14)


def test_pass_hat_k_is_unbiased() -> None:
    """Its mean over all outcomes of n samples is the chance that k samples are all right, exactly."""
    n, k, p = 9, 4, 0.7
    chance_c = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert np.dot(chance_c, pass_hat_k(np.arange(n + 1), n, k)) == pytest.approx(p**k, abs=1e-14)
    # The obvious estimate, (c/n)^k, is not.
    assert np.dot(chance_c, [(c / n) ** k for c in range(n + 1)]) - p**k > 0.02


@pytest.mark.parametrize(("correct", "n", "k"), [([1], 4, 5), ([1], 4, 0), ([5], 4, 2), ([-1], 4, 2)])
def test_pass_hat_k_refuses_the_impossible(correct: list[int], n: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_hat_k(correct, n, k)


def test_majority_by_hand() -> None:
    answers: list[list[str | None]] = [
        ["4", "4", "5"],  # right by two votes
        ["4", "5", "5"],  # wrong by two votes
        ["4", "5", None],  # a tie, half right
        [None, None, "4"],  # those without an answer do not vote
        [None, None, None],
    ]
    right = [[answer == "4" for answer in row] for row in answers]
    assert majority_at_k(answers, right).tolist() == [1.0, 0.0, 0.5, 1.0, 0.0]


def test_consensus_by_hand() -> None:
    episodes: list[list[bool | None]] = [
        [True, True, True],
        [True, None, True],
        [True, False, True],
        [None, None],
        [None, False],
    ]
    assert consensus_on_correct(episodes) == 2 / 5
    with pytest.raises(ValueError, match="one episode"):
        consensus_on_correct([])


def test_bootstrap_interval_is_that_of_the_binomial_it_resamples() -> None:
    """Resampling 64 zeros and 36 ones gives a binomial(100, 0.36) / 100, whose 95 % range is known."""
    from scipy.stats import binom

    values = np.array([1.0] * 36 + [0.0] * 64)
    found = bootstrap_interval(values, 0.95, 20_000, rng=np.random.default_rng(0))
    assert found.low == pytest.approx(binom.ppf(0.025, 100, 0.36) / 100, abs=0.0101)
    assert found.high == pytest.approx(binom.ppf(0.975, 100, 0.36) / 100, abs=0.0101)
    again = bootstrap_interval(values, 0.95, 20_000, rng=np.random.default_rng(0))
    assert found == again


@pytest.mark.long
def test_bootstrap_interval_covers_at_its_confidence() -> None:
    """Problems of beta-distributed difficulty, K = 4 samples each: the interval of avg@4 holds the true mean."""
    rng = np.random.default_rng(7)
    trials, problems = 400, 60
    for confidence in (0.95, 0.8):
        covered = 0
        for _ in range(trials):
            difficulty_P = rng.beta(1.0, 2.0, size=problems)
            values_P = rng.binomial(4, difficulty_P) / 4
            interval = bootstrap_interval(values_P, confidence, 300, rng=rng)
            covered += interval.low <= 1 / 3 <= interval.high
        # Four standard errors of the count, and the percentile bootstrap's known shortfall of about 1 % at P = 60.
        error = 4 * math.sqrt(confidence * (1 - confidence) / trials)
        assert confidence - 0.015 - error < covered / trials < confidence + error


@pytest.mark.long
def test_resampling_single_samples_would_not_cover() -> None:
    """Why problems are resampled: samples of one problem are alike; to treat them as independent is overconfident."""
    rng = np.random.default_rng(8)
    covered = 0
    for _ in range(100):
        values_PK = rng.binomial(1, rng.beta(0.2, 0.4, size=(30, 1)), size=(30, 8))
        interval = bootstrap_interval(values_PK.ravel().astype(float), 0.95, 200, rng=rng)
        covered += interval.low <= 1 / 3 <= interval.high
    assert covered / 100 < 0.8


def test_share_interval_does_not_claim_certainty() -> None:
    rng = np.random.default_rng(0)
    assert share_interval(np.ones(30), rng=rng) == pytest.approx((0.05 ** (1 / 30), 1.0))
    assert share_interval(np.zeros(30), rng=rng) == pytest.approx((0.0, 1 - 0.05 ** (1 / 30)))
    assert share_interval([0.5], rng=rng) == pytest.approx((0.025, 0.975))
    mixed = [0.0, 1.0, 0.5, 1.0]
    assert share_interval(mixed, rng=np.random.default_rng(1)) == bootstrap_interval(
        mixed, rng=np.random.default_rng(1)
    )
    with pytest.raises(ValueError, match="shares lie in"):
        share_interval([0.0, 1.5], rng=rng)


@pytest.mark.long
def test_share_interval_covers_when_success_is_nearly_certain() -> None:
    """Chance 0.97, 20 problems: more than half of all evaluations see nothing but successes. The bootstrap alone then
    misses the truth; the share interval holds it."""
    rng = np.random.default_rng(3)
    plain = honest = 0
    for _ in range(400):
        values_P = (rng.random(20) < 0.97).astype(float)
        low, high = bootstrap_interval(values_P, 0.95, 200, rng=rng)
        plain += low <= 0.97 <= high
        low, high = share_interval(values_P, 0.95, 200, rng=rng)
        honest += low <= 0.97 <= high
    assert plain / 400 < 0.6
    assert honest / 400 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400)


def test_bootstrap_refuses_what_has_no_problems() -> None:
    for values, confidence in (([], 0.95), ([[1.0]], 0.95), ([1.0], 1.0)):
        with pytest.raises(ValueError):
            bootstrap_interval(values, confidence, rng=np.random.default_rng(0))


def test_summarise_by_hand() -> None:
    verdicts = [
        [RIGHT, WRONG, RIGHT, WRONG],
        [WRONG, WRONG, Verdict("crash", math.nan), Verdict("timeout", 0.0)],
    ]
    answers: list[list[str | None]] = [["a", "b", "a", "c"], ["x", "x", None, None]]
    stated: list[list[list[bool | None]]] = [[[True, True], [False, True], [None, True], [None, None]], [[False]] * 4]
    report = summarise(verdicts, answers, stated, np.random.default_rng(0))
    assert (report.problems, report.samples) == (2, 4)
    assert report.avg_at_k == 0.25
    # c = 2 of 4: pass@1 = 1/2, pass@2 = 1 - 1/6, pass@4 = 1; c = 0: nothing.
    assert report.pass_at_k == pytest.approx({1: 0.25, 2: 5 / 12, 4: 0.5})
    # pass^1 = 1/2, pass^2 = C(2,2)/C(4,2) = 1/6, pass^4 = 0; c = 0: nothing.
    assert report.pass_hat_k == pytest.approx({1: 0.25, 2: 1 / 12, 4: 0.0})
    assert set(report.pass_hat_intervals) == {1, 2, 4}
    assert report.majority_at_k == 0.5
    assert report.consensus_on_correct == 2 / 8
    assert report.mean_reward == pytest.approx((2 + 4 * 0.25) / 7)
    assert report.rewards_non_finite == 1
    assert report.verdicts == {"right": 2, "wrong": 4, "crash": 1, "timeout": 1}
    assert report.avg_interval == Interval(0.0, 0.5)
    assert set(report.pass_intervals) == {1, 2, 4}
    assert all(report.pass_intervals[k].low <= report.pass_at_k[k] <= report.pass_intervals[k].high for k in (1, 2, 4))


def test_summarise_defaults_and_refusals() -> None:
    rng = np.random.default_rng(0)
    one = summarise([[RIGHT] * 6], [["a"] * 6], None, rng)
    assert list(one.pass_at_k) == [1, 2, 4, 6]
    assert one.consensus_on_correct is None
    assert one.avg_interval == pytest.approx((0.05, 1.0))
    assert list(summarise([[RIGHT]], [["a"]], None, rng, ks=[1]).pass_at_k) == [1]
    with pytest.raises(ValueError, match="at least one problem"):
        summarise([], [], None, rng)
    with pytest.raises(ValueError, match="equally many"):
        summarise([[RIGHT], [RIGHT, WRONG]], [["a"], ["a", "b"]], None, rng)


def test_a_paired_difference_takes_out_what_makes_problems_hard() -> None:
    """Problems from 0 to 1, and one method better by 0.1 on each second one: 0.05, hidden in intervals of 0.2."""
    hard_P = np.linspace(0.0, 0.9, 40)
    better_P = hard_P + 0.1 * (np.arange(40) % 2)
    found = paired_difference(better_P, hard_P, rng=np.random.default_rng(0))
    assert found.value == pytest.approx(0.05)
    # The mean of 40 fair draws of 0 or 0.1: 0.05, give or take 0.1 * 0.5 / sqrt(40) = 0.0079 twice.
    assert found.interval == pytest.approx((0.05 - 1.96 * 0.0079, 0.05 + 1.96 * 0.0079), abs=0.004)
    alone = share_interval(better_P, rng=np.random.default_rng(0))
    assert alone.high - alone.low > 0.15
    reverse = paired_difference(hard_P, better_P, rng=np.random.default_rng(0))
    assert reverse.value == -found.value


def test_a_paired_difference_of_equal_values_is_not_certain() -> None:
    found = paired_difference([1.0, 1.0], [1.0, 1.0], rng=np.random.default_rng(0))
    q = 0.05 ** (1 / 2)
    assert found.value == 0.0
    assert found.interval == pytest.approx((-(1 - q), 1 - q))
    with pytest.raises(ValueError, match="the same problems"):
        paired_difference([1.0], [1.0, 0.0], rng=np.random.default_rng(0))


def test_differences_that_are_equal_but_for_rounding_are_not_certain_either() -> None:
    found = paired_difference([1.0, 2 / 3], [2 / 3, 1 / 3], rng=np.random.default_rng(0))
    q = 0.05 ** (1 / 2)
    assert 1.0 - 2 / 3 != 2 / 3 - 1 / 3
    assert found.value == pytest.approx(1 / 3)
    assert found.interval == pytest.approx((q / 3 - (1 - q), q / 3 + (1 - q)))
    apart = difference_by_seed({0: {"a": 1.0, "b": 2 / 3}}, {0: {"a": 2 / 3, "b": 1 / 3}})
    assert apart is not None
    assert apart.interval == pytest.approx(found.interval)


def test_mean_and_deviation_over_seeds_by_hand() -> None:
    assert over_seeds([0.25, 0.5, 0.75]) == (0.5, 0.25)
    assert over_seeds([0.5]) == (0.5, None)
    with pytest.raises(ValueError, match="at least one"):
        over_seeds([])


def test_tables_and_measures_by_hand() -> None:
    right, wrong = Verdict("right", 1.0, "a"), Verdict("wrong", 0.25, "b")
    verdicts_PK = [[right, wrong], [wrong, wrong], [right, right]]
    report = summarise(
        verdicts_PK,
        [["a", "b"], ["b", "b"], ["a", "a"]],
        None,
        np.random.default_rng(0),
        labels_P=[{"size": "3*10"}, {"size": "3*9"}, {"size": "3*10", "subject": "x"}],
        measures_PK=[[{"cells": 0.5}, {"cells": 1.0}], [{"cells": 0.0}, {"cells": 0.0}], [{"cells": 1.0}] * 2],
    )
    assert list(report.tables) == ["size", "subject"]
    assert list(report.tables["size"]) == ["3*9", "3*10"], "by number, not by letter"
    ten, nine = report.tables["size"]["3*10"], report.tables["size"]["3*9"]
    assert (ten.problems, ten.avg_at_k, ten.pass_at_k) == (2, 0.75, 1.0)
    assert (nine.problems, nine.avg_at_k, nine.pass_at_k) == (1, 0.0, 0.0)
    assert nine.avg_interval.high == pytest.approx(0.95), "one problem proves little"
    assert report.tables["subject"]["x"].avg_at_k == 1.0
    assert report.measures["cells"].value == pytest.approx((0.75 + 0.0 + 1.0) / 3)
    assert report.mean_reward == pytest.approx((1 + 0.25 * 3 + 2) / 6)
    assert report.reward_interval.low <= report.mean_reward <= report.reward_interval.high
    assert json.loads(json.dumps(report.as_record()))["tables"]["size"]["3*10"]["problems"] == 2
