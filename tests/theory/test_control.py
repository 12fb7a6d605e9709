"""Controllers: hand-computed moves, and that repeated use settles where it should."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr.theory.control import adapt_beta, adapt_radius, adapt_step_scale, backoff_fraction
from teamtr.theory.kl import kl_cur_to_new


@pytest.mark.parametrize(
    ("beta", "kl", "expected"),
    [
        (0.1, 0.0151, 0.2),  # above 1.5 * 0.01
        (0.1, 0.0149, 0.1),
        (0.1, 0.01, 0.1),
        (0.1, 0.0067, 0.1),
        (0.1, 0.0066, 0.05),  # below 0.01 / 1.5 = 0.00667
        (0.1, 0.0, 0.05),
        (0.1, math.inf, 0.2),
        (0.1, math.nan, 0.2),
        (80.0, 1.0, 100.0),  # bounded above
        (1.5e-4, 0.0, 1e-4),  # and below
        (0.0, 0.01, 1e-4),  # zero counts as the lower bound,
        (0.0, 1.0, 2e-4),  # so that it can grow
    ],
)
def test_adapt_beta_by_hand(beta: float, kl: float, expected: float) -> None:
    assert adapt_beta(beta, kl, 0.01) == pytest.approx(expected, rel=1e-15)


def test_adapt_beta_brings_a_responding_kl_to_its_target() -> None:
    # a policy whose KL is 0.01 / (1 + beta): the target 0.001 wants beta near 9, within the dead band of 1.5
    beta = 0.0
    for _ in range(40):
        beta = adapt_beta(beta, 0.01 / (1.0 + beta), 0.001)
    assert 0.001 / 1.5 <= 0.01 / (1.0 + beta) <= 0.001 * 1.5


def test_backoff_by_hand() -> None:
    # sqrt(0.9 * 0.01 / 0.36) = sqrt(0.025) = 0.158
    assert backoff_fraction(0.36, 0.01) == pytest.approx(math.sqrt(0.025), rel=1e-15)
    # sqrt(0.25 * 0.04 / 0.16) = 0.25
    assert backoff_fraction(0.16, 0.04, safety=0.25) == pytest.approx(0.25, rel=1e-15)
    assert backoff_fraction(0.01, 0.01) == 1.0  # on the radius is inside
    assert backoff_fraction(0.0, 0.01) == 1.0
    assert backoff_fraction(math.inf, 0.01) == 0.5
    assert backoff_fraction(math.nan, 0.01) == 0.5


@settings(max_examples=100)
@given(st.floats(1e-6, 1.0), st.floats(1.0001, 1e6), st.floats(0.1, 0.99))
def test_backoff_lands_at_safety_times_radius_under_the_square_law(radius: float, excess: float, safety: float) -> None:
    upper = radius * excess
    fraction = backoff_fraction(upper, radius, safety=safety)
    assert 0.0 < fraction < 1.0
    assert upper * fraction**2 == pytest.approx(safety * radius, rel=1e-12)


def test_backoff_works_on_a_real_softmax() -> None:
    """One or two tries bring a step of many radii inside, because the KL of a softmax is nearly quadratic there."""
    generator = torch.Generator().manual_seed(0)
    cur = torch.randn(20, 50, generator=generator, dtype=torch.float64)
    step = torch.randn(20, 50, generator=generator, dtype=torch.float64)

    def kl(fraction: float) -> float:
        return float(kl_cur_to_new(cur, cur + fraction * step).mean())

    radius, fraction, tries = 0.01, 1.0, 0
    assert kl(1.0) > 30 * radius
    while kl(fraction) > radius:
        fraction *= backoff_fraction(kl(fraction), radius)
        tries += 1
    assert tries <= 2
    assert kl(fraction) > 0.7 * radius  # and not much further back than needed


def test_adapt_step_scale_by_hand() -> None:
    assert adapt_step_scale(3.0, 0.02, 0.01) == pytest.approx(3.0 * math.sqrt(0.5), rel=1e-15)
    assert adapt_step_scale(3.0, 0.005, 0.01) == pytest.approx(3.0 * math.sqrt(2.0), rel=1e-15)
    assert adapt_step_scale(3.0, 0.57, 0.01) == 1.5  # 57 radii: held at the slowest, a half
    assert adapt_step_scale(3.0, 1e-9, 0.01) == 6.0  # held at the fastest, a double
    assert adapt_step_scale(3.0, 0.57, 0.01, slowest=0.01) == pytest.approx(3.0 * math.sqrt(1 / 57), rel=1e-15)
    assert adapt_step_scale(3.0, math.inf, 0.01) == 1.5
    assert adapt_step_scale(3.0, math.nan, 0.01) == 1.5


@pytest.mark.parametrize("nothing", [0.0, -1e-9])
def test_a_step_that_moved_nothing_leaves_scale_and_radius(nothing: float) -> None:
    scale = radius = 1.0
    for _ in range(100):
        scale, radius = adapt_step_scale(scale, nothing, 0.01), adapt_radius(radius, nothing, 1.0)
    assert (scale, radius) == (1.0, 1.0)


def test_adapt_step_scale_reaches_the_target_under_the_square_law() -> None:
    # KL = 57 radii at scale 1 (decision 12): halving twice gives 57/16 = 3.6, then one exact move
    scale, kls = 1.0, []
    for _ in range(5):
        kls.append(0.57 * scale**2)
        scale = adapt_step_scale(scale, kls[-1], 0.01)
    np.testing.assert_allclose(kls, [0.57, 0.57 / 4, 0.57 / 16, 0.01, 0.01], rtol=1e-12)


def test_adapt_radius_by_hand() -> None:
    # half the target was used: radius * sqrt(2)
    assert adapt_radius(0.01, 0.005, 0.01) == pytest.approx(0.01 * math.sqrt(2.0), rel=1e-15)
    assert adapt_radius(0.01, 0.02, 0.01) == pytest.approx(0.01 * math.sqrt(0.5), rel=1e-15)
    assert adapt_radius(0.09, 1e-9, 0.01) == pytest.approx(0.1, rel=1e-15)  # at most ten targets
    assert adapt_radius(0.0011, 5.0, 0.01) == pytest.approx(0.001, rel=1e-15)  # at least a tenth
    assert adapt_radius(0.09, 1e-9, 0.01, factor=2.0) == pytest.approx(0.02, rel=1e-15)


def test_adapt_radius_settles_where_the_used_kl_is_the_target() -> None:
    radius = 0.01
    for _ in range(40):
        radius = adapt_radius(radius, 0.3 * radius, 0.01)  # updates use 30 % of their radius
    assert 0.3 * radius == pytest.approx(0.01, rel=1e-6)
    for _ in range(40):
        radius = adapt_radius(radius, 0.01 * radius, 0.01)  # 1 %: out of reach, the bound holds
    assert radius == pytest.approx(0.1, rel=1e-12)


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="adapt_beta: target must be positive, got 0"):
        adapt_beta(0.1, 0.0, 0.0)
    with pytest.raises(ValueError, match="backoff_fraction: radius must be positive, got nan"):
        backoff_fraction(1.0, math.nan)
    with pytest.raises(ValueError, match="safety must be below 1"):
        backoff_fraction(1.0, 0.1, safety=1.0)
    with pytest.raises(ValueError, match="adapt_step_scale: kl_target"):
        adapt_step_scale(1.0, 0.1, -1.0)
    with pytest.raises(ValueError, match="adapt_radius: factor"):
        adapt_radius(0.1, 0.1, 0.1, factor=0.5)
