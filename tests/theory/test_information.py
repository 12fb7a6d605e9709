"""Distances of message laws: hand arithmetic, identities, and the counterexamples to what is printed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from teamtr.theory.information import (
    centred,
    centred_envelope,
    donsker_varadhan,
    kl,
    mean_kl_envelope,
    oracle_envelope,
    ratio,
    ratio_clip_bias,
    ratio_deviation,
    total_variation,
)
from teamtr.types import Floats


def random_laws(seed: int, count: int = 400, messages: int = 5) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    cur = rng.dirichlet(np.full(messages, 0.7), size=count)
    tilt = rng.standard_normal((count, messages)) * 10.0 ** rng.uniform(-3, 0.5, size=(count, 1))
    new = cur * np.exp(tilt)
    return cur, new / new.sum(axis=1, keepdims=True)


def test_kl_and_tv_by_hand() -> None:
    p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert kl(p, q) == pytest.approx(0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0), rel=1e-14)
    assert kl(q, p) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-13)
    assert total_variation(p, q) == 0.25
    assert kl([1.0, 0.0], [0.5, 0.5]) == pytest.approx(math.log(2.0), rel=1e-14)
    assert kl([0.5, 0.5], [1.0, 0.0]) == math.inf
    assert kl([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]) == 0.0


def test_kl_keeps_the_digits_of_small_steps() -> None:
    """Two messages, a step of 1e-7: KL is step^2 / (2 p (1 - p)) to first order, far below the rounding of log."""
    assert kl([0.5, 0.5], [0.5 + 1e-7, 0.5 - 1e-7]) == pytest.approx(2e-14, rel=1e-6)


def test_laws_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        kl([0.5, 0.6], [0.5, 0.5])
    with pytest.raises(ValueError, match="same messages"):
        total_variation([1.0], [0.5, 0.5])


def test_ratio_deviation_is_twice_tv() -> None:
    cur, new = random_laws(0)
    np.testing.assert_allclose(ratio_deviation(cur, new), 2.0 * total_variation(cur, new), rtol=1e-12)


def test_ratio_tv_under_the_absolute_continuity_that_is_printed_is_false() -> None:
    """lem:ratio-tv needs new << cur; the text assumes cur << new, which is all that (1, 0) and (1/2, 1/2) have."""
    cur, new = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    seen = float(np.sum(cur[:1] * np.abs(1.0 - new[:1] / cur[:1])))
    assert seen == 0.5
    assert 2.0 * total_variation(cur, new) == 1.0
    with pytest.raises(ValueError, match="mass where cur has none"):
        ratio_deviation(cur, new)


def test_ratio_clip_by_hand() -> None:
    # w = (0.4, 2/3, 3) clipped to [0.8, 1.2]; cur (w - clip) = (-0.2, -0.04, 0.36)
    got = ratio_clip_bias([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [1.0, -2.0, 2.0], 0.2, 0.2)
    assert got.bias == pytest.approx(abs(-0.2 + 0.08 + 0.72))
    # where w A exceeds clip(w) A the minimum takes the latter: the first loses nothing (it is below), the others all
    assert got.pessimism == pytest.approx(0.08 + 0.72)
    assert got.by_ratio == pytest.approx(2.0 * 0.6)
    assert got.by_tv == pytest.approx(2.0 * 0.8)
    assert got.by_kl == pytest.approx(2.0 * math.sqrt(2.0 * float(kl([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))))


def test_ratio_clip_chain_and_the_sign_of_the_minimum() -> None:
    cur, new = random_laws(1)
    rng = np.random.default_rng(2)
    advantages = rng.uniform(-2.0, 2.0, cur.shape)
    low, high = rng.uniform(0.0, 0.9, len(cur)), rng.uniform(0.0, 1.0, len(cur))
    got = ratio_clip_bias(cur, new, advantages, low, high)
    w = ratio(cur, new)
    clipped = np.clip(w, 1 - low[:, None], 1 + high[:, None])
    minimum = (cur * np.minimum(w * advantages, clipped * advantages)).sum(axis=1)
    np.testing.assert_allclose(got.pessimism, (new * advantages).sum(axis=1) - minimum, atol=1e-12)
    assert (got.pessimism >= 0.0).all()
    for smaller, larger in [
        (got.bias, got.by_ratio),
        (got.pessimism, got.by_ratio),
        (got.by_ratio, got.by_tv),
        (got.by_tv, got.by_kl),
    ]:
        assert (smaller <= larger + 1e-12).all()


def test_with_the_kl_arguments_exchanged_the_final_step_still_holds_but_without_the_two_it_fails() -> None:
    """Pinsker is symmetric, so KL(new||cur) bounds the bias as well; sqrt(KL) without its 2 does not bound 2 TV."""
    cur, new = random_laws(3)
    twice_tv = 2.0 * total_variation(cur, new)
    assert (twice_tv <= np.sqrt(2.0 * kl(new, cur)) + 1e-12).all()
    assert (twice_tv > np.sqrt(kl(cur, new))).any()


def test_centring() -> None:
    rng = np.random.default_rng(4)
    policy = rng.dirichlet(np.ones(6), size=50)
    advantages = centred(rng.standard_normal((50, 6)) * 100.0, policy)
    np.testing.assert_allclose((policy * advantages).sum(axis=1), 0.0, atol=1e-12)
    np.testing.assert_allclose(centred([4.0, 0.0], [0.25, 0.75]), [3.0, -1.0], rtol=1e-15)


def test_donsker_varadhan_holds_for_every_eta_and_is_attained_by_the_tilted_law() -> None:
    cur, new = random_laws(5)
    rng = np.random.default_rng(6)
    f, eta = rng.standard_normal(cur.shape), 10.0 ** rng.uniform(-2, 2, len(cur))
    assert ((new * f).sum(axis=1) <= donsker_varadhan(cur, new, f, eta) + 1e-9).all()
    tilted = cur * np.exp(f)
    tilted /= tilted.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(donsker_varadhan(cur, tilted, f, 1.0), (tilted * f).sum(axis=1), rtol=1e-9, atol=1e-12)
    # with the KL the other way round it is no bound
    wrong = kl(cur, tilted) + np.log((cur * np.exp(f)).sum(axis=1))
    assert ((tilted * f).sum(axis=1) > wrong + 1e-6).any()


def test_the_centred_envelope_holds_in_both_directions_and_is_sharp() -> None:
    cur, new = random_laws(7)
    f = centred(np.random.default_rng(8).standard_normal(cur.shape), cur)
    size = np.abs(f).max(axis=1)
    for nats in (kl(new, cur), kl(cur, new)):
        assert (np.abs((new * f).sum(axis=1)) <= centred_envelope(size, nats) + 1e-12).all()
    # a fair coin moved by a little, f = +-1: E_new f = 2 step, KL = 2 step^2
    step = 1e-3
    envelope = centred_envelope(1.0, kl([0.5 + step, 0.5 - step], [0.5, 0.5]))
    assert envelope == pytest.approx(2.0 * step, rel=1e-5)


class Corridor:
    """At the start one may go, never to return; beyond, saying the good word earns 1 and the bad word -1 each turn."""

    def __init__(self, gamma: float, go: float, good: float) -> None:
        self.gamma, self.go, self.good = gamma, go, good
        leave = gamma * go / (1.0 - gamma + gamma * go)
        self.occupancy = np.array([1.0 - leave, leave])
        self.value = leave * (2.0 * good - 1.0) / (1.0 - gamma)  # J = E_d r / (1 - gamma)


def test_the_oracle_bound_fails_for_the_mean_kl_that_the_algorithm_constrains() -> None:
    """prop:oracle is about the largest KL over states. A state that the old team hardly visits hides a large change
    from the mean (eq:tr), and the gain exceeds the bound; ``mean_kl_envelope`` holds."""
    gamma = 0.99
    cur, new = Corridor(gamma, 1e-6, 0.5), Corridor(gamma, 0.1, 0.99)
    nats = np.array(
        [kl([1 - cur.go, cur.go], [1 - new.go, new.go]), kl([cur.good, 1 - cur.good], [new.good, 1 - new.good])]
    )
    mean, gain, a_max = float(cur.occupancy @ nats), new.value - cur.value, 1.0  # V^cur = 0 everywhere, so |A| = |r|
    assert cur.value == 0.0
    assert gain > oracle_envelope(a_max, mean, 1.0 / (1.0 - gamma))
    assert gain <= oracle_envelope(a_max, nats.max(), 1.0 / (1.0 - gamma))
    assert gain <= mean_kl_envelope(a_max, mean, gamma)


def test_mean_kl_envelope_by_hand() -> None:
    assert mean_kl_envelope(3.0, 0.02, 0.5) == pytest.approx(3.0 * 0.2 * 4.0, rel=1e-14)
