"""KL, Fisher matrix and gradients of softmax policies: the local geometry of one update (app:info-lower, app:pgd).

A policy here is log-linear: at state s, pi_theta(a | s) is proportional to exp(theta . phi(s, a)). A table of logits
is the special case in which every (s, a) has a parameter of its own. Axes: S states, A messages, K parameters, with an
optional leading axis for teams.

Everything is derived from one function of one variable. Move theta by t Delta and let X_a = Delta . phi(s, a). The
log-sum-exp psi(t) at state s has psi' = E_t X, psi'' = Var_t X and psi''' = the third central moment of X, where E_t is
under pi_{theta + t Delta}. Then

    KL(cur || new) = psi(1) - psi(0) - psi'(0)    = integral over [0, 1] of (1 - t) psi''(t) dt
    KL(new || cur) = psi'(1) - psi(1) + psi(0)    = integral over [0, 1] of      t  psi''(t) dt

and both are Var_0 X / 2 = 1/2 Delta' F Delta to second order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats

THIRD_MOMENT = 1.0 / (6.0 * math.sqrt(3.0))
"""The largest third central moment of a variable in an interval of length 1. For a given mean it is linear in the law,
so a two-point law attains it: p (1 - p) (1 - 2p) times the cube of the distance, largest at p = (1 - 1/sqrt 3) / 2."""

TABLE_SPAN = math.sqrt(2.0)
"""The distance of two messages' features in a logit table (``feature_span``)."""

FOURTH_CUMULANT = 0.125
"""The largest absolute fourth cumulant m4 - 3 m2^2 of a variable in an interval of length 1: at least -2 m2^2 >= -1/8
since m4 >= m2^2 and m2 <= 1/4; at most m2 - 3 m2^2 <= 1/12 since |X - EX| <= 1."""


def softmax(logits_A: ArrayLike) -> Floats:
    """Probabilities along the last axis."""
    logits = np.asarray(logits_A, dtype=np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def table_features(states: int, actions: int) -> Floats:
    """phi of a logit table: parameter s * A + a is the logit of message a at state s."""
    return np.eye(states * actions).reshape(states, actions, states * actions)


def fisher(probs_SA: ArrayLike, features_SAK: ArrayLike, weights_S: ArrayLike) -> Floats:
    """F = E over s ~ weights of Cov of phi under pi(. | s): the Fisher matrix of lem:klfisher."""
    probs, features, weights = _floats(probs_SA, features_SAK, weights_S)
    away = features - np.einsum("...sa,...sak->...sk", probs, features)[..., None, :]
    return np.einsum("...s,...sa,...sak,...sal->...kl", weights, probs, away, away)


# -- KL and Fisher ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bridge:
    """Both KLs of a step, their common quadratic model, and intervals that must contain them.

    ``reach`` is the largest span of Delta . phi(s, .) over states with weight: how far logits of one state move apart.
    """

    quadratic: Floats
    kl_cur_to_new: Floats
    kl_new_to_cur: Floats
    cur_to_new_interval: tuple[Floats, Floats]
    new_to_cur_interval: tuple[Floats, Floats]
    reach: Floats


def kl_fisher_bridge(logits_SA: ArrayLike, step_SA: ArrayLike, weights_S: ArrayLike) -> Bridge:
    """KL of a step of the logits = 1/2 Delta' F Delta + remainder, with an explicit remainder (lem:klfisher).

    ``step_SA`` is the change of the logits, Delta . phi(s, a). The paper assumes a constant B_3; for a softmax the
    assumption is not needed. |psi'''| <= rho psi'', rho being the span of the step at s, because |X - EX| <= rho. So
    psi''(t) lies between psi''(0) exp(-rho t) and psi''(0) exp(rho t), and the two integrals above lie between

        psi''(0) (exp(-rho) - 1 + rho) / rho^2       and  psi''(0) (exp(rho) - 1 - rho) / rho^2     for KL(cur||new)
        psi''(0) (1 - (1 + rho) exp(-rho)) / rho^2   and  psi''(0) (1 + (rho - 1) exp(rho)) / rho^2 for KL(new||cur)

    These hold for steps of any length and tend to psi''(0) / 2 as rho falls. lem:klfisher is stated for KL(new||cur);
    eq:tr constrains KL(cur||new). The two agree to second order; their third-order terms are psi'''/3 and psi'''/6.
    """
    logits, step, weights = _floats(logits_SA, step_SA, weights_S)
    probs = softmax(logits)
    mean = (probs * step).sum(axis=-1, keepdims=True)
    variance_S = (probs * (step - mean) ** 2).sum(axis=-1)
    span_S = step.max(axis=-1) - step.min(axis=-1)
    cur_to_new_S, new_to_cur_S = _both_kls(probs, step - mean)

    def over_states(values_S: Floats) -> Floats:
        # A state without weight contributes 0, even if exp(span) overflows.
        return np.asarray((weights * np.where(weights > 0, values_S, 0.0)).sum(axis=-1))

    return Bridge(
        quadratic=0.5 * over_states(variance_S),
        kl_cur_to_new=over_states(cur_to_new_S),
        kl_new_to_cur=over_states(new_to_cur_S),
        cur_to_new_interval=(
            over_states(variance_S * _reverse_factor(-span_S)),
            over_states(variance_S * _reverse_factor(span_S)),
        ),
        new_to_cur_interval=(
            over_states(variance_S * _forward_factor(-span_S)),
            over_states(variance_S * _forward_factor(span_S)),
        ),
        reach=np.where(weights > 0, span_S, 0.0).max(axis=-1),
    )


def cubic_constant(radius_norm: ArrayLike, feature_span: ArrayLike = TABLE_SPAN, *, cur_to_new: bool) -> Floats:
    """B_3 of lem:klfisher for steps of Euclidean length at most ``radius_norm``: |R(Delta)| <= B_3 |Delta|^3 / 6.

    ``feature_span`` is the largest |phi(s, a) - phi(s, b)|, sqrt(2) for a logit table. Along a unit direction the span
    of X is at most that, so |psi'''| <= span^3 / (6 sqrt 3) and |psi''''| <= span^4 / 8. The third derivative along
    the ray is psi''' for KL(cur||new) and 2 psi''' + t psi'''' for KL(new||cur), the paper's direction. (The paper
    requires a bound in all directions at all points of the ball; Taylor's formula needs only the ray.)
    """
    span, norm = _floats(feature_span, radius_norm)
    third = THIRD_MOMENT * span**3
    if cur_to_new:
        return third + 0.0 * norm
    return 2.0 * third + norm * FOURTH_CUMULANT * span**4


def _both_kls(probs_A: Floats, centred_step_A: Floats) -> tuple[Floats, Floats]:
    """KL(cur||new) and KL(new||cur) from the centered change X of the logits: psi(1) = log E exp X, psi'(0) = 0."""
    excess = (probs_A * _expm1_less(centred_step_A)).sum(axis=-1)  # E exp(X) - 1, without cancellation since E X = 0
    psi = np.log1p(excess)
    top = centred_step_A.max(axis=-1, keepdims=True)
    tilted = probs_A * np.exp(centred_step_A - top)
    mean_new = (tilted * centred_step_A).sum(axis=-1) / tilted.sum(axis=-1)
    return np.maximum(psi, 0.0), np.maximum(mean_new - psi, 0.0)


def _expm1_less(x: Floats) -> Floats:
    """exp(x) - 1 - x without cancellation near 0."""
    small = np.where(np.abs(x) < 1e-2, x, 0.0)
    series = small**2 * (0.5 + small * (1 / 6 + small * (1 / 24 + small * (1 / 120 + small / 720))))
    return np.where(np.abs(x) < 1e-2, series, np.expm1(x) - x)


def _reverse_factor(rho: Floats) -> Floats:
    """(exp(rho) - 1 - rho) / rho^2, 1/2 at 0; with -rho the lower bound."""
    near = np.abs(rho) < 1e-2
    safe = np.where(near, 1.0, rho)
    series = 0.5 + rho * (1 / 6 + rho * (1 / 24 + rho * (1 / 120 + rho / 720)))
    with np.errstate(over="ignore"):
        return np.where(near, series, (np.expm1(safe) - safe) / safe**2)


def _forward_factor(rho: Floats) -> Floats:
    """(1 + (rho - 1) exp(rho)) / rho^2, 1/2 at 0; with -rho the lower bound."""
    near = np.abs(rho) < 1e-2
    safe = np.where(near, 1.0, rho)
    series = 0.5 + rho * (1 / 3 + rho * (1 / 8 + rho * (1 / 30 + rho / 144)))
    with np.errstate(over="ignore"):
        return np.where(near, series, (safe * np.exp(safe) - np.expm1(safe)) / safe**2)


# -- the best step in a quadratic ball ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearGain:
    """The maximizer of g . Delta in the ball 1/2 Delta' F Delta <= radius, its gain kappa sqrt(radius), and kappa."""

    step_K: Floats
    gain: Floats
    kappa: Floats


def linear_gain(gradient_K: ArrayLike, fisher_KK: ArrayLike, radius: ArrayLike) -> LinearGain:
    """The natural-gradient step: sqrt(2 delta / g'F^-1 g) F^-1 g gains sqrt(2 delta g'F^-1 g) (lem:lin-quad).

    F must be positive definite: a logit table's Fisher matrix is not (adding a constant to all logits of a state
    changes nothing), so regularize it, F + eps I. For g = 0 no step gains anything; we return the zero step, where the
    printed formula divides by zero.
    """
    gradient, matrix, delta = _floats(gradient_K, fisher_KK, radius)
    direction = np.linalg.solve(matrix, gradient[..., None])[..., 0]
    norm2 = (gradient * direction).sum(axis=-1)
    if not (norm2 >= 0).all() or not (np.linalg.eigvalsh(matrix)[..., 0] > 0).all():
        raise ValueError("linear_gain: the Fisher matrix must be positive definite: add a multiple of the identity")
    if not (delta >= 0).all():
        raise ValueError(f"linear_gain: the radius must be at least 0, got {delta}")
    length = np.where(norm2 > 0, np.sqrt(2.0 * delta / np.where(norm2 > 0, norm2, 1.0)), 0.0)
    kappa = np.sqrt(2.0 * norm2)
    return LinearGain(step_K=length[..., None] * direction, gain=kappa * np.sqrt(delta), kappa=kappa)


def curvature_price(smoothness: ArrayLike, fisher_KK: ArrayLike) -> Floats:
    """a = L_loc / lambda_min(F): inside the ball 1/2 L_loc |Delta|^2 <= a delta (thm:info-lower-stage)."""
    (matrix,) = _floats(fisher_KK)
    return np.asarray(smoothness, dtype=np.float64) / np.linalg.eigvalsh(matrix)[..., 0]


def budget_aware_gain(kappa: ArrayLike, price: ArrayLike, radius: ArrayLike) -> Floats:
    """kappa sqrt(delta) - a delta: a lower bound on the surrogate gain of the *natural-gradient* step.

    The part of thm:info-lower-stage that holds, per step. Let L be the population surrogate with fixed states and
    advantages, L_loc-smooth between theta and theta + Delta*, Delta* the maximizer of lem:lin-quad. Then
    L(theta + Delta*) - L(theta) >= g . Delta* - 1/2 L_loc |Delta*|^2 >= kappa sqrt(delta) - a delta, which also bounds
    the best update in the ball. It does not bound any other update in the ball: -Delta* is in the ball too, and loses.
    Missing in print: L(theta), which is 0 only if the advantages average to 0 under the current policy; and that the
    quadratic ball is not the KL ball (``certified_radius``). The printed sampling term corrects nothing here, since
    kappa is computed from the population's gradient.
    """
    kappa_, price_, delta = _floats(kappa, price, radius)
    return kappa_ * np.sqrt(delta) - price_ * delta


def certified_radius(quadratic: ArrayLike, reach: ArrayLike) -> Floats:
    """An upper bound of the true KL(cur||new) of a step from its quadratic model: 2 q (exp(rho) - 1 - rho) / rho^2.

    ``reach`` is the span of the step's logits (``Bridge.reach``). A certificate must use this bound in place of the
    radius if the quadratic model was constrained; the paper omits the difference.
    """
    q, rho = _floats(quadratic, reach)
    return 2.0 * q * _reverse_factor(rho)


def budget_aware_stage(
    kappa_I: ArrayLike,
    price_I: ArrayLike,
    radii_I: ArrayLike,
    occupancy_I: ArrayLike,
    zeta_I: ArrayLike,
    start_I: ArrayLike = 0.0,
) -> Floats:
    """A lower bound on a stage of natural-gradient steps: the sum of start + kappa sqrt(delta) - a delta - penalties.

    thm:info-lower-stage without its sampling and ratio terms, which a population statement does not need. ``start_I``
    is L_i(theta_cur), 0 for the true advantage. ``occupancy_I`` must be taken at each step's true KL, or at
    ``certified_radius``. With the paper's penalty, sqrt(2) gamma A_max sqrt(delta) / (1 - gamma)^2, and
    kappa <= sqrt(2) A_max / (1 - gamma), the sum is never positive for gamma >= 1/2.
    """
    kappa, radii, occupancy, zeta, start = _floats(kappa_I, radii_I, occupancy_I, zeta_I, start_I)
    per_step = start + budget_aware_gain(kappa, price_I, radii) - occupancy - zeta
    return np.asarray(per_step.sum(axis=-1))


# -- the surrogate in parameters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SurrogateModel:
    """L(theta) = weight * sum_s d(s) sum_a pi_theta(a | s) A(s, a) for a log-linear policy, d and A held fixed.

    The unclipped surrogate of one step as a function of the updated agent's parameters (eq:surrogate, app:pgd).
    ``features_SAK`` as in ``table_features``; leading axes (teams) broadcast.
    """

    features_SAK: Floats
    states_S: Floats
    advantages_SA: Floats
    weight: float | Floats = 1.0

    def probs_SA(self, theta_K: Floats) -> Floats:
        return softmax(np.einsum("...sak,...k->...sa", self.features_SAK, theta_K))

    def value(self, theta_K: Floats) -> Floats:
        return np.asarray(self._mass_SA(self.probs_SA(theta_K)).sum(axis=(-2, -1)))

    def gradient(self, theta_K: Floats) -> Floats:
        """weight E[A score] under the policy at theta itself (lem:grad-hess)."""
        probs, score = self._score(theta_K)
        return np.asarray(np.einsum("...sa,...sak->...k", self._mass_SA(probs), score))

    def hessian(self, theta_K: Floats) -> Floats:
        """weight E[A (Hessian of log pi + score score')] (lem:grad-hess); the former is minus the covariance of phi."""
        probs, score = self._score(theta_K)
        mass_SA = self._mass_SA(probs)
        # E over a of A (score score' - cov) = E over a of (A - mean A) score score', state by state
        about_SA = mass_SA - probs * mass_SA.sum(axis=-1, keepdims=True)
        return np.asarray(np.einsum("...sa,...sak,...sal->...kl", about_SA, score, score))

    def smoothness(self) -> Floats:
        """``uniform_smoothness`` with this model's own constants: B_1 the span of the features, B_2 its square / 4."""
        span = feature_span(self.features_SAK)
        total = np.abs(self.states_S).sum(axis=-1) * self.weight
        return uniform_smoothness(np.abs(self.advantages_SA).max(axis=(-2, -1)), span, span**2 / 4.0, total)

    def _mass_SA(self, probs_SA: Floats) -> Floats:
        weight = np.asarray(self.weight, dtype=np.float64)[..., None, None]
        return np.asarray(weight * self.states_S[..., :, None] * probs_SA * self.advantages_SA)

    def _score(self, theta_K: Floats) -> tuple[Floats, Floats]:
        probs = self.probs_SA(theta_K)
        mean_SK = np.einsum("...sa,...sak->...sk", probs, self.features_SAK)
        return probs, self.features_SAK - mean_SK[..., :, None, :]


def feature_span(features_SAK: ArrayLike) -> Floats:
    """The largest |phi(s, a) - phi(s, b)|: bounds every score, and its square over 4 every Hessian of log pi.

    The score is phi(s, a) minus a convex combination of the phi(s, b); the Hessian is minus their covariance, whose
    largest eigenvalue is a variance of a variable within an interval of that length. sqrt(2) and 1/2 for a table.
    """
    (features,) = _floats(features_SAK)
    distance = np.linalg.norm(features[..., :, None, :] - features[..., None, :, :], axis=-1)
    return np.asarray(distance.max(axis=(-3, -2, -1)))


def uniform_smoothness(
    a_clip: ArrayLike, b1: ArrayLike, b2: ArrayLike, weight: ArrayLike, summed_steps: int = 1
) -> Floats:
    """L <= n A_clip weight (B_2 + B_1^2) (lem:smooth), n = ``summed_steps``.

    The n is needed only if the n steps share parameters. With parameters of its own for each agent, the Hessian of
    the sum is block-diagonal and its norm is the largest block's, so that n = 1 serves for the whole stage.
    """
    bound, first, second, total = _floats(a_clip, b1, b2, weight)
    return np.asarray(summed_steps * bound * total * (second + first**2))


@dataclass(frozen=True)
class Ascent:
    """The T + 1 iterates of projected gradient ascent along the first axis, and |gradient mapping|^2 at the first T."""

    thetas: Floats
    values: Floats
    mapping2: Floats

    def rate_bound(self, best: ArrayLike, eta: ArrayLike) -> Floats:
        """2 (G* - G(theta_0)) / (eta T), an upper bound of the mean of ``mapping2`` over the steps (thm:pgd)."""
        top, size = _floats(best, eta)
        return np.asarray(2.0 * (top - self.values[0]) / (size * len(self.mapping2)))


def projected_ascent(
    value: Callable[[Floats], Floats],
    gradient: Callable[[Floats], Floats],
    project: Callable[[Floats], Floats],
    start_K: Floats,
    eta: ArrayLike,
    steps: int,
) -> Ascent:
    """theta <- Proj(theta + eta gradient), thm:pgd: each step gains at least eta/2 |gradient mapping|^2.

    Needs eta <= 1/L, a closed convex set that contains ``start_K``, and exact gradients. For log-linear policies the
    region KL(cur||new) <= delta *is* convex in theta (psi is convex and the rest linear); the region with the
    arguments exchanged is not, and neither is convex in the weights of a network.
    """
    theta, size = _floats(start_K, eta)
    if not np.allclose(project(theta), theta, atol=1e-12):
        raise ValueError("projected_ascent: the start must lie in the set that is projected on")
    thetas, values, mapping2 = [theta], [value(theta)], []
    for _ in range(steps):
        new = project(theta + size[..., None] * gradient(theta))
        mapping2.append(((new - theta) ** 2).sum(axis=-1) / size**2)
        theta = new
        thetas.append(theta)
        values.append(value(theta))
    return Ascent(np.array(thetas), np.array(values), np.array(mapping2))


def ball_projection(centre_K: Floats, radius: ArrayLike) -> Callable[[Floats], Floats]:
    """The Euclidean projection on a ball."""
    (length,) = _floats(radius)

    def project(theta_K: Floats) -> Floats:
        away = theta_K - centre_K
        norm = np.linalg.norm(away, axis=-1)
        return np.asarray(centre_K + away * np.minimum(1.0, length / np.maximum(norm, 1e-300))[..., None])

    return project


def _floats(*values: ArrayLike) -> tuple[Floats, ...]:
    return tuple(np.asarray(value, dtype=np.float64) for value in values)
