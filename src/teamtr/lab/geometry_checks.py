"""Checks of the statements about parameters and the Fisher metric (app:info-lower, app:pgd), on random cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from teamtr.lab.checks import Check, Draw, Outcome
from teamtr.theory import geometry, tabular
from teamtr.theory.certificates import step_penalty
from teamtr.types import Floats

Rng = np.random.Generator


def fisher_bridge(draw: Draw) -> Iterator[Outcome]:
    """lem:klfisher with a computed remainder, in both directions of the KL."""
    rng, size = draw.rng, draw.size
    states, messages = int(rng.integers(1, 4)), int(rng.integers(2, 6))
    shape = (size, states, messages)
    logits = rng.standard_normal(shape) * rng.choice([0.1, 1.0, 3.0], size=(size, 1, 1))
    step = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3.0, 0.5, size=(size, 1, 1))
    weights_BS = rng.dirichlet(np.ones(states), size=size)
    got = geometry.kl_fisher_bridge(logits, step, weights_BS)
    fisher_BKK = geometry.fisher(geometry.softmax(logits), geometry.table_features(states, messages), weights_BS)
    flat_BK = step.reshape(size, -1)
    quadratic_B = 0.5 * np.einsum("bk,bkl,bl->b", flat_BK, fisher_BKK, flat_BK)
    yield Outcome("lem:klfisher (quadratic)", quadratic_B, got.quadratic, equal=True)
    for name, exact, (low, high), direction in [
        ("ours:klfisher_cur_to_new", got.kl_cur_to_new, got.cur_to_new_interval, True),
        ("ours:klfisher_new_to_cur", got.kl_new_to_cur, got.new_to_cur_interval, False),
    ]:
        yield Outcome(f"{name} (above)", high, exact)
        yield Outcome(f"{name} (below)", exact, low)
        # The remainder is cubic in the norm of each state's own step; the lemma has the norm of the whole step.
        remainder_B = np.abs(exact - got.quadratic)
        norm_BS, norm_B = np.linalg.norm(step, axis=-1), np.linalg.norm(flat_BK, axis=-1)
        cubic_BS = geometry.cubic_constant(norm_BS, cur_to_new=direction) * norm_BS**3 / 6.0
        yield Outcome(f"{name} (cubic)", (weights_BS * cubic_BS).sum(axis=1), remainder_B)
        if not direction:
            whole_B = geometry.cubic_constant(norm_B, cur_to_new=False) * norm_B**3 / 6.0
            yield Outcome("lem:klfisher", whole_B, remainder_B)
    yield Outcome("ours:certified_radius", geometry.certified_radius(got.quadratic, got.reach), got.kl_cur_to_new)


def quadratic_ball(draw: Draw) -> Iterator[Outcome]:
    """lem:lin-quad: the printed maximizer is feasible, attains its value, and no other step on the ball gains more."""
    rng, size, count = draw.rng, draw.size, int(draw.rng.integers(2, 6))
    root = rng.standard_normal((size, count, count))
    matrix = root @ np.swapaxes(root, 1, 2) + 10.0 ** rng.uniform(-1.0, 1.0, size=(size, 1, 1)) * np.eye(count)
    gradient, radius = rng.standard_normal((size, count)), 10.0 ** rng.uniform(-4.0, 0.0, size=size)
    got = geometry.linear_gain(gradient, matrix, radius)
    used = 0.5 * np.einsum("bk,bkl,bl->b", got.step_K, matrix, got.step_K)
    yield Outcome("lem:lin-quad (fills)", radius, used, equal=True)
    yield Outcome("lem:lin-quad (value)", got.gain, (gradient * got.step_K).sum(axis=1), equal=True)
    # near the maximizer and anywhere
    other = got.step_K + rng.standard_normal((size, count)) * 10.0 ** rng.uniform(-3.0, 1.0, size=(size, 1))
    other *= np.sqrt(radius / (0.5 * np.einsum("bk,bkl,bl->b", other, matrix, other)))[:, None]
    yield Outcome("lem:lin-quad", got.gain, (gradient * other).sum(axis=1))


def natural_stage(draw: Draw) -> Iterator[Outcome]:
    """thm:info-lower-stage in the form that holds: a stage of natural-gradient steps on the random teams, with exact
    gains.

    Each agent in turn takes the step of lem:lin-quad on a table of message logits at its own states. As slack: the gain
    that the gradients promise, minus the true gain, is at most the occupancy terms at the steps' true KLs.
    """
    rng, size = draw.rng, draw.size
    team = _own_rows(draw.discounted.teams[0])
    start_B = team.return_B
    radius_B, eps_B = 10.0 ** rng.uniform(-9.0, -3.0, size=size), 10.0 ** rng.uniform(-3.0, 0.0, size=size)
    weight_B = 1.0 / (1.0 - team.gamma_B)
    promised_B, price_B, certified_B = np.zeros((3, size))
    identity = np.eye(team.space.size)
    for agent in draw.discounted.order:
        own_BS = team.occupancy_BS * (team.active_BS == agent)
        policy, advantage = team.policy_BSA, team.advantage_BSA
        gradient = weight_B[:, None, None] * own_BS[:, :, None] * policy * advantage  # A has mean 0: no centering
        covariance = policy[..., :, None] * (identity - policy[..., None, :])
        fisher = own_BS[:, :, None, None] * covariance + eps_B[:, None, None, None] * identity
        direction = np.linalg.solve(fisher, gradient[..., None])[..., 0]
        norm2_B = (gradient * direction).sum(axis=(1, 2))
        moves_B = norm2_B > 0
        length_B = np.where(moves_B, np.sqrt(2.0 * radius_B / np.where(moves_B, norm2_B, 1.0)), 0.0)
        step = length_B[:, None, None] * direction
        # The Hessian is block-diagonal over states: its norm is the largest block's, each bounded as in lem:smooth.
        roughest_B = (own_BS * np.abs(advantage).max(axis=2)).max(axis=1) * weight_B
        curvature_B = geometry.uniform_smoothness(roughest_B, geometry.TABLE_SPAN, 0.5, 1.0) / eps_B
        promise_B = geometry.budget_aware_gain(np.sqrt(2.0 * norm2_B), curvature_B, radius_B)
        promised_B = promised_B + promise_B
        bridge = geometry.kl_fisher_bridge(np.log(policy), step, own_BS)
        price_B = price_B + step_penalty(bridge.kl_cur_to_new, team.gamma_B, team.a_max_B)
        certified_B = certified_B + step_penalty(
            geometry.certified_radius(radius_B, bridge.reach), team.gamma_B, team.a_max_B
        )
        moved = geometry.softmax(np.log(policy) + step)
        reached_B = weight_B * (own_BS[:, :, None] * (moved - policy) * advantage).sum(axis=(1, 2))
        yield Outcome("thm:info-lower-stage (surrogate)", reached_B, promise_B)
        team = replace(team, logits_BSKV=_token_logits(team.space, moved))
    missed_B = promised_B - (team.return_B - start_B)
    yield Outcome("thm:info-lower-stage", price_B, missed_B)
    yield Outcome("ours:info_lower_stage_certified", certified_B, missed_B)


def _own_rows(team: tabular.DiscountedTeam) -> tabular.DiscountedTeam:
    """The same team with a separate policy row for every state."""
    logits = np.take_along_axis(team.logits_BSKV, team.row_BS[:, :, None, None], axis=1)
    return replace(team, logits_BSKV=logits, row_BS=np.broadcast_to(np.arange(logits.shape[1]), team.row_BS.shape))


def _token_logits(space: tabular.MessageSpace, policy_BSA: Floats) -> Floats:
    """Token logits of a message policy: the logarithm of the mass that passes through each prefix and token."""
    return np.log(np.maximum(space.token_mass(policy_BSA), 1e-300))


def _surrogates(rng: Rng, size: int) -> tuple[geometry.SurrogateModel, Floats]:
    states, messages, parameters = 3, 4, 5
    model = geometry.SurrogateModel(
        features_SAK=rng.standard_normal((size, states, messages, parameters)),
        states_S=rng.dirichlet(np.ones(states), size=size),
        advantages_SA=rng.uniform(-1.0, 1.0, size=(size, states, messages)),
        weight=1.0 / (1.0 - rng.choice([0.0, 0.5, 0.9], size=size)),
    )
    return model, rng.standard_normal((size, parameters))


def derivatives(draw: Draw) -> Iterator[Outcome]:
    """lem:grad-hess along random directions, against the derivatives of E_0[A e^(tX)] / E_0[e^(tX)] at t = 0; and
    lem:smooth: no Hessian exceeds the bound."""
    model, theta = _surrogates(draw.rng, draw.size)
    u = draw.rng.standard_normal(theta.shape)
    probs = model.probs_SA(theta)
    x = np.einsum("bsak,bk->bsa", model.features_SAK, u)
    a = model.advantages_SA

    def mean(values_BSA: Floats) -> Floats:
        return np.asarray((probs * values_BSA).sum(axis=-1))

    per_state = np.asarray(model.weight)[:, None] * model.states_S
    slope_BS = mean(a * x) - mean(a) * mean(x)
    bend_BS = mean(a * x**2) - mean(a) * mean(x**2) - 2.0 * mean(x) * slope_BS
    yield Outcome(
        "lem:grad-hess (gradient)",
        (model.gradient(theta) * u).sum(axis=1),
        (per_state * slope_BS).sum(axis=1),
        equal=True,
    )
    hessian = model.hessian(theta)
    curved_B = np.einsum("bk,bkl,bl->b", u, hessian, u)
    yield Outcome("lem:grad-hess (Hessian)", curved_B, (per_state * bend_BS).sum(axis=1), equal=True)
    yield Outcome("lem:smooth", model.smoothness(), np.abs(np.linalg.eigvalsh(hessian)).max(axis=-1))


def ascent(draw: Draw) -> Iterator[Outcome]:
    """thm:pgd: projected gradient ascent on random surrogates in a ball, with eta up to 1/L."""
    model, theta = _surrogates(draw.rng, draw.size)
    # smoothness() is sharper than the uniform bound, so that some eta are close to what the curvature allows.
    eta = draw.rng.uniform(0.2, 1.0, size=draw.size) / model.smoothness()
    project = geometry.ball_projection(theta, draw.rng.uniform(0.05, 1.0, size=draw.size))
    path = geometry.projected_ascent(model.value, model.gradient, project, theta, eta, steps=8)
    gained = np.diff(path.values, axis=0)
    yield Outcome("thm:pgd (step)", gained, 0.5 * eta * path.mapping2)
    best_BS = model.states_S * model.advantages_SA.max(axis=2)
    best_B = np.asarray(model.weight) * best_BS.sum(axis=1)
    yield Outcome("thm:pgd (rate)", path.rate_bound(best_B, eta), path.mapping2.mean(axis=0))


CHECKS: tuple[Check, ...] = (
    fisher_bridge,
    quadratic_ball,
    natural_stage,
    derivatives,
    ascent,
)
