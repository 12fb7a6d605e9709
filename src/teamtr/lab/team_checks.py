"""Checks of every statement about teams, computed exactly: token KL, occupancy, the paper's certificates, and ours.

A bound on "surrogate - gain" is a lower bound on the gain. Advantages are the true ones unless a check says otherwise;
an estimated advantage is a random array, and zeta is its realized error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from teamtr.lab.checks import Check, Draw, Outcome
from teamtr.theory.certificates import (
    joint_certificate,
    second_order_certificate,
    single_step_certificate,
    stage_certificate,
    stage_hp_certificate,
    stale_stage_certificate,
    surrogate_ceiling,
    turn_aware_certificate,
    turn_aware_penalties,
)
from teamtr.theory.information import mean_kl_envelope
from teamtr.theory.occupancy import (
    change_of_measure,
    cumulative_shift,
    discounted_sum,
    shift_by_kl,
    shift_by_max_tv,
    shift_by_tv,
    stale_gap,
)
from teamtr.theory.tabular import DiscountedStage, DiscountedStep, DiscountedTeam, kl, update_discounted
from teamtr.types import Floats

Outcomes = Iterator[Outcome]


# -- one speaker per turn, messages of tokens ------------------------------------------------------------------


def _joint_logp(team: DiscountedTeam) -> Floats:
    """log pi(a_1, ..., a_n | s) over the whole product of action sets, each agent's messages and a no-op: (B, S, all).

    -inf where an inactive agent would speak or the active one would not.
    """
    size, states, messages = team.logp_BSA.shape
    joint = np.zeros((size, states, 1))
    for agent in range(team.agents):
        active = (team.active_BS == agent)[:, :, None]
        speaks = np.where(active, team.logp_BSA, -np.inf)
        silent = np.where(active, -np.inf, np.zeros((size, states, 1)))
        factor = np.concatenate([speaks, silent], axis=2)
        joint = (joint[..., None] + factor[:, :, None, :]).reshape(size, states, -1)
    assert joint.shape[-1] == (messages + 1) ** team.agents
    return joint


def _joint_kl(logp: Floats, logq: Floats) -> Floats:
    """KL by direct summation over joint actions; an action without mass counts 0."""
    has_mass = logp > -np.inf
    p = np.exp(np.where(has_mass, logp, 0.0)) * has_mass
    ratio = np.where(has_mass, logp, 0.0) - np.where(has_mass, logq, 0.0)
    return np.asarray((p * ratio).sum(axis=-1))


def active_factor(draw: Draw) -> Outcomes:
    """lem:activefactor, lem:kltokfactor, lem:klstep: the team's KL, by brute force over joint actions."""
    for step, agent in zip(draw.discounted.steps, draw.discounted.order, strict=True):
        old, new = _joint_logp(step.old), _joint_logp(step.new)
        yield Outcome("lem:activefactor", kl(step.new.logp_BSA, step.old.logp_BSA), _joint_kl(new, old), equal=True)
        team_B = step.old.expect(_joint_kl(old, new))
        # The agent's KL from its tokens, in the states where it speaks.
        chained_BS = np.einsum("bsa,bsa->bs", step.old.policy_BSA, step.chained_kl_BSA)
        agent_B = step.old.expect(chained_BS * (step.old.active_BS == agent))
        yield Outcome("lem:klstep", agent_B, team_B, equal=True)
        yield Outcome("lem:kltokfactor", agent_B, team_B, equal=True)


def token_chain(draw: Draw) -> Outcomes:
    """lem:chainrule (eq:token_chain_rule) from enumerated messages, and lem:avgvssum."""
    for step in draw.discounted.steps:
        space = step.old.space
        mean_BS = np.einsum("bsa,bsa->bs", step.old.policy_BSA, step.chained_kl_BSA)
        average_BS = np.einsum("bsa,bsa->bs", step.old.policy_BSA, step.chained_kl_BSA / space.lengths_A)
        yield Outcome("lem:chainrule", mean_BS, step.kl_BS, equal=True)
        yield Outcome("lem:avgvssum", space.lengths_A.max() * average_BS, step.kl_BS)
        yield Outcome("lem:avgvssum", step.kl_BS, average_BS)


def discounted_series(draw: Draw) -> Outcomes:
    """lem:kltokequals (def:kltok as a series over time) and eq:occ_measure_identity (any function of the state)."""
    for step in draw.discounted.steps:
        old = step.old
        series_B = discounted_sum(old.kernel_BSS, old.start_BS, old.gamma_B, step.kl_BS)
        yield Outcome("lem:kltokequals", step.kl_B, series_B, equal=True)
    g_BS = draw.rng.standard_normal(old.start_BS.shape)
    series_B = discounted_sum(old.kernel_BSS, old.start_BS, old.gamma_B, g_BS)
    yield Outcome("eq:occ_measure_identity", old.expect(g_BS), series_B, equal=True)


# -- occupancy ---------------------------------------------------------------------------------------------------


def _shift(a: DiscountedTeam, b: DiscountedTeam) -> Floats:
    """The largest |E_a f - E_b f| over |f| <= 1: the L1 distance, attained by f = sign of the difference."""
    return np.asarray(np.abs(a.occupancy_BS - b.occupancy_BS).sum(axis=1))


def occupancy_shift(draw: Draw) -> Outcomes:
    """lem:occmax, lem:occexp and lem:occ for the worst f, and lem:expectedklpenalty for a random f, scaled by its
    maximum."""
    for step in draw.discounted.steps:
        gamma_B, true_B = step.old.gamma_B, _shift(step.new, step.old)
        yield Outcome("lem:occmax", shift_by_max_tv(gamma_B, step.tv_BS.max(axis=1)), true_B)
        yield Outcome("lem:occexp", shift_by_tv(gamma_B, step.tv_B), true_B)
        yield Outcome("lem:occ", shift_by_kl(gamma_B, step.kl_B), true_B)
        f_BS = draw.rng.standard_normal(step.kl_BS.shape)
        some_B = np.abs(step.new.expect(f_BS) - step.old.expect(f_BS))
        yield Outcome("lem:expectedklpenalty", shift_by_kl(gamma_B, step.kl_B, np.abs(f_BS).max(axis=1)), some_B)


def _deltas(stage: DiscountedStage, steps: int) -> Floats:
    """D_tok of the first steps, each under the team before it: (B, I)."""
    return np.stack([step.kl_B for step in stage.steps[:steps]], axis=-1)


def cumulative_occupancy(draw: Draw) -> Outcomes:
    """lem:cumocc, eq:stale_occ_general: each intermediate team against the first."""
    stage = draw.discounted
    for i in range(1, len(stage.teams)):
        bound_B = cumulative_shift(stage.teams[0].gamma_B, _deltas(stage, i))
        yield Outcome("lem:cumocc", bound_B, _shift(stage.teams[i], stage.teams[0]))


def _estimate(draw: Draw, step: DiscountedStep) -> Floats:
    """A random wrong estimate of the advantage, within A_max."""
    a_max = step.old.a_max_B[:, None, None]
    noise = draw.rng.uniform(-1.0, 1.0, size=step.old.advantage_BSA.shape) * a_max
    share = draw.rng.choice([0.01, 0.3, 1.0], size=(draw.size, 1, 1))
    return np.asarray(np.clip(step.old.advantage_BSA + share * noise, -a_max, a_max))


def stale_surrogates(draw: Draw) -> Outcomes:
    """eq:stale_surrogate_gap for each step, with the true and with a wrong advantage; rem:quad2lin for their sum."""
    stage, start = draw.discounted, draw.discounted.teams[0]
    total_B, bound_B = np.zeros(draw.size), np.zeros(draw.size)
    for i, step in enumerate(stage.steps[1:], start=1):
        limit_B = stale_gap(start.gamma_B, _deltas(stage, i), step.old.a_max_B)
        for estimate_BSA in (step.old.advantage_BSA, _estimate(draw, step)):
            fresh_B, stale_B = step.surrogate_of(estimate_BSA), step.surrogate_of(estimate_BSA, start.occupancy_BS)
            yield Outcome("eq:stale_surrogate_gap", limit_B, np.abs(fresh_B - stale_B))
        total_B, bound_B = total_B + np.abs(fresh_B - stale_B), bound_B + limit_B
    if len(stage.steps) > 1:
        yield Outcome("rem:quad2lin", bound_B, total_B)


# -- the paper's certificates --------------------------------------------------------------------------------------


def performance_difference(draw: Draw) -> Outcomes:
    """The performance difference identity, with which app:single begins, for discounted and for episodic teams."""
    for step in (*draw.discounted.steps, draw.discounted.whole):
        sum_B = step.new.expect(step.expected_advantage_BS) / (1.0 - step.old.gamma_B)
        yield Outcome("app:single", sum_B, step.gain_B, equal=True)
    for episodic in (*draw.episodic.steps, draw.episodic.whole):
        terms = zip(episodic.new.visits, episodic.expected_advantage, strict=False)
        sum_B = np.sum([np.einsum("bn,bn->b", p_BN, f_BN) for p_BN, f_BN in terms], axis=0)
        yield Outcome("app:single", sum_B, episodic.gain_B, equal=True)


def single_step(draw: Draw) -> Outcomes:
    """thm:single with the true and with a wrong advantage; and the ceiling because of which it is never positive for
    gamma >= 1/2."""
    for step in draw.discounted.steps:
        gamma_B, a_max_B = step.old.gamma_B, step.old.a_max_B
        for estimate_BSA in (step.old.advantage_BSA, _estimate(draw, step)):
            surrogate_B = step.surrogate_of(estimate_BSA)
            zeta_B = step.zeta_of(estimate_BSA)
            certificate = single_step_certificate(surrogate_B, step.kl_B, zeta_B, gamma_B, a_max_B)
            yield Outcome("thm:single", surrogate_B - certificate.lower_bound, surrogate_B - step.gain_B)
        ceiling_B = surrogate_ceiling(step.kl_B, gamma_B, a_max_B)
        yield Outcome("ours:surrogate_ceiling", ceiling_B, np.abs(step.surrogate_B))


def finite_horizon(draw: Draw) -> Outcomes:
    """thm:single with 1 / (1 - gamma) = H, for episodes; proved in ``single_step_certificate``."""
    for step in draw.episodic.steps:
        horizon = step.old.horizon
        delta_B = step.kl_by_turn_BK.sum(axis=1) / horizon
        a_max_B = np.max([np.abs(a_BNA).max(axis=(1, 2)) for a_BNA in step.old.advantages], axis=0)
        certificate = single_step_certificate(step.surrogate_B, delta_B, 0.0, 1.0 - 1.0 / horizon, a_max_B)
        excess_B = step.surrogate_B - step.gain_B
        yield Outcome("thm:single with gamma = 1 - 1/H", step.surrogate_B - certificate.lower_bound, excess_B)


def _stage_terms(draw: Draw, stage: DiscountedStage, *, stale: bool) -> tuple[Floats, Floats, Floats]:
    """Surrogates (fresh or stale), zetas and A_max of a stage with wrong advantages: (B, I), (B, I), (B)."""
    states_BS = stage.teams[0].occupancy_BS
    estimates = [_estimate(draw, step) for step in stage.steps]
    pairs = list(zip(stage.steps, estimates, strict=True))
    surrogates = [step.surrogate_of(est, states_BS if stale else None) for step, est in pairs]
    zetas = [step.zeta_of(est) for step, est in pairs]
    a_max_B = np.max([step.old.a_max_B for step in stage.steps], axis=0)
    return np.stack(surrogates, axis=-1), np.stack(zetas, axis=-1), a_max_B


def stage(draw: Draw) -> Outcomes:
    """thm:stage and thm:stage_stale with wrong advantages."""
    steps, gamma_B = draw.discounted, draw.discounted.teams[0].gamma_B
    deltas_BI, gain_B = _deltas(steps, len(steps.steps)), steps.whole.gain_B
    for name, certify, stale in (
        ("thm:stage", stage_certificate, False),
        ("thm:stage_stale", stale_stage_certificate, True),
    ):
        surrogates_BI, zetas_BI, a_max_B = _stage_terms(draw, steps, stale=stale)
        certificate = certify(surrogates_BI, deltas_BI, zetas_BI, gamma_B, a_max_B)
        total_B = surrogates_BI.sum(axis=-1)
        yield Outcome(name, total_B - certificate.lower_bound, total_B - gain_B)


def stage_from_samples(draw: Draw) -> Outcomes:
    """thm:stage-hp from 16 groups per step, drawn independently of the updates, with ratios clipped at 0.2.

    At confidence 1 - 1e-9 a violation is not chance.
    """
    steps, groups, eps_w = draw.discounted, 16, 0.2
    gamma_B = steps.teams[0].gamma_B
    a_max_B = np.max([step.old.a_max_B for step in steps.steps], axis=0)
    means = []
    for step in steps.steps:
        law_BX = (step.old.occupancy_BS[:, :, None] * step.old.policy_BSA).reshape(draw.size, -1)
        cdf_BX = np.cumsum(law_BX, axis=1) / law_BX.sum(axis=1, keepdims=True)
        drawn_BJ = (draw.rng.random((draw.size, groups, 1)) > cdf_BX[:, None, :]).sum(axis=-1)
        ratio_BSA = np.exp(np.minimum(step.new.logp_BSA - step.old.logp_BSA, 1.0))  # no overflow; clipped at 1.2 below
        value_BSA = np.clip(ratio_BSA, 1.0 - eps_w, 1.0 + eps_w) * step.old.advantage_BSA
        value_BX = value_BSA.reshape(draw.size, -1) / (1.0 - gamma_B[:, None])
        means.append(np.take_along_axis(value_BX, drawn_BJ, axis=1).mean(axis=1))
    surrogates_BI = np.stack(means, axis=-1)
    certificate = stage_hp_certificate(
        surrogates_BI,
        _deltas(steps, len(steps.steps)),
        np.zeros_like(surrogates_BI),
        groups,
        gamma=gamma_B,
        a_max=a_max_B,
        a_clip=np.maximum(a_max_B, 1e-12),  # A_max is 0 if no message changes the return
        eps_w=eps_w,
        delta_conf=1e-9,
    )
    total_B = surrogates_BI.sum(axis=-1)
    yield Outcome("thm:stage-hp", total_B - certificate.lower_bound, total_B - steps.whole.gain_B)


def replacement(draw: Draw) -> Outcomes:
    """prop:pnp: an agent is replaced by an unrelated one and then updated; and ours:swap, the most that the swap itself
    may lose."""
    team = draw.discounted.teams[-1]
    agent = int(draw.rng.integers(team.agents))
    stranger = draw.rng.standard_normal(team.logits_BSKV.shape) * draw.rng.choice([0.5, 2.0, 5.0])
    swapped = team.replace_agent(agent, stranger)
    swap = DiscountedStep(team, swapped)
    yield Outcome("ours:swap", mean_kl_envelope(team.a_max_B, swap.kl_B, team.gamma_B), -swap.gain_B)
    step = DiscountedStep(swapped, update_discounted(draw.rng, swapped, agent))
    certificate = single_step_certificate(step.surrogate_B, step.kl_B, 0.0, swapped.gamma_B, swapped.a_max_B)
    yield Outcome("prop:pnp", step.surrogate_B - certificate.lower_bound, step.surrogate_B - step.gain_B)


def tightening(draw: Draw) -> Outcomes:
    """prop:tight with all other terms unchanged: a larger surrogate or a smaller radius never lowers the bound."""
    steps = draw.discounted
    deltas_BI = _deltas(steps, len(steps.steps))
    surrogates_BI, zetas_BI, a_max_B = _stage_terms(draw, steps, stale=False)
    more_BI = surrogates_BI + draw.rng.exponential(size=surrogates_BI.shape)
    less_BI = deltas_BI * draw.rng.random(deltas_BI.shape)
    gamma_B = steps.teams[0].gamma_B
    before = stage_certificate(surrogates_BI, deltas_BI, zetas_BI, gamma_B, a_max_B).lower_bound
    for surrogates, deltas in ((more_BI, deltas_BI), (surrogates_BI, less_BI)):
        after = stage_certificate(surrogates, deltas, zetas_BI, gamma_B, a_max_B).lower_bound
        yield Outcome("prop:tight", np.asarray(after), np.asarray(before))


# -- ours --------------------------------------------------------------------------------------------------------


def change_of_law(draw: Draw) -> Outcomes:
    """ours:change_of_measure on random distributions, on those that move mass to where almost none was, and on tilted
    ones."""
    size, outcomes = draw.size, 6
    p = draw.rng.gamma(draw.rng.choice([0.02, 0.3, 1.0], size=(size, 1)), size=(size, outcomes)) + 1e-14
    p /= p.sum(axis=1, keepdims=True)
    other = draw.rng.dirichlet(np.ones(outcomes), size=size)
    mix = 10.0 ** draw.rng.uniform(-3.0, 0.0, size=(size, 1))
    f = np.minimum(draw.rng.normal(0.0, 0.5, size=(size, outcomes)), 1.0)
    rare = np.eye(outcomes)[p.argmin(axis=1)]
    f_rare = np.where(rare == 1.0, 1.0, 0.1 * f)
    tilted = p * np.exp(mix * f)
    for q, g in (
        ((1.0 - mix) * p + mix * other, f),
        ((1.0 - mix) * p + mix * rare, f_rare),
        (tilted / tilted.sum(axis=1, keepdims=True), f),
    ):
        moment = (p * g**2).sum(axis=1)
        true = ((q - p) * g).sum(axis=1)
        yield Outcome("ours:change_of_measure", change_of_measure(kl(np.log(p), np.log(q)), moment), true)


def turn_aware(draw: Draw) -> Outcomes:
    """Our certificate for each step, by KL alone and with TV; for a stage of fresh batches; and for a stage from one
    batch."""
    excess_total_B, bound_total_B = np.zeros(draw.size), np.zeros(draw.size)
    for step in draw.episodic.steps:
        surrogate_B, range_B, turns_B = step.surrogate_B, step.old.reward_range_B, step.turns_B
        by_kl = turn_aware_certificate(surrogate_B, step.kl_by_turn_BK, range_B, turns=turns_B)
        by_tv = turn_aware_certificate(
            surrogate_B, step.kl_by_turn_BK, range_B, turns=turns_B, tv_by_turn_K=step.tv_by_turn_BK
        )
        excess_B = surrogate_B - step.gain_B
        yield Outcome("ours:turn_aware", surrogate_B - by_kl.lower_bound, excess_B)
        yield Outcome("ours:turn_aware_tv", surrogate_B - by_tv.lower_bound, excess_B)
        excess_total_B, bound_total_B = excess_total_B + excess_B, bound_total_B + surrogate_B - by_kl.lower_bound
    yield Outcome("ours:turn_aware_stage", bound_total_B, excess_total_B)
    whole = draw.episodic.whole
    stale = turn_aware_certificate(
        whole.surrogate_B, whole.kl_by_turn_BK, whole.old.reward_range_B, turns=whole.turns_B
    )
    yield Outcome("ours:turn_aware_stale", whole.surrogate_B - stale.lower_bound, whole.surrogate_B - whole.gain_B)


def turn_identities(draw: Draw) -> Outcomes:
    """ours:one_turn: the gain is the surrogate if no episode lets the agent speak twice. ours:reweighted_gain: the gain
    from importance ratios. ours:measured_pairs: a bound from exact visits and TV."""
    for step in draw.episodic.steps:
        (agent,), old, new = step.agents, step.old, step.new
        once_B = step.turns_B <= 1
        yield Outcome("ours:one_turn", step.surrogate_B[once_B], step.gain_B[once_B], equal=True)
        # The importance weight of each whole history: the product of its ratios.
        log_ratio = np.zeros_like(old.start_BX)
        for active_BN, old_BNA, new_BNA in zip(old.active, old.logp, new.logp, strict=True):
            spoken = (active_BN == agent)[:, :, None]
            log_ratio = (log_ratio[:, :, None] + np.where(spoken, new_BNA - old_BNA, 0.0)).reshape(draw.size, -1)
        with np.errstate(over="ignore", invalid="ignore"):  # ratios overflow where the mass is 0, or almost
            weighted = np.where(old.visits[-1] > 0.0, old.visits[-1] * np.exp(log_ratio), 0.0)
        finite_B = np.isfinite(weighted).all(axis=1) & ((old.visits[-1] > 0.0) | (new.visits[-1] == 0.0)).all(axis=1)
        reweighted_B = ((weighted - old.visits[-1]) * old.reward_BN).sum(axis=1)
        yield Outcome("ours:reweighted_gain", reweighted_B[finite_B], step.gain_B[finite_B], equal=True)
        terms = zip(new.visits, old.visits, step.tv, strict=False)
        pairs_B = np.sum([(np.abs(q_BN - p_BN) * tv_BN).sum(axis=1) for q_BN, p_BN, tv_BN in terms], axis=0)
        yield Outcome("ours:measured_pairs", old.reward_range_B * pairs_B, step.surrogate_B - step.gain_B)


def discounted_second_order(draw: Draw) -> Outcomes:
    """Our discounted certificates, for each step and for a stage from one batch."""
    for step in (*draw.discounted.steps, draw.discounted.whole):
        old, surrogate_B = step.old, step.surrogate_B
        second = second_order_certificate(surrogate_B, step.kl_B, old.gamma_B, old.q_range_B)
        yield Outcome("ours:second_order", surrogate_B - second.lower_bound, surrogate_B - step.gain_B)
    joint = joint_certificate(surrogate_B, step.kl_B, old.gamma_B, old.a_max_B)
    yield Outcome("ours:joint_stage", surrogate_B - joint.lower_bound, surrogate_B - step.gain_B)


CHECKS: Sequence[Check] = (
    active_factor,
    token_chain,
    discounted_series,
    occupancy_shift,
    cumulative_occupancy,
    stale_surrogates,
    performance_difference,
    single_step,
    finite_horizon,
    stage,
    stage_from_samples,
    replacement,
    tightening,
    change_of_law,
    turn_aware,
    turn_identities,
    discounted_second_order,
)


# -- deliberately wrong bounds -----------------------------------------------------------------------------------


def sabotaged_occupancy(draw: Draw) -> Outcomes:
    """lem:occ with half its constant."""
    for step in draw.discounted.steps:
        yield Outcome("wrong:lem:occ, half", 0.5 * shift_by_kl(step.old.gamma_B, step.kl_B), _shift(step.new, step.old))


def sabotaged_chain_rule(draw: Draw) -> Outcomes:
    """lem:chainrule with the arguments of the token KLs swapped."""
    for step in draw.discounted.steps:
        swapped = DiscountedStep(step.new, step.old)
        mean_BS = np.einsum("bsa,bsa->bs", step.old.policy_BSA, swapped.chained_kl_BSA)
        yield Outcome("wrong:lem:chainrule, KL swapped", mean_BS, step.kl_BS, equal=True)


def sabotaged_average(draw: Draw) -> Outcomes:
    """lem:avgvssum with T_max - 1, wherever a message may have two tokens."""
    for step in draw.discounted.steps:
        lengths_A = step.old.space.lengths_A
        average_BS = np.einsum("bsa,bsa->bs", step.old.policy_BSA, step.chained_kl_BSA / lengths_A)
        if lengths_A.max() > 1:
            yield Outcome("wrong:lem:avgvssum, T - 1", (lengths_A.max() - 1) * average_BS, step.kl_BS)


def sabotaged_single_step(draw: Draw) -> Outcomes:
    """thm:single without its occupancy term, and with half of it."""
    for step in draw.discounted.steps:
        certificate = single_step_certificate(step.surrogate_B, step.kl_B, 0.0, step.old.gamma_B, step.old.a_max_B)
        penalty_B = step.surrogate_B - certificate.lower_bound
        excess_B = step.surrogate_B - step.gain_B
        yield Outcome("wrong:thm:single, no occupancy", np.zeros_like(excess_B), excess_B)
        yield Outcome("wrong:thm:single, half", 0.5 * penalty_B, excess_B)


def sabotaged_stale_gap(draw: Draw) -> Outcomes:
    """eq:stale_surrogate_gap without the last step before i; and with half its constant."""
    stage_, start = draw.discounted, draw.discounted.teams[0]
    for i, step in enumerate(stage_.steps[1:], start=1):
        deltas_BI = _deltas(stage_, i)
        true_B = np.abs(step.surrogate_B - step.surrogate_of(step.old.advantage_BSA, start.occupancy_BS))
        short_B = stale_gap(start.gamma_B, deltas_BI[:, :-1], step.old.a_max_B)
        yield Outcome("wrong:eq:stale_surrogate_gap, one short", short_B, true_B)
        half_B = 0.5 * stale_gap(start.gamma_B, deltas_BI, step.old.a_max_B)
        yield Outcome("wrong:eq:stale_surrogate_gap, half", half_B, true_B)


def sabotaged_turn_aware(draw: Draw) -> Outcomes:
    """Our certificate without the root, with half the linear term, and without the penalty of the second turn."""
    for step in draw.episodic.steps:
        kl_BK, range_B = step.kl_by_turn_BK, step.old.reward_range_B
        excess_B = step.surrogate_B - step.gain_B
        before_BK = np.cumsum(kl_BK, axis=-1) - kl_BK
        root_BK = np.sqrt(before_BK * kl_BK)
        yield Outcome("wrong:ours:turn_aware, no root", range_B * before_BK.sum(axis=-1), excess_B)
        half_BK = 0.5 * before_BK + root_BK
        yield Outcome("wrong:ours:turn_aware, half", range_B * half_BK.sum(axis=-1), excess_B)
        later_B = turn_aware_penalties(kl_BK, range_B, turns=step.turns_B)[:, 2:].sum(axis=-1)
        yield Outcome("wrong:ours:turn_aware, second turn free", later_B, excess_B)


def sabotaged_second_order(draw: Draw) -> Outcomes:
    """Our discounted certificate with half its penalty."""
    for step in draw.discounted.steps:
        second = second_order_certificate(step.surrogate_B, step.kl_B, step.old.gamma_B, step.old.q_range_B)
        half_B = 0.5 * (step.surrogate_B - second.lower_bound)
        yield Outcome("wrong:ours:second_order, half", half_B, step.surrogate_B - step.gain_B)


SABOTAGED: Sequence[Check] = (
    sabotaged_occupancy,
    sabotaged_chain_rule,
    sabotaged_average,
    sabotaged_single_step,
    sabotaged_stale_gap,
    sabotaged_turn_aware,
    sabotaged_second_order,
)
"""Wrong versions of the bounds. Each of their outcomes must be violated somewhere, or ``verify`` proves nothing."""
