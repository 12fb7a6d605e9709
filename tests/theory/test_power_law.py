"""Where growth bends: exact for lines that bend once, and silent where there is nothing to tell."""

from __future__ import annotations

import numpy as np
import pytest

from teamtr.theory.power_law import find_bend

N = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize(("at", "before", "after"), [(4, 0.0, 1.0), (8, 1.0, 2.0), (2, 1.5, 0.5), (16, 1.0, 1.3)])
def test_a_line_that_bends_once_is_found_exactly(at, before, after):
    values = np.array([7.0 * (n / at) ** (before if n <= at else after) for n in N])
    bend = find_bend(N, values)
    assert bend is not None
    assert (bend.at, bend.before, bend.after) == (at, pytest.approx(before, abs=1e-9), pytest.approx(after, abs=1e-9))


def test_a_fixed_cost_beside_a_linear_one_bends_upward_where_both_count():
    bend = find_bend(N, np.array([6.0 + n for n in N]))
    assert bend is not None
    assert bend.at in (4, 8)
    assert bend.before < 0.4 < 0.6 < bend.after


def test_a_straight_line_does_not_bend_nor_does_one_that_bends_less_than_is_worth_telling():
    assert find_bend(N, np.array([3.0 * n**1.7 for n in N])) is None
    slight = np.array([(n / 8) ** (1.0 if n <= 8 else 1.2) for n in N])
    assert find_bend(N, slight) is None
    assert find_bend(N, slight, least=0.1) is not None


def test_three_points_are_too_few_for_a_bend():
    assert find_bend((1, 2, 4), np.array([1.0, 1.0, 9.0])) is None
    assert find_bend((1, 2, 4, 8), np.array([1.0, 1.0, 1.0, 9.0])) is not None
