"""Radii and orders: closed forms, KKT conditions, and brute force over all radii."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import minimize

from teamtr.theory.allocation import (
    best_radii,
    certified_parts,
    equal_radii,
    proportional_radii,
    update_order,
)


def test_equal_and_proportional_by_hand() -> None:
    np.testing.assert_array_equal(equal_radii(0.06, 3), [0.02, 0.02, 0.02])
    np.testing.assert_allclose(proportional_radii([3.0, -5.0, 1.0], 0.04), [0.03, 0.0, 0.01], rtol=1e-15)
    np.testing.assert_array_equal(proportional_radii([0.0, -1.0], 0.04), [0.02, 0.02])
    with pytest.raises(ValueError, match="total budget"):
        equal_radii(-0.1, 2)
    with pytest.raises(ValueError, match="finite gain"):
        proportional_radii([np.nan], 0.1)


def test_equal_radii_maximise_the_penalty() -> None:
    """app:tightness: among radii of one total, equal ones have the largest sum of roots, sqrt(n total)."""
    radii = np.random.default_rng(0).dirichlet(np.ones(4), size=200) * 0.04
    assert np.sqrt(equal_radii(0.04, 4)).sum() == pytest.approx(np.sqrt(4 * 0.04), rel=1e-14)
    assert (np.sqrt(radii).sum(axis=1) <= np.sqrt(4 * 0.04)).all()


def test_without_curvature_radii_go_with_the_square_of_the_net_gain() -> None:
    # kappa - c = 3, 1, 0 (and a loss): 9 : 1 : 0 of 0.1, worth sqrt(0.1 * 10)
    got = best_radii([5.0, 3.0, 2.0, 1.0], 0.1, penalty_I=2.0)
    np.testing.assert_allclose(got.radii_I, [0.09, 0.01, 0.0, 0.0], rtol=1e-12)
    assert got.bound == pytest.approx(1.0, rel=1e-12)
    assert got.price == pytest.approx(0.5 / 0.1 * 1.0, rel=1e-9)  # d sqrt(10 total) / d total = sqrt(10 / total) / 2


def test_curvature_leaves_budget_unspent() -> None:
    # one step: b sqrt(d) - a d is largest at (b / 2a)^2 = 1/16, worth b^2 / 4a
    got = best_radii([1.0], 10.0, curvature_I=2.0)
    assert got.radii_I[0] == pytest.approx(1.0 / 16.0, rel=1e-12)
    assert got.bound == pytest.approx(1.0 / 8.0, rel=1e-12)
    assert got.price == 0.0


def test_the_papers_own_bound_is_best_served_by_not_moving() -> None:
    """kappa <= sqrt(2) A_max / (1 - gamma), c = sqrt(2) gamma A_max / (1 - gamma)^2: no net gain for gamma >= 1/2."""
    for gamma in (0.5, 0.9, 0.99):
        kappa = np.sqrt(2.0) / (1.0 - gamma) * np.array([1.0, 0.5])
        penalty = np.sqrt(2.0) * gamma / (1.0 - gamma) ** 2
        np.testing.assert_array_equal(best_radii(kappa, 0.1, penalty_I=penalty).radii_I, 0.0)
    assert best_radii([np.sqrt(2.0) / 0.6], 0.1, penalty_I=np.sqrt(2.0) * 0.4 / 0.36).bound > 0.0  # gamma = 0.4


CASES = [
    {"curvature_I": [1.0, 5.0, 0.2]},
    {"curvature_I": [1.0, 5.0, 0.2], "cubic_I": [3.0, 0.0, 10.0]},
    {"curvature_I": 0.0, "cubic_I": [3.0, 1.0, 10.0], "penalty_I": [0.1, 0.0, 0.9]},
    {"curvature_I": [0.0, 0.0, 2.0], "penalty_I": 0.3, "caps_I": [0.01, 1.0, 0.02]},
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("total", [0.003, 0.05, 2.0])
def test_against_brute_force(case: dict[str, object], total: float) -> None:
    """No radii on a fine grid, and none that a general optimiser finds, certify more."""
    kappa = np.array([1.0, 0.7, 0.4])
    got = best_radii(kappa, total, **case)  # type: ignore[arg-type]
    caps = np.broadcast_to(np.asarray(case.get("caps_I", np.inf), dtype=float), 3)
    terms = {k: v for k, v in case.items() if k != "caps_I"}
    assert got.radii_I.sum() <= total * (1 + 1e-12)
    assert (got.radii_I <= caps).all()

    def bound(radii: np.ndarray) -> np.ndarray:
        return certified_parts(radii, kappa, **terms).sum(axis=-1)  # type: ignore[arg-type]

    assert bound(got.radii_I) == pytest.approx(got.bound, rel=1e-12)
    grid = np.linspace(0.0, 1.0, 41) ** 2
    shares = np.array([s for s in itertools.product(grid, repeat=3) if sum(s) <= 1.0 + 1e-12])
    radii = np.minimum(shares * total, caps)
    assert bound(radii).max() <= got.bound + 1e-12
    assert bound(radii).max() >= got.bound - 0.02 * abs(got.bound)  # the grid comes near: the optimum is no fiction
    found = minimize(
        lambda x: -float(bound(np.minimum(np.abs(x), caps))),
        np.minimum(np.full(3, total / 3), caps) * 0.5,
        constraints={"type": "ineq", "fun": lambda x: total - np.minimum(np.abs(x), caps).sum()},
        method="SLSQP",
        options={"maxiter": 300, "ftol": 1e-14},
    )
    feasible = np.minimum(np.abs(found.x), caps)
    feasible *= min(1.0, total / max(feasible.sum(), 1e-300))
    assert bound(feasible) <= got.bound + 1e-10


@pytest.mark.long
def test_kkt_and_the_price_of_the_budget() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        n = int(rng.integers(1, 9))
        kappa, a, c, e = rng.uniform(0, 2, n), rng.uniform(0, 5, n), rng.uniform(0, 1.5, n), rng.uniform(0, 5, n)
        total = float(10.0 ** rng.uniform(-4, 1))
        got = best_radii(kappa, total, curvature_I=a, penalty_I=c, cubic_I=e)
        used = got.radii_I > 0
        slope = (
            (kappa - c)[used] / (2 * np.sqrt(got.radii_I[used])) - a[used] - 1.5 * e[used] * np.sqrt(got.radii_I[used])
        )
        np.testing.assert_allclose(slope, got.price, rtol=1e-6, atol=1e-9)
        assert (kappa[~used] <= c[~used]).all()
        assert got.price == 0.0 or got.radii_I.sum() == pytest.approx(total, rel=1e-9)
        assert (got.parts_I >= 0.0).all()
        if got.price > 1e-3:
            more = best_radii(kappa, total * 1.0001, curvature_I=a, penalty_I=c, cubic_I=e)
            assert (more.bound - got.bound) / (total * 1e-4) == pytest.approx(got.price, rel=1e-3)


def test_no_budget_and_bad_input() -> None:
    got = best_radii([1.0, 2.0], 0.0)
    np.testing.assert_array_equal(got.radii_I, 0.0)
    assert got.bound == 0.0
    with pytest.raises(ValueError, match="concave"):
        best_radii([1.0], 0.1, curvature_I=-1.0)


def test_orders() -> None:
    assert update_order("fixed", 3) == (0, 1, 2)
    assert update_order("reverse", 3) == (2, 1, 0)
    assert update_order("largest_gain", 4, expected_gains_A=[0.1, 0.5, -1.0, 0.5]) == (1, 3, 0, 2)
    first = update_order("random", 6, rng=np.random.default_rng(0))
    assert sorted(first) == list(range(6))
    assert first == update_order("random", 6, rng=np.random.default_rng(0))
    firsts = [update_order("random", 3, rng=np.random.default_rng(k))[0] for k in range(300)]
    assert np.bincount(firsts).min() > 60
    with pytest.raises(ValueError, match="generator"):
        update_order("random", 3)
    with pytest.raises(ValueError, match="expected gain"):
        update_order("largest_gain", 3, expected_gains_A=[1.0])
