"""The local picture: KL against Fisher, the best step in a ball, gradients, smoothness, projected ascent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from teamtr.theory import information
from teamtr.theory.geometry import (
    TABLE_SPAN,
    SurrogateModel,
    ball_projection,
    budget_aware_gain,
    budget_aware_stage,
    certified_radius,
    cubic_constant,
    curvature_price,
    feature_span,
    fisher,
    kl_fisher_bridge,
    linear_gain,
    projected_ascent,
    softmax,
    table_features,
    uniform_smoothness,
)
from teamtr.types import Floats


def random_model(seed: int, *, table: bool = True) -> tuple[SurrogateModel, Floats]:
    rng = np.random.default_rng(seed)
    states, messages = 3, 4
    features = table_features(states, messages) if table else rng.standard_normal((states, messages, 5))
    model = SurrogateModel(
        features_SAK=features,
        states_S=rng.dirichlet(np.ones(states)),
        advantages_SA=rng.uniform(-1.0, 1.0, (states, messages)),
        weight=2.0,
    )
    return model, rng.standard_normal(features.shape[-1])


# -- KL and Fisher ------------------------------------------------------------------------------------------------


def test_fisher_by_hand() -> None:
    p = 0.2
    got = fisher([[p, 1 - p]], table_features(1, 2), [1.0])
    np.testing.assert_allclose(got, p * (1 - p) * np.array([[1.0, -1.0], [-1.0, 1.0]]), rtol=1e-14)


def test_fisher_is_the_score_covariance_and_the_quadratic_of_the_bridge() -> None:
    model, theta = random_model(0, table=False)
    probs = model.probs_SA(theta)
    score = model.features_SAK - np.einsum("sa,sak->sk", probs, model.features_SAK)[:, None]
    by_hand = sum(
        model.states_S[s] * probs[s, a] * np.outer(score[s, a], score[s, a]) for s in range(3) for a in range(4)
    )
    got = fisher(probs, model.features_SAK, model.states_S)
    np.testing.assert_allclose(got, by_hand, rtol=1e-12, atol=1e-15)
    step = np.random.default_rng(1).standard_normal(5)
    bridge = kl_fisher_bridge(model.features_SAK @ theta, model.features_SAK @ step, model.states_S)
    assert bridge.quadratic == pytest.approx(0.5 * float(step @ got @ step), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e-2, 0.3, 3.0, 12.0])
def test_the_bridge_has_the_exact_kls_within_its_intervals(scale: float) -> None:
    rng = np.random.default_rng(2)
    logits, step = rng.standard_normal((300, 3, 4)) * 2.0, scale * rng.standard_normal((300, 3, 4))
    weights = rng.dirichlet(np.ones(3), size=300)
    got = kl_fisher_bridge(logits, step, weights)
    cur, new = softmax(logits), softmax(logits + step)
    rel = 1e-6 if scale < 1e-4 else 1e-9
    np.testing.assert_allclose(got.kl_cur_to_new, (weights * information.kl(cur, new)).sum(axis=1), rtol=rel)
    np.testing.assert_allclose(got.kl_new_to_cur, (weights * information.kl(new, cur)).sum(axis=1), rtol=rel)
    for exact, (low, high) in [
        (got.kl_cur_to_new, got.cur_to_new_interval),
        (got.kl_new_to_cur, got.new_to_cur_interval),
    ]:
        assert (low <= exact * (1 + 1e-9)).all()
        assert (exact <= high * (1 + 1e-9)).all()
        assert (high - low <= got.reach * np.exp(got.reach) * got.quadratic * 2 + 1e-18).all()
    upper = certified_radius(got.quadratic, got.reach)
    assert (got.kl_cur_to_new <= upper * (1 + 1e-9)).all()


def test_third_orders_differ_by_two() -> None:
    """lem:klfisher expands KL(new||cur); eq:tr uses KL(cur||new): their remainders are 2 : 1, so a bound on one is none
    on the other."""
    p = 0.2
    logits = np.log([[p, 1 - p]])
    step = 1e-3 * np.array([[1.0, 0.0]])
    got = kl_fisher_bridge(logits, step, [1.0])
    remainder = float(got.kl_new_to_cur - got.quadratic), float(got.kl_cur_to_new - got.quadratic)
    assert remainder[0] / remainder[1] == pytest.approx(2.0, rel=5e-3)
    third = p * (1 - p) * (1 - 2 * p) * 1e-9
    assert remainder[1] == pytest.approx(third / 6.0, rel=5e-3)


@pytest.mark.parametrize("cur_to_new", [True, False])
def test_the_cubic_constant_holds_and_is_nearly_attained(cur_to_new: bool) -> None:
    """|R| <= B_3 |Delta|^3 / 6, with B_3 computed instead of assumed; half of it is too little."""
    rng = np.random.default_rng(3)
    logits, step = rng.standard_normal((4000, 1, 3)) * 2.0, rng.standard_normal((4000, 1, 3))
    step *= (10.0 ** rng.uniform(-2, 0.5, (4000, 1, 1))) / np.linalg.norm(step, axis=-1, keepdims=True)
    # the worst case: two messages, p = (1 - 1/sqrt 3) / 2, a step along (1, -1) / sqrt 2
    p = 0.5 * (1.0 - 1.0 / math.sqrt(3.0))
    logits[0] = [math.log(p), math.log(1 - p), -60.0]
    step[0] = 0.01 * np.array([1.0, -1.0, 0.0]) / math.sqrt(2.0)
    norm = np.linalg.norm(step[:, 0], axis=-1)
    got = kl_fisher_bridge(logits, step, np.ones((4000, 1)))
    exact = got.kl_cur_to_new if cur_to_new else got.kl_new_to_cur
    bound = cubic_constant(norm, cur_to_new=cur_to_new) * norm**3 / 6.0
    share = np.abs(exact - got.quadratic) / bound
    assert share.max() <= 1.0 + 1e-6
    assert share[0] > 0.97
    assert cubic_constant(0.0, cur_to_new=True) == pytest.approx(2.0 * math.sqrt(2.0) / (6.0 * math.sqrt(3.0)))


# -- the best step --------------------------------------------------------------------------------------------------


def test_linear_gain_by_hand() -> None:
    # F = diag(2, 8), g = (2, 4): g'F^-1 g = 2 + 2; radius 0.5: gain sqrt(2 * 0.5 * 4) = 2, step 0.5 * (1, 0.5)
    got = linear_gain([2.0, 4.0], np.diag([2.0, 8.0]), 0.5)
    np.testing.assert_allclose(got.step_K, [0.5, 0.25], rtol=1e-14)
    assert got.gain == pytest.approx(2.0, rel=1e-14)
    assert got.kappa == pytest.approx(math.sqrt(8.0), rel=1e-14)


def test_linear_gain_beats_the_whole_ball_and_fills_it() -> None:
    rng = np.random.default_rng(4)
    root = rng.standard_normal((4, 4))
    matrix, gradient, radius = root @ root.T + 0.1 * np.eye(4), rng.standard_normal(4), 0.03
    got = linear_gain(gradient, matrix, radius)
    assert 0.5 * got.step_K @ matrix @ got.step_K == pytest.approx(radius, rel=1e-12)
    assert gradient @ got.step_K == pytest.approx(float(got.gain), rel=1e-12)
    steps = rng.standard_normal((20000, 4))
    steps *= np.sqrt(radius / (0.5 * np.einsum("nk,kl,nl->n", steps, matrix, steps)))[:, None]
    assert 0.9 * got.gain < (steps @ gradient).max() <= got.gain


def test_without_a_gradient_the_best_step_is_none() -> None:
    got = linear_gain(np.zeros(3), np.eye(3), 0.1)
    np.testing.assert_array_equal(got.step_K, 0.0)
    assert got.gain == 0.0
    with pytest.raises(ValueError, match="positive definite"):
        linear_gain([1.0, 0.0], np.diag([1.0, -1.0]), 0.1)


def natural_step(model: SurrogateModel, theta: Floats, radius: float, eps: float) -> tuple[Floats, float, float]:
    """The step of lem:lin-quad, kappa, and the price a of its curvature."""
    regular = fisher(model.probs_SA(theta), model.features_SAK, model.states_S) + eps * np.eye(len(theta))
    best = linear_gain(model.gradient(theta), regular, radius)
    return best.step_K, float(best.kappa), float(curvature_price(model.smoothness(), regular))


@pytest.mark.parametrize("radius", [1e-4, 1e-2, 0.3])
def test_the_natural_step_gains_what_is_promised(radius: float) -> None:
    for seed in range(20):
        model, theta = random_model(seed)
        step, kappa, price = natural_step(model, theta, radius, eps=0.05)
        gain = model.value(theta + step) - model.value(theta)
        assert gain >= budget_aware_gain(kappa, price, radius) - 1e-12
        assert gain <= kappa * math.sqrt(radius) + price * radius + 1e-12


def test_the_budget_aware_bound_is_false_for_a_realised_update() -> None:
    """thm:info-lower-stage has the realised team on its left side. One turn (gamma = 0, no occupancy penalty), true
    advantages (zeta = 0), no clipping: the step -Delta* is inside the quadratic region and loses, while the right side
    is positive."""
    model, theta = random_model(5)
    policy = model.probs_SA(theta)
    true = SurrogateModel(model.features_SAK, model.states_S, information.centred(model.advantages_SA, policy))
    radius = 1e-5
    step, kappa, price = natural_step(true, theta, radius, eps=0.05)
    promised = budget_aware_stage([kappa], [price], [radius], [0.0], [0.0])
    assert promised > 0.0
    assert true.value(theta + step) - true.value(theta) >= promised
    assert true.value(theta - step) - true.value(theta) < 0.0


def test_the_surrogate_at_the_start_is_missing_when_advantages_do_not_average_to_zero() -> None:
    """L_i(theta_cur) is dropped in print: with every advantage one lower kappa is the same, the surrogate is not."""
    model, theta = random_model(6)
    policy = model.probs_SA(theta)
    centred = information.centred(model.advantages_SA, policy)
    low = SurrogateModel(model.features_SAK, model.states_S, centred - 1.0, model.weight)
    radius = 1e-4
    step, kappa, price = natural_step(low, theta, radius, eps=0.05)
    printed = budget_aware_stage([kappa], [price], [radius], [0.0], [0.0])
    assert low.value(theta + step) < printed
    assert low.value(theta + step) >= budget_aware_stage(
        [kappa], [price], [radius], [0.0], [0.0], start_I=[low.value(theta)]
    )


# -- the surrogate in parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [True, False])
def test_gradient_and_hessian_agree_with_differences_and_with_importance_weights(table: bool) -> None:
    model, theta = random_model(7, table=table)
    h, count = 1e-5, len(theta)
    units = np.eye(count)
    gradient = [(model.value(theta + h * e) - model.value(theta - h * e)) / (2 * h) for e in units]
    np.testing.assert_allclose(model.gradient(theta), gradient, rtol=1e-6, atol=1e-9)
    hessian = [(model.gradient(theta + h * e) - model.gradient(theta - h * e)) / (2 * h) for e in units]
    np.testing.assert_allclose(model.hessian(theta), hessian, rtol=1e-5, atol=1e-8)
    # the form that training sees: E under an older policy of w A
    old = model.probs_SA(theta + 0.3)
    w = model.probs_SA(theta) / old
    weighted = model.weight * np.sum(model.states_S[:, None] * old * w * model.advantages_SA)
    assert model.value(theta) == pytest.approx(weighted, rel=1e-12)


def test_smoothness_bounds_every_hessian() -> None:
    for seed in range(30):
        model, theta = random_model(seed, table=seed % 2 == 0)
        norm = np.linalg.norm(model.hessian(theta), ord=2)
        assert norm <= model.smoothness()
    assert feature_span(table_features(2, 3)) == pytest.approx(TABLE_SPAN)
    assert uniform_smoothness(3.0, 2.0, 0.5, 10.0, summed_steps=4) == 4 * 3.0 * 10.0 * 4.5


def test_with_parameters_of_their_own_the_sum_is_as_smooth_as_its_roughest_term() -> None:
    """lem:smooth has a factor n that separate parameters do not need: the Hessian is block-diagonal."""
    models = [random_model(seed) for seed in range(4)]
    size = len(models[0][1])
    whole = np.zeros((4 * size, 4 * size))
    for k, (model, theta) in enumerate(models):
        whole[k * size : (k + 1) * size, k * size : (k + 1) * size] = model.hessian(theta)
    norms = [np.linalg.norm(model.hessian(theta), ord=2) for model, theta in models]
    assert np.linalg.norm(whole, ord=2) == pytest.approx(max(norms), rel=1e-12)


def test_projected_ascent_climbs_and_its_gradient_mapping_vanishes_at_the_rate() -> None:
    for seed in range(6):
        model, theta = random_model(seed)
        eta = 1.0 / model.smoothness()
        got = projected_ascent(model.value, model.gradient, ball_projection(theta, 0.5), theta, eta, steps=60)
        gained = np.diff(got.values)
        assert (gained >= 0.5 * eta * got.mapping2 - 1e-13).all()
        best = float((model.states_S * model.advantages_SA.max(axis=1)).sum()) * model.weight
        assert got.mapping2.mean() <= got.rate_bound(best, eta) + 1e-13
        assert np.linalg.norm(got.thetas - theta, axis=1).max() <= 0.5 + 1e-12


def test_too_long_steps_break_the_ascent() -> None:
    """-x^2 has L = 2; at eta = 3/L the gain falls short of eta/2 |mapping|^2, and beyond 2/L it is a loss."""

    def value(x: Floats) -> Floats:
        return np.asarray(-(x @ x))

    for eta, ascends in [(0.5, True), (0.75, False), (1.5, False)]:
        got = projected_ascent(value, lambda x: -2.0 * x, lambda x: x, np.array([1.0]), eta, steps=1)
        assert (np.diff(got.values)[0] >= 0.5 * eta * got.mapping2[0] - 1e-12) == ascends
    with pytest.raises(ValueError, match="start must lie"):
        projected_ascent(value, lambda x: -2.0 * x, lambda x: np.clip(x, 0.0, 0.5), np.array([1.0]), 0.5, steps=1)


def test_the_region_of_eq_tr_is_convex_in_the_logits_and_the_reversed_one_is_not() -> None:
    """thm:pgd projects on a convex set. KL(cur||new) is convex in new's logits; KL(new||cur) is not."""
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((5000, 4)) * 2.0
    first, second = logits + rng.standard_normal((5000, 4)) * 3.0, logits + rng.standard_normal((5000, 4)) * 3.0
    cur, middle = softmax(logits), softmax(0.5 * (first + second))
    ends = [softmax(first), softmax(second)]
    kept = np.maximum(*(information.kl(cur, end) for end in ends))
    assert (information.kl(cur, middle) <= kept + 1e-12).all()
    reversed_kept = np.maximum(*(information.kl(end, cur) for end in ends))
    assert (information.kl(middle, cur) > reversed_kept + 1e-3).any()
