"""Advantages of words that were tried with all that the others said: by hand, and their bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr.theory.advantages import group_advantages
from teamtr.theory.crossing import crossed_advantages, crossed_means_PG
from teamtr.theory.estimators import GroupAdvantage
from teamtr.types import Floats

PLAIN = GroupAdvantage(normalize=False, clip=math.inf)
NORMALIZED = GroupAdvantage(clip=math.inf, eps=0.0)


def test_means_by_hand() -> None:
    returns_PGG = np.array([[[1.0, 0.0], [0.0, 0.0]]])
    assert crossed_means_PG(returns_PGG, np.ones((1, 2))).tolist() == [[0.5, 0.0]]
    assert crossed_means_PG(returns_PGG, np.array([[3.0, 1.0]])).tolist() == [[0.75, 0.0]]
    assert crossed_means_PG(returns_PGG, np.zeros((1, 2))).tolist() == [[0.5, 0.0]], "no weight at all: the plain mean"


def test_advantages_by_hand() -> None:
    """Of four returns 1, 0, 0, 0: mean 1/4, deviation sqrt(3)/4; the first words' mean is 1/4 above it."""
    returns_PGG = np.array([[[1.0, 0.0], [0.0, 0.0]]])
    plain = crossed_advantages(PLAIN.estimate, returns_PGG, np.ones((1, 2)))
    assert plain.values_PG.tolist() == [[0.25, -0.25]]
    normalized = crossed_advantages(NORMALIZED.estimate, returns_PGG, np.ones((1, 2)))
    assert normalized.values_PG == pytest.approx(np.array([[1.0, -1.0]]) / math.sqrt(3.0))


def test_weights_are_of_the_others_words() -> None:
    """The others of episode 0 count three times: mean 3/8, and the first words' advantage is (3 (5/8) + 1 (-3/8)) / 4,
    times the group's mean weight, which is two."""
    returns_PGG = np.array([[[1.0, 0.0], [0.0, 0.0]]])
    found = crossed_advantages(PLAIN.estimate, returns_PGG, np.array([[3.0, 1.0]]))
    assert found.values_PG.tolist() == [[2 * 0.375, 2 * -0.375]]


def test_every_problem_is_a_group_of_its_own() -> None:
    """Two problems, each with its own returns and weights, as if the other were not there."""
    rng = np.random.default_rng(1)
    returns_PGG, weights_PG = rng.random((2, 3, 3)), np.array([[3.0, 1.0, 0.5], [0.0, 0.0, 0.0]])
    means = crossed_means_PG(returns_PGG, weights_PG)
    ones = np.ones((2, 3))
    found = crossed_advantages(NORMALIZED.estimate, returns_PGG, ones)
    for p in range(2):
        assert means[p] == pytest.approx(crossed_means_PG(returns_PGG[p : p + 1], weights_PG[p : p + 1])[0])
        alone = crossed_advantages(NORMALIZED.estimate, returns_PGG[p : p + 1], ones[:1])
        assert found.values_PG[p] == pytest.approx(alone.values_PG[0])
    assert means[1] == pytest.approx(returns_PGG[1].mean(axis=1))


def test_words_that_earn_the_same_teach_nothing_however_the_others_speak() -> None:
    returns_PGG = np.array([[[1.0, 0.0], [1.0, 0.0]]])
    found = crossed_advantages(NORMALIZED.estimate, returns_PGG, np.ones((1, 2)))
    assert not found.informative_P.any()
    assert found.values_PG.tolist() == [[0.0, 0.0]]


def test_returns_that_are_not_finite_poison_their_own_group_alone() -> None:
    returns_PGG = np.array([[[1.0, np.nan], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]])
    found = crossed_advantages(PLAIN.estimate, returns_PGG, np.ones((2, 2)))
    assert found.non_finite_P.tolist() == [True, False]
    assert found.values_PG.tolist() == [[0.0, 0.0], [0.25, -0.25]]


def test_words_whose_worth_does_not_depend_on_the_others_have_their_plain_advantage() -> None:
    returns_PG = np.random.default_rng(0).random((5, 6))
    crossed = crossed_advantages(
        GroupAdvantage().estimate, np.repeat(returns_PG[:, :, None], 6, axis=2), np.ones((5, 6))
    )
    plain = group_advantages(returns_PG, a_clip=3.0, eps_norm=1e-6)
    assert crossed.values_PG == pytest.approx(plain.values_PG)
    assert (crossed.informative_P == plain.informative_P).all()


@settings(max_examples=60)
@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_advantages_keep_to_the_bound_of_a_plain_group_and_have_mean_zero(group: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    returns_PGG: Floats = rng.random((3, group, group)) ** 8
    found = crossed_advantages(NORMALIZED.estimate, returns_PGG, np.ones((3, group)))
    assert np.abs(found.values_PG).max() <= math.sqrt(group - 1) + 1e-9
    assert found.values_PG.mean(axis=1) == pytest.approx(0.0, abs=1e-9)
