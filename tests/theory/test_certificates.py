"""Certificates: numbers by hand, estimates against exact teams, and where the printed statements fail."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from teamtr.lab.verify import crossed, rare_branch
from teamtr.theory.certificates import (
    Certificate,
    by_own_turn,
    joint_certificate,
    measured_pair_penalty,
    reweighted_gain_by_problem,
    second_order_certificate,
    single_step_certificate,
    stage_certificate,
    stage_hp_certificate,
    stale_stage_certificate,
    step_penalty,
    surrogate_by_problem,
    surrogate_ceiling,
    turn_aware_certificate,
    turn_aware_penalties,
    turn_aware_price,
)
from teamtr.theory.occupancy import change_of_measure
from teamtr.theory.tabular import (
    DiscountedStep,
    DiscountedTeam,
    EpisodicStep,
    MessageSpace,
    kl,
    random_discounted_stage,
    random_episodic_stage,
    random_episodic_team,
    update_episodic,
)


def small_team(
    second_S: list[float], active_S: list[int], reward_SA: list[list[float]], gamma: float
) -> DiscountedTeam:
    """State 0 leads by message 0 to state 1 and by message 1 to state 2, for ever; or a single state for ever."""
    states = len(second_S)
    transition = np.zeros((states, 2, states))
    if states == 1:
        transition[:] = 1.0
    else:
        transition[0, 0, 1] = transition[0, 1, 2] = transition[1, :, 1] = transition[2, :, 2] = 1.0
    second = np.array(second_S)
    return DiscountedTeam(
        space=MessageSpace(2, 1),
        agents=1 + max(active_S),
        logits_BSKV=np.log(np.stack([1 - second, second], axis=-1))[None, :, None, :],
        row_BS=np.arange(states)[None],
        active_BS=np.array([active_S]),
        transition_BSAS=transition[None],
        reward_BSA=np.array([reward_SA]),
        start_BS=np.eye(states)[None, 0],
        gamma_B=np.array([gamma]),
    )


def with_second(team: DiscountedTeam, agent: int, second_S: list[float]) -> DiscountedTeam:
    second = np.array(second_S)
    return team.replace_agent(agent, np.log(np.stack([1 - second, second], axis=-1))[None, :, None, :])


def value(certificate: Certificate) -> float:
    assert isinstance(certificate.lower_bound, float)
    return certificate.lower_bound


# -- the paper's, by hand ------------------------------------------------------------------------------------


def test_single_step_by_hand() -> None:
    # sqrt(2) * 0.5 / 0.25 * 2 * 0.1 = 0.565685; 0.02 / 0.5 = 0.04
    got = single_step_certificate(0.5, 0.01, 0.02, 0.5, 2.0)
    assert got.kind == "single_step"
    assert got.terms == pytest.approx({"surrogate": 0.5, "occupancy": -0.5656854249, "estimation": -0.04})
    assert got.lower_bound == pytest.approx(0.5 - 0.5656854249 - 0.04)
    # the example: about 12 A_max at gamma 0.9 and delta 0.01
    assert step_penalty(0.01, 0.9, 1.0) == pytest.approx(12.73, abs=0.005)


def test_stage_is_the_sum_of_its_steps() -> None:
    surrogates, deltas, zetas = [0.5, 0.1, 0.3], [0.01, 0.04, 0.09], [0.0, 0.01, 0.02]
    steps = [value(single_step_certificate(*terms, 0.5, 2.0)) for terms in zip(surrogates, deltas, zetas, strict=True)]
    assert value(stage_certificate(surrogates, deltas, zetas, 0.5, 2.0)) == pytest.approx(sum(steps))
    # roots 0.1, 0.2, 0.3: fresh 0.6; stale 0.1 + (0.2 + 0.1) + (0.3 + 0.1 + 0.2) = 1.0
    fresh = stage_certificate(surrogates, deltas, zetas, 0.5, 2.0).terms
    stale = stale_stage_certificate(surrogates, deltas, zetas, 0.5, 2.0).terms
    assert stale["occupancy"] == pytest.approx(fresh["occupancy"] / 0.6)
    assert stale["estimation"] == fresh["estimation"] == pytest.approx(-0.06)


def test_certificates_of_many_teams_at_once() -> None:
    got = stage_certificate(
        [[0.5, 0.1], [0.2, 0.2]], [[0.01, 0.04], [0.0, 0.0]], np.zeros((2, 2)), [0.5, 0.9], [2.0, 1.0]
    )
    one = value(stage_certificate([0.5, 0.1], [0.01, 0.04], [0.0, 0.0], 0.5, 2.0))
    assert got.lower_bound == pytest.approx([one, 0.4])
    assert np.sum(list(got.terms.values()), axis=0) == pytest.approx(got.lower_bound)


def test_stage_hp_by_hand() -> None:
    got = stage_hp_certificate(
        [0.5, 0.1], [0.01, 0.04], [0.0, 0.02], [100, 400], gamma=0.5, a_max=2.0, a_clip=3.0, eps_w=0.2, delta_conf=0.1
    )
    exact = stage_certificate([0.5, 0.1], [0.01, 0.04], [0.0, 0.02], 0.5, 2.0)
    assert {k: got.terms[k] for k in exact.terms} == pytest.approx(exact.terms)
    # (1 + 0.2) 3 / 0.5 = 7.2; log(2 * 2 / 0.1) = log 40; sqrt(2 log 40 / 100) + sqrt(2 log 40 / 400)
    assert got.terms["sampling"] == pytest.approx(-7.2 * math.sqrt(2 * math.log(40)) * (0.1 + 0.05))
    # 3 / 0.5 * (sqrt(0.02) + sqrt(0.08))
    assert got.terms["ratio_clipping"] == pytest.approx(-6.0 * (math.sqrt(0.02) + math.sqrt(0.08)))


# -- where the printed statements fail, or say nothing -------------------------------------------------------


def test_the_paper_s_bound_is_never_positive_from_gamma_one_half_on_and_ours_is() -> None:
    rng = np.random.default_rng(0)
    stage = random_discounted_stage(
        rng, 400, agents=2, states=4, space=MessageSpace(2, 2), kinds=("natural",), radius=1e-4
    )
    step = stage.steps[0]
    high = step.old.gamma_B >= 0.5
    assert high.sum() > 100
    paper = single_step_certificate(step.surrogate_B, step.kl_B, 0.0, step.old.gamma_B, step.old.a_max_B)
    ours = second_order_certificate(step.surrogate_B, step.kl_B, step.old.gamma_B, step.old.q_range_B)
    assert (np.asarray(paper.lower_bound)[high] <= 0).all()
    assert (step.surrogate_B <= surrogate_ceiling(step.kl_B, step.old.gamma_B, step.old.a_max_B) + 1e-12).all()
    middle = (step.old.gamma_B == 0.5) & (step.gain_B > 1e-6)
    assert (np.asarray(ours.lower_bound)[middle] > 0).mean() > 0.5
    assert (np.asarray(ours.lower_bound) <= step.gain_B + 1e-12).all()


def test_optimism_breaks_the_single_step_bound_as_printed() -> None:
    """thm:single with eq:bias as printed: zeta averages the estimate over the data with the update held fixed.

    One state, both messages worth the same, so A = 0 and nothing can be gained. The data say +1 of one message and -1
    of the other, or the reverse, at even odds: on average 0, so the printed zeta is 0 for every update. The update
    follows the data from 1/2 to 0.6. The bound promises 0.2 whichever way the data fell.
    """
    gamma = 0.01
    old = small_team([0.5], [0], [[0.0, 0.0]], gamma)
    estimates = [np.array([[[-1.0, 1.0]]]), np.array([[[1.0, -1.0]]])]
    for data, said in zip(estimates, (0.6, 0.4), strict=True):
        step = DiscountedStep(old, with_second(old, 0, [said]))
        mean_over_data = 0.5 * (estimates[0] + estimates[1])
        printed = single_step_certificate(step.surrogate_of(data), step.kl_B, step.zeta_of(mean_over_data), gamma, 1.0)
        assert step.gain_B == 0.0
        assert np.asarray(printed.lower_bound) > 0.19  # false
        realised = single_step_certificate(step.surrogate_of(data), step.kl_B, step.zeta_of(data), gamma, 1.0)
        assert np.asarray(realised.lower_bound) <= 0.0  # true


def test_learning_and_certifying_on_the_same_groups_breaks_the_high_probability_bound() -> None:
    """thm:stage-hp as printed, with L-hat on the groups that the update learned from.

    A million prompts, 5,000 of them drawn, rewards +-1 that have nothing to do with the message: the true gain is 0.
    The update remembers each drawn prompt, w = 1.2 where the reward was +1 and 0.8 where it was -1, and leaves the
    others alone: its KL over all prompts is tiny, and the bound promises a gain with 95 %.
    """
    rng = np.random.default_rng(0)
    drawn, prompts = 5_000, 1_000_000
    reward = rng.choice([-1.0, 1.0], size=drawn)
    ratio = np.where(reward > 0, 1.2, 0.8)
    # said with 1/2, then with 0.6 or 0.4: log(1 / sqrt(0.96)) nats at each remembered prompt
    delta = -0.5 * math.log(0.96) * drawn / prompts
    settings = {"gamma": 0.01, "a_max": 1.0, "a_clip": 1.0, "eps_w": 0.2, "delta_conf": 0.05}
    own = float((ratio * reward).mean()) / 0.99
    assert value(stage_hp_certificate([own], [delta], [0.0], [drawn], **settings)) > 0.1  # false
    fresh = float(rng.choice([-1.0, 1.0], size=drawn).mean()) / 0.99  # other prompts, where w = 1
    assert value(stage_hp_certificate([fresh], [delta], [0.0], [drawn], **settings)) < 0.0


def test_a_better_step_can_lower_the_stage_bound() -> None:
    """prop:tight without "all other terms unchanged".

    Agent 0 leads to state 1 or 2, agent 1 then gets better in state 1. Moving towards state 2 is the better first
    step, at the same radius, but leaves agent 1 less to improve.
    """
    gamma = 0.05
    team = small_team([0.5, 0.01, 0.5], [0, 1, 1], [[0.0, 0.0], [0.0, 1.0], [0.2, 0.2]], gamma)
    bounds, firsts, deltas = [], [], []
    for second in (0.3, 0.7):
        one = with_second(team, 0, [second, 0.5, 0.5])
        two = with_second(one, 1, [0.5, 0.9, 0.5])
        steps = [DiscountedStep(team, one), DiscountedStep(one, two)]
        surrogates, kls = np.stack([s.surrogate_B for s in steps], -1), np.stack([s.kl_B for s in steps], -1)
        a_max = max(s.old.a_max_B[0] for s in steps)
        bounds.append(stage_certificate(surrogates, kls, np.zeros((1, 2)), gamma, a_max).lower_bound[0])
        firsts.append(surrogates[0, 0])
        deltas.append(kls[0, 0])
    assert deltas[0] == pytest.approx(deltas[1], rel=1e-12)
    assert firsts[1] > 0 > firsts[0]
    assert bounds[1] < bounds[0]


def test_an_unseen_router_breaks_the_active_factor() -> None:
    """lem:activefactor needs the speaker to be a function of the state.

    A coin outside the state picks the speaker. The team's law over (a_1, a_2) is half agent 1's and half agent 2's,
    and when agent 1 is updated the team's KL is half of agent 1's, whoever is called active.
    """
    old, new, other = np.array([0.5, 0.5]), np.array([0.25, 0.75]), np.array([0.9, 0.1])
    team_old = np.concatenate([old, other]) / 2  # agent 1 speaks and 2 does not, or the reverse
    team_new = np.concatenate([new, other]) / 2
    assert kl(np.log(team_new), np.log(team_old)) == pytest.approx(kl(np.log(new), np.log(old)) / 2, rel=1e-12)


def test_shared_parameters_break_the_step_reduction() -> None:
    """lem:klstep, lem:kltokfactor need agents that do not share what is trained: here agents 0 and 1 share a row."""
    apart = small_team([0.5, 0.5, 0.5], [0, 1, 1], [[0.0, 0.0]] * 3, 0.5)
    shared = replace(apart, row_BS=np.array([[0, 0, 0]]))
    moved = replace(shared, logits_BSKV=np.log([[[[0.25, 0.75]], [[0.5, 0.5]], [[0.5, 0.5]]]]))
    step = DiscountedStep(shared, moved)
    agent = step.old.expect(step.kl_BS * (step.old.active_BS == 0))
    assert step.kl_B == pytest.approx(2 * agent, rel=1e-12)  # d(0) = 1/2, and the rest moves as well
    separate = DiscountedStep(apart, with_second(apart, 0, [0.75, 0.5, 0.5]))
    assert separate.kl_B == pytest.approx(agent, rel=1e-12)


def test_the_growth_with_n_is_of_the_proofs() -> None:
    """rem:quad2lin: n = 16 equal radii cost 136, 16 and, taken as one step of the team, 4 roots of delta."""
    n, root = 16, step_penalty(0.01, 0.9, 1.0)
    deltas = np.full(n, 0.01)
    stale = stale_stage_certificate(np.zeros(n), deltas, np.zeros(n), 0.9, 1.0)
    fresh = stage_certificate(np.zeros(n), deltas, np.zeros(n), 0.9, 1.0)
    joint = joint_certificate(0.0, deltas.sum(), 0.9, 1.0)
    assert [value(c) / -root for c in (stale, fresh, joint)] == pytest.approx([136.0, 16.0, 4.0])


# -- turn-aware ----------------------------------------------------------------------------------------------


def test_turn_aware_by_hand() -> None:
    once = turn_aware_certificate(0.03, [0.01], 1.0)
    assert once.terms == {"surrogate": 0.03, "occupancy": 0.0, "sampling": 0.0}
    assert once.lower_bound == 0.03
    # two turns: X(0.01, 0.005); three: + X(0.02, 0.005); the closed forms are 0.02 and 0.02 + 0.02 + 0.01 * sqrt(2)
    two = turn_aware_penalties([0.01, 0.01], 1.0)
    assert two == pytest.approx([0.0, 0.017526207], rel=1e-6)
    three = turn_aware_penalties([0.01, 0.01, 0.01], 2.0)
    assert three == pytest.approx([0.0, 0.035052415, 0.059368474], rel=1e-6)
    assert (three <= 2 * np.array([0.0, 0.02, 0.02 + 0.01 * math.sqrt(2)])).all()
    assert value(turn_aware_certificate(0.03, [0.01, 0.01], 1.0, sampling_error=0.01)) == pytest.approx(
        0.03 - 0.017526207 - 0.01, rel=1e-6
    )
    assert [turn_aware_price(k, 2.0) for k in (1, 2, 3)] == pytest.approx([0.0, 3.5052415, 9.442089], rel=1e-6)


def test_turn_aware_takes_the_first_order_for_large_steps() -> None:
    # TV before at most sqrt(1 - exp(-5)), and as much again for what was gained on the old histories
    far = turn_aware_penalties([5.0, 5.0], 1.0)[1]
    assert far == pytest.approx(2 * math.sqrt(1 - math.exp(-5)))
    assert far < change_of_measure(5.0, 2.5)
    # with TVs known: 0.3 before, 0.1 now
    assert turn_aware_penalties([5.0, 5.0], 1.0, tv_by_turn_K=[0.3, 0.1])[1] == pytest.approx(0.4)


def test_turn_aware_counts_a_turn_that_the_old_team_never_grants() -> None:
    """A second turn that never happened may happen under the new team; a turn that cannot happen costs nothing."""
    assert turn_aware_penalties([0.02, 0.0], 1.0).tolist() == [0.0, 0.02]
    assert turn_aware_penalties([0.02, 0.0], 1.0, turns=1).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="more often"):
        turn_aware_penalties([0.02, 0.01], 1.0, turns=1)
    for bad in (-0.01, math.nan):
        with pytest.raises(ValueError, match="none below 0"):
            turn_aware_penalties([0.02, bad], 1.0)


def test_small_early_turns_are_not_swallowed_by_large_late_ones() -> None:
    """cumsum minus itself would lose 1e-14 beside 25."""
    got = turn_aware_penalties([2e-14, 25.0], 1.0)[1]
    assert got == pytest.approx(2 * math.sqrt(1e-14), rel=1e-6)


def test_neither_term_of_the_turn_aware_bound_can_go() -> None:
    rng = np.random.default_rng(0)
    for stage, tight in ((crossed(rng, 200, agents=1), 1.02), (rare_branch(rng, 200), 1.02)):
        (step,) = stage.steps
        certificate = turn_aware_certificate(step.surrogate_B, step.kl_by_turn_BK, step.old.reward_range_B)
        ratio = (step.surrogate_B - certificate.lower_bound) / (step.surrogate_B - step.gain_B)
        assert ratio.min() < tight
        assert ratio.min() >= 1.0
    # by hand: e = 0.01, tau = 0.1 -> the loss is 2 * 0.01 * 0.1
    again = crossed(rng, 50, agents=2).whole
    e, tau = again.tv[0][:, 0], again.tv[1][:, 0]
    assert again.surrogate_B - again.gain_B == pytest.approx(2 * e * tau, rel=1e-9)


def test_an_agent_that_speaks_once_gains_its_surrogate() -> None:
    rng = np.random.default_rng(3)
    stage = random_episodic_stage(rng, 50, agents=3, horizon=3, space=MessageSpace(3, 1), visibility="blind_round")
    for step in stage.steps:
        got = turn_aware_certificate(step.surrogate_B, step.kl_by_turn_BK, step.old.reward_range_B, turns=step.turns_B)
        assert got.lower_bound == pytest.approx(step.gain_B, abs=1e-12)


# -- from a batch --------------------------------------------------------------------------------------------


def test_by_own_turn_by_hand() -> None:
    # three episodes: 1, 2 and no messages; means over all three
    assert by_own_turn([0.3, 0.6, 0.9], [0, 1, 1], 3, turns=2) == pytest.approx([0.3, 0.3])
    assert by_own_turn([0.3], [0], 2, turns=3) == pytest.approx([0.15, 0.0, 0.0])
    assert by_own_turn([], [], 2, turns=2).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="may have 1"):
        by_own_turn([0.3, 0.6], [0, 0], 1, turns=1)
    with pytest.raises(ValueError, match="ascend"):
        by_own_turn([0.3, 0.6], [1, 0], 2, turns=1)


def test_estimates_of_a_batch_by_hand() -> None:
    # one problem, two episodes with returns 1 and 0: baselines are each other's return, so 1 and -1
    # episode 0: ratios 1.1, 1.2; episode 1: ratio 0.9
    log_ratio, episode = np.log([1.1, 1.2, 0.9]), [0, 0, 1]
    # (0.1 + 0.2) * 1 and (-0.1) * (-1), averaged
    assert surrogate_by_problem(log_ratio, episode, [[1.0, 0.0]]) == pytest.approx([0.2])
    # (1.32 - 1) and 0.1
    assert reweighted_gain_by_problem(log_ratio, episode, [[1.0, 0.0]]) == pytest.approx([0.21])
    # |1.1 - 1| |1.2 - 1| / 2 over two episodes, range 3
    assert measured_pair_penalty(log_ratio, episode, 2, 3.0) == pytest.approx(3.0 * 0.5 * 0.02 / 2)
    # a group without signal gains nothing, whatever the ratio; one message cannot overflow the rest
    assert surrogate_by_problem([math.inf, 0.0], [0, 1], [[1.0, 1.0]]).tolist() == [0.0]
    assert surrogate_by_problem([1e4], [0], [[1.0, 0.0]]) == pytest.approx([math.expm1(20.0) / 2])
    with pytest.raises(ValueError, match="at least two episodes"):
        surrogate_by_problem(log_ratio, episode, [[1.0], [0.0]])


def test_estimates_agree_with_an_exact_team() -> None:
    """Episodes of a team whose last message names the next speaker: each estimate within 4.5 standard errors."""
    rng = np.random.default_rng(21)
    team = random_episodic_team(
        rng,
        1,
        agents=2,
        horizon=4,
        space=MessageSpace(2, 2, ends=True),
        router="addressed",
        stops=True,
        rewards="dense",
    )
    new = update_episodic(rng, team, 0, kinds=("random",), radius_B=np.array([0.05]))
    step = EpisodicStep(team, new, (0,))
    problems, group = 20_000, 2
    episodes = problems * group
    history, said = np.zeros(episodes, dtype=np.int64), []
    for t, policy_BNA in enumerate(team.policies):
        laws = policy_BNA[0][history]
        message = (rng.random((episodes, 1)) > np.cumsum(laws, axis=1)).sum(axis=1).clip(max=2)
        own = team.active[t][0, history] == 0
        ratio = (new.logp[t] - team.logp[t])[0, history, message]
        said += [(e, t, ratio[e], step.kl[t][0, history[e]]) for e in np.flatnonzero(own)]
        history = history * 3 + message
    said.sort(key=lambda row: row[:2])
    episode, log_ratio, nats = (np.array([row[i] for row in said]) for i in (0, 2, 3))
    returns = team.reward_BN[0][history].reshape(problems, group)

    def errors(values: np.ndarray, expected: float) -> float:
        return float(abs(values.mean() - expected) / (values.std() / np.sqrt(len(values))))

    assert step.turns_B[0] >= 2
    assert abs(step.surrogate_B[0] - step.gain_B[0]) > 1e-4  # the two are not the same number here
    assert errors(surrogate_by_problem(log_ratio, episode, returns), step.surrogate_B[0]) < 4.5
    assert errors(reweighted_gain_by_problem(log_ratio, episode, returns), step.gain_B[0]) < 4.5
    by_turn = by_own_turn(nats, episode, episodes, turns=4)
    assert by_turn == pytest.approx(step.kl_by_turn_BK[0], rel=0.1, abs=1e-4)
    pairs = sum((np.abs(q - p) * d).sum() for q, p, d in zip(new.visits, team.visits, step.tv, strict=False))
    assert measured_pair_penalty(log_ratio, episode, episodes, 1.0) == pytest.approx(pairs, rel=0.1)
