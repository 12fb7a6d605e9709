"""Occupancy bounds: constants by hand, cases that attain them, and what they are not true of."""

from __future__ import annotations

import math

import numpy as np
import pytest

from teamtr.lab.verify import fork
from teamtr.theory.occupancy import (
    change_of_measure,
    cumulative_shift,
    discounted_sum,
    shift_by_kl,
    shift_by_max_tv,
    shift_by_tv,
    stale_gap,
    tv_by_kl,
)


def test_constants_by_hand() -> None:
    # gamma = 0.9: 2 gamma / (1 - gamma) = 18; sqrt(2) * 9 * 0.1 = 1.2728
    assert shift_by_max_tv(0.9, 0.1, 3.0) == pytest.approx(5.4)
    assert shift_by_tv(0.9, 0.02) == pytest.approx(0.36)
    assert shift_by_kl(0.9, 0.01) == pytest.approx(1.2727922061)
    # lem:expectedklpenalty writes the same constant as 2 gamma / (1 - gamma) * sqrt(kl / 2)
    assert shift_by_kl(0.7, 0.03, 2.0) == pytest.approx(2 * 0.7 / 0.3 * math.sqrt(0.015) * 2.0)
    # sqrt(0.01) + sqrt(0.04) = 0.3; eq:stale_surrogate_gap divides by 1 - gamma once more
    assert cumulative_shift(0.5, [0.01, 0.04]) == pytest.approx(math.sqrt(2) * 0.3)
    assert stale_gap(0.5, [0.01, 0.04], 5.0) == pytest.approx(math.sqrt(2) * 0.3 * 5.0 * 2.0)
    assert stale_gap(0.5, np.zeros((3, 0)), 5.0).tolist() == [0.0, 0.0, 0.0]


def test_arrays_over_teams() -> None:
    got = cumulative_shift(np.array([0.5, 0.9]), np.array([[0.01, 0.04], [0.0, 0.01]]), np.array([1.0, 2.0]))
    assert got == pytest.approx([math.sqrt(2) * 0.3, math.sqrt(2) * 9 * 0.1 * 2])


def test_an_estimate_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="sampled k1"):
        shift_by_kl(0.9, -1e-4)
    with pytest.raises(ValueError, match="axis of steps"):
        cumulative_shift(0.9, 0.01)


def test_a_fork_attains_the_expected_tv_bound() -> None:
    """lem:occexp with equality, lem:occ up to 1 / sqrt(1 - gamma) for a small step from 1/2."""
    stage = fork(np.random.default_rng(0), 400)
    step = stage.steps[0]
    gamma = step.old.gamma_B
    moved = np.abs(step.new.occupancy_BS - step.old.occupancy_BS).sum(axis=1)
    assert shift_by_tv(gamma, step.tv_B) == pytest.approx(moved, rel=1e-9)
    small = (step.kl_B < 1e-4) & (np.abs(step.old.policy_BSA[:, 0, 0] - 0.5) < 1e-9)
    assert small.sum() > 10
    ratio = shift_by_kl(gamma, step.kl_B)[small] / moved[small]
    assert ratio == pytest.approx(1.0 / np.sqrt(1.0 - gamma[small]), rel=1e-3)


def test_the_monitor_is_not_the_radius() -> None:
    """eq:emp_tok_kl (mean over an agent's messages) in the place of D_tok (eq:tr) breaks lem:occ.

    The agent decides at its first message and then says 99 more that do not change: the mean KL per message is a
    hundredth of the first one's, D_tok is 1 - gamma of it.
    """
    stage = fork(np.random.default_rng(1), 200)
    step = stage.steps[0]
    gamma = step.old.gamma_B
    monitor = step.kl_BS[:, 0] / 100
    moved = np.abs(step.new.occupancy_BS - step.old.occupancy_BS).sum(axis=1)
    half = (gamma == 0.5) & (np.abs(step.old.policy_BSA[:, 0, 0] - 0.5) < 1e-9)
    assert half.sum() > 5
    assert (moved[half] > 2.0 * shift_by_kl(gamma, monitor)[half]).all()
    assert (moved <= shift_by_kl(gamma, step.kl_B) * (1 + 1e-9)).all()


def test_the_series_by_hand() -> None:
    # Two states, 0 -> 1 -> 1: g = (3, 5), gamma = 1/2: (1/2) (3 + 5/2 + 5/4 + ...) = (1/2) (3 + 5) = 4
    kernel = np.array([[[0.0, 1.0], [0.0, 1.0]]])
    got = discounted_sum(kernel, np.array([[1.0, 0.0]]), np.array([0.5]), np.array([[3.0, 5.0]]))
    assert got == pytest.approx(4.0, rel=1e-14)


def test_tv_by_kl_takes_the_better_of_two() -> None:
    assert tv_by_kl(0.02) == pytest.approx(0.1)  # Pinsker
    assert tv_by_kl(4.0) == pytest.approx(math.sqrt(1 - math.exp(-4)))  # Bretagnolle-Huber
    assert tv_by_kl(0.0) == 0.0
    assert tv_by_kl(math.inf) == 1.0


# -- ours ----------------------------------------------------------------------------------------------------


def test_change_of_measure_solves_its_equation() -> None:
    s, nats = 0.3, np.array([1e-4, 0.01, 0.3, 5.0])
    e = change_of_measure(nats, s) / s
    assert e - np.log1p(e) == pytest.approx(nats / s, rel=1e-10)
    # homogeneous of degree one, and below its closed form by at most 16 %
    assert change_of_measure(7 * nats, 7 * s) == pytest.approx(7 * change_of_measure(nats, s), rel=1e-12)
    x = 10.0 ** np.linspace(-10, 10, 2001)
    ratio = (x + np.sqrt(2 * x)) / change_of_measure(x, 1.0)
    assert ratio.min() >= 1.0 - 1e-12
    assert 1.15 < ratio.max() < 1.16
    assert (np.diff(change_of_measure(x, 1.0)) > 0).all()  # no jump where the closed form takes over


def test_change_of_measure_at_its_ends() -> None:
    assert change_of_measure(0.0, 0.0) == 0.0
    assert change_of_measure(0.0, 0.4) == 0.0
    assert change_of_measure(0.25, 0.0) == 0.25  # f is 0 wherever p is: only new mass counts
    assert change_of_measure(math.inf, 0.3) == math.inf
    # two turns of 0.01 nats: kl = 0.01, s = 0.005 -> 1.7526 * 0.01, and 2 * 0.01 by the closed form
    assert change_of_measure(0.01, 0.005) == pytest.approx(0.017526207, rel=1e-7)


def test_change_of_measure_cannot_be_improved() -> None:
    """f = 1 on a set of small mass s, 0 elsewhere: moving it to s + e at KL k, e / X -> 1."""
    for s, share in ((1e-6, 2.0), (1e-5, 0.1), (1e-7, 50.0)):
        nats = share * s
        low, high = 0.0, 1.0 - s
        for _ in range(200):
            e = 0.5 * (low + high)
            # both logarithms by log1p: the KL is of the order of s
            kl = -s * math.log1p(e / s) - (1 - s) * math.log1p(-e / (1 - s))
            low, high = (e, high) if kl <= nats else (low, e)
        assert low / change_of_measure(nats, s) == pytest.approx(1.0, abs=1e-3)
        assert low <= change_of_measure(nats, s)
