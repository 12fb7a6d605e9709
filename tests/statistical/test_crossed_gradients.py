"""Crossed words estimate the same gradient as played ones, with less noise; also when the others were updated since.

Exactly one of n agents must volunteer, and each volunteers with a probability of its own. The gradient of success with
respect to the first one's log-odds is known in closed form.
"""

from __future__ import annotations

import numpy as np
import pytest

from teamtr.theory.crossing import crossed_advantages
from teamtr.theory.estimators import GroupAdvantage
from teamtr.types import Floats

GROUP = 8
PLAIN = GroupAdvantage(normalize=False, clip=np.inf)
OWN, OTHERS, MOVED = 0.05, np.array([0.1, 0.3, 0.25]), np.array([0.3, 0.3, 0.4])


def exact_gradient(others: Floats) -> float:
    """p (1 - p) times what volunteering earns more than abstaining."""
    nobody = float(np.prod(1.0 - others))
    return OWN * (1.0 - OWN) * (nobody - nobody * float(np.sum(others / (1.0 - others))))


def drawn(rng: np.random.Generator, problems: int) -> tuple[Floats, Floats]:
    """Who of the group's agents volunteers: the first one, and the others."""
    own_PG = (rng.random((problems, GROUP)) < OWN).astype(np.float64)
    return own_PG, (rng.random((problems, GROUP, len(OTHERS))) < OTHERS).astype(np.float64)


def gradients(advantages_PG: Floats, own_PG: Floats) -> Floats:
    """Each problem's estimate. A group's own mean is its baseline, which shrinks it by 1 - 1/G."""
    return np.asarray((advantages_PG * (own_PG - OWN)).mean(axis=1) / (1.0 - 1.0 / GROUP))


def returns_PGG(own_PG: Floats, others_PGA: Floats) -> Floats:
    return (own_PG[:, :, None] + others_PGA.sum(axis=2)[:, None, :] == 1.0).astype(np.float64)


def test_the_gradient_is_the_same_and_its_variance_a_fraction() -> None:
    own_PG, others_PGA = drawn(np.random.default_rng(0), 20_000)
    matrix_PGG = returns_PGG(own_PG, others_PGA)
    played = gradients(PLAIN.estimate(np.einsum("pgg->pg", matrix_PGG)).values_PG, own_PG)
    crossed = gradients(crossed_advantages(PLAIN.estimate, matrix_PGG, np.ones(own_PG.shape)).values_PG, own_PG)
    for found in (played, crossed):
        assert found.mean() == pytest.approx(exact_gradient(OTHERS), abs=4 * found.std() / np.sqrt(len(found)))
    assert crossed.var() < 0.5 * played.var()


def test_weights_of_the_others_carry_it_to_the_team_as_it_is() -> None:
    own_PG, others_PGA = drawn(np.random.default_rng(1), 40_000)
    ratio_PGA = np.where(others_PGA > 0.0, MOVED / OTHERS, (1.0 - MOVED) / (1.0 - OTHERS))
    weights_PG = ratio_PGA.prod(axis=2)
    matrix_PGG = returns_PGG(own_PG, others_PGA)
    crossed = gradients(crossed_advantages(PLAIN.estimate, matrix_PGG, weights_PG).values_PG, own_PG)
    stale = gradients(crossed_advantages(PLAIN.estimate, matrix_PGG, np.ones(own_PG.shape)).values_PG, own_PG)
    error = crossed.std() / np.sqrt(len(crossed))
    assert crossed.mean() == pytest.approx(exact_gradient(MOVED), abs=4 * error)
    assert abs(stale.mean() - exact_gradient(MOVED)) > 8 * error, "without them it is another team's"
