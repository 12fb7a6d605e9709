"""Tabular teams against hand arithmetic, a slow independent solver, and simulation."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from teamtr.theory.tabular import (
    NOBODY,
    UPDATES,
    DiscountedStep,
    DiscountedTeam,
    EpisodicStep,
    EpisodicTeam,
    MessageSpace,
    kl,
    random_discounted_stage,
    random_discounted_team,
    random_episodic_stage,
    random_episodic_team,
    scale_to_radius,
    update_discounted,
    update_episodic,
)


def chain(first: float) -> DiscountedTeam:
    """Message 1 leads from state 0 to state 1, which pays 1 for ever; message 0 stays. Pr(message 1) = first."""
    return DiscountedTeam(
        space=MessageSpace(2, 1),
        agents=2,
        logits_BSKV=np.log([[[[1.0 - first, first]], [[0.5, 0.5]]]]),
        row_BS=np.array([[0, 1]]),
        active_BS=np.array([[0, 1]]),
        transition_BSAS=np.array([[[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]]]),
        reward_BSA=np.array([[[0.0, 0.0], [1.0, 1.0]]]),
        start_BS=np.array([[1.0, 0.0]]),
        gamma_B=np.array([0.5]),
    )


def volunteers(p: float, q: float, *, blind: bool = True) -> EpisodicTeam:
    """Two agents, one word each, 1 with probability p and q; paid 1 if exactly one of them says 1."""
    rows = (np.array([0]), np.array([1, 1]) if blind else np.array([1, 2]))
    logits = np.log([[[[1 - p, p]], [[1 - q, q]], [[1 - q, q]]]])
    return EpisodicTeam(
        space=MessageSpace(2, 1),
        logits_BnRKV=np.stack([logits, logits], axis=1),
        rows=rows,
        active=(np.array([[0]]), np.array([[1, 1]])),
        start_BX=np.ones((1, 1)),
        reward_BN=np.array([[0.0, 1.0, 1.0, 0.0]]),
    )


# -- messages ------------------------------------------------------------------------------------------------


def test_messages_with_and_without_end() -> None:
    assert MessageSpace(2, 2).words == ((0, 0), (0, 1), (1, 0), (1, 1))
    ends = MessageSpace(3, 2, ends=True)
    assert ends.words == ((0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2))
    assert ends.prefixes == ((), (1,), (2,))
    assert ends.lengths_A.tolist() == [1, 2, 2, 2, 2, 2, 2]
    assert MessageSpace(2, 3, ends=True).words == ((0,), (1, 0), (1, 1, 0), (1, 1, 1))
    with pytest.raises(ValueError, match="two symbols"):
        MessageSpace(1, 3)


def test_message_probabilities_by_hand() -> None:
    # Pr(end) = 0.4 at first, 0.3 after "1": 0.4, 0.6 * 0.3, 0.6 * 0.7
    space = MessageSpace(2, 2, ends=True)
    logp = space.message_logprobs(np.log([[0.4, 0.6], [0.3, 0.7]]))
    assert np.exp(logp) == pytest.approx([0.4, 0.18, 0.42], rel=1e-14)
    # through each prefix and token: (0.4, 0.6) and (0.18, 0.42)
    assert space.token_mass(np.exp(logp)) == pytest.approx(np.array([[0.4, 0.6], [0.18, 0.42]]), rel=1e-14)
    # a token KL of 5 at the start and 7 after "1": messages pay 5, 12, 12
    assert space.per_message(np.array([5.0, 7.0])).tolist() == [5.0, 12.0, 12.0]


def test_kl_of_near_and_far_laws() -> None:
    p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert kl(np.log(p), np.log(q)) == pytest.approx(0.5 * np.log(4.0 / 3.0), rel=1e-14)
    assert kl(np.log(p), np.log(p)) == 0.0
    e = 1e-9  # 2 e^2, far below the rounding of the textbook sum
    near = np.array([0.5 + e, 0.5 - e])
    assert kl(np.log(p), np.log(near)) == pytest.approx(2.0 * e**2, rel=1e-6)
    assert kl(np.array([0.0, -700.0]), np.array([-700.0, 0.0])) == pytest.approx(700.0)


# -- discounted ----------------------------------------------------------------------------------------------


def test_a_chain_by_hand() -> None:
    team = chain(0.5)
    # V(1) = 1 / (1 - 1/2) = 2; V(0) = (V(0) / 2 + 2 / 2) / 2 = 2/3
    assert team.value_BS[0] == pytest.approx([2 / 3, 2.0], rel=1e-14)
    assert team.q_BSA[0, 0] == pytest.approx([1 / 3, 1.0], rel=1e-14)
    assert team.advantage_BSA[0, 0] == pytest.approx([-1 / 3, 1 / 3], rel=1e-14)
    # d(0) = (1/2) / (1 - 1/4)
    assert team.occupancy_BS[0] == pytest.approx([2 / 3, 1 / 3], rel=1e-14)
    assert team.return_B == pytest.approx(2 / 3, rel=1e-14)
    assert team.a_max_B == pytest.approx(1 / 3)
    assert team.q_range_B == pytest.approx(2 / 3)


def test_a_step_of_the_chain_by_hand() -> None:
    step = DiscountedStep(chain(0.5), chain(0.75))
    # V'(0) = (V'(0) / 4 + 3/4 * 2) / 2, so 6/7; gain 6/7 - 2/3
    assert step.gain_B == pytest.approx(4 / 21, rel=1e-13)
    assert step.expected_advantage_BS[0] == pytest.approx([1 / 6, 0.0], abs=1e-15)
    assert step.surrogate_B == pytest.approx(2 * (2 / 3) / 6, rel=1e-13)
    assert step.kl_BS[0] == pytest.approx([0.5 * np.log(4 / 3), 0.0], rel=1e-13)
    assert step.kl_B == pytest.approx(np.log(4 / 3) / 3, rel=1e-13)
    assert step.tv_BS[0] == pytest.approx([0.25, 0.0])
    assert step.tv_B == pytest.approx(1 / 6)
    # an estimate that is too large by 1/10 everywhere: zeta = 1/10
    wrong = step.old.advantage_BSA + 0.1
    assert step.zeta_of(wrong) == pytest.approx(0.1, rel=1e-12)
    assert step.surrogate_of(wrong) == pytest.approx(step.surrogate_B + 0.2, rel=1e-12)
    # on states of the new team, d'(0) = (1/2) / (1 - 1/8) = 4/7
    stale = step.surrogate_of(step.old.advantage_BSA, step.new.occupancy_BS)
    assert stale == pytest.approx(2 * (4 / 7) / 6, rel=1e-13)


@pytest.mark.parametrize("router", ["cyclic", "table"])
@pytest.mark.parametrize("aliased", [False, True])
def test_identities_of_random_discounted_teams(router: str, aliased: bool) -> None:
    rng = np.random.default_rng(3)
    space = MessageSpace(3, 2, ends=True)
    stage = random_discounted_stage(
        rng, 50, agents=3, states=6, space=space, router=router, rewards="dense", aliased=aliased, kinds=UPDATES[:4]
    )
    for step, agent in zip(stage.steps, stage.order, strict=True):
        old, new = step.old, step.new
        scale = 1.0 / (1.0 - old.gamma_B)
        difference = new.expect(step.expected_advantage_BS) * scale
        assert difference == pytest.approx(step.gain_B, abs=1e-12)
        chained = np.einsum("bsa,bsa->bs", old.policy_BSA, step.chained_kl_BSA)
        assert chained == pytest.approx(step.kl_BS, rel=1e-10, abs=1e-13)
        assert (step.kl_BS[old.active_BS != agent] == 0.0).all()
        assert np.einsum("bsa,bsa->bs", old.policy_BSA, old.advantage_BSA) == pytest.approx(0.0, abs=1e-12)
        assert old.occupancy_BS.sum(axis=1) == pytest.approx(1.0, abs=1e-12)
        # J from the occupancy: E_d r / (1 - gamma)
        reward_BS = np.einsum("bsa,bsa->bs", old.policy_BSA, old.reward_BSA)
        assert old.expect(reward_BS) * scale == pytest.approx(old.return_B, rel=1e-11)


def test_a_cyclic_router_hands_on_the_turn() -> None:
    team = random_discounted_team(
        np.random.default_rng(0), 5, agents=3, states=6, space=MessageSpace(2, 1), router="cyclic"
    )
    goes = team.transition_BSAS.sum(axis=2) > 0
    for s in range(6):
        for t in range(6):
            assert (goes[:, s, t] == ((s + 1) % 3 == t % 3)).all()


def test_aliased_states_share_their_speaker_s_policy() -> None:
    team = random_discounted_team(
        np.random.default_rng(0), 200, agents=2, states=4, space=MessageSpace(2, 1), aliased=True
    )
    same = team.active_BS[:, 0] == team.active_BS[:, 1]
    equal = (team.policy_BSA[:, 0] == team.policy_BSA[:, 1]).all(axis=1)
    assert same.any()
    assert (~same).any()
    assert (equal == same).all()


def test_a_batch_is_its_teams_one_by_one() -> None:
    rng = np.random.default_rng(5)
    stage = random_discounted_stage(rng, 4, agents=2, states=3, space=MessageSpace(2, 2))
    whole, b = stage.whole, 2
    names = [f.name for f in fields(DiscountedTeam) if f.name.rpartition("_")[2].startswith("B")]
    alone = [replace(team, **{n: getattr(team, n)[b : b + 1] for n in names}) for team in (whole.old, whole.new)]
    step = DiscountedStep(*alone)
    assert step.gain_B[0] == pytest.approx(whole.gain_B[b], rel=1e-12)
    assert step.kl_B[0] == pytest.approx(whole.kl_B[b], rel=1e-12)


@pytest.mark.long
def test_discounted_simulation_agrees() -> None:
    """Episodes that go on with probability gamma have return J and visit states as d^pi, both within 4.5 errors."""
    rng = np.random.default_rng(11)
    team = random_discounted_team(
        rng, 1, agents=2, states=4, space=MessageSpace(2, 2), gamma_B=np.array([0.7]), rewards="dense"
    )
    runs = 40_000
    state = rng.choice(4, size=runs, p=team.start_BS[0])
    alive, returns, visits = np.ones(runs, dtype=bool), np.zeros(runs), np.zeros((runs, 4))
    while alive.any():
        visits[np.arange(runs)[alive], state[alive]] += 1.0
        message = _sample(rng, team.policy_BSA[0][state])
        returns += alive * team.reward_BSA[0][state, message]
        state = _sample(rng, team.transition_BSAS[0][state, message])
        alive &= rng.random(runs) < 0.7
    assert _errors(returns, team.return_B[0]) < 4.5
    for s in range(4):  # visits in an episode: d / (1 - gamma)
        assert _errors(visits[:, s], team.occupancy_BS[0, s] / 0.3) < 4.5


# -- episodic ------------------------------------------------------------------------------------------------


def test_volunteers_by_hand() -> None:
    team = volunteers(0.2, 0.4)
    # p (1 - q) + (1 - p) q = 0.12 + 0.32
    assert team.return_B == pytest.approx(0.44, rel=1e-14)
    assert team.visits[2][0] == pytest.approx([0.48, 0.32, 0.12, 0.08], rel=1e-14)
    # V after agent 0's word: q after "0", 1 - q after "1"
    assert team.values[1][0] == pytest.approx([0.4, 0.6], rel=1e-14)
    assert team.advantages[0][0, 0] == pytest.approx([-0.04, 0.16], rel=1e-12)
    step = EpisodicStep(team, volunteers(0.2, 0.7), (1,))
    # agent 1 speaks once: gain = surrogate = 0.3 * (1 - 2 p) = 0.18, by hand and by the difference of returns
    assert step.gain_B == pytest.approx(0.18, rel=1e-12)
    assert step.surrogate_B == pytest.approx(0.18, rel=1e-12)
    nats = 0.6 * np.log(0.6 / 0.3) + 0.4 * np.log(0.4 / 0.7)
    assert step.kl_by_turn_BK[0] == pytest.approx([nats, 0.0], rel=1e-12)
    assert step.tv_by_turn_BK[0] == pytest.approx([0.3, 0.0], rel=1e-12)
    assert step.turns_B.tolist() == [1]
    both = EpisodicStep(team, volunteers(0.5, 0.7), (0, 1))
    assert both.turns_B.tolist() == [2]
    # E f of agent 0: 0.3 * (0.16 + 0.04) = 0.06; together 0.24, while the true gain is 0.5 - 0.44
    assert both.surrogate_B == pytest.approx(0.24, rel=1e-12)
    assert both.gain_B == pytest.approx(0.06, rel=1e-12)


def test_a_blind_agent_cannot_tell_histories_apart() -> None:
    rng = np.random.default_rng(2)
    shape = {"agents": 2, "horizon": 4, "space": MessageSpace(3, 1)}
    blind = random_episodic_team(rng, 3, **shape, visibility="blind_round")
    # Turn 1 is the second of the first round: agent 1 has seen nothing. Turn 3 sees the first round, not turn 2.
    assert (blind.policies[1] == blind.policies[1][:, :1]).all()
    turn3 = blind.policies[3].reshape(3, 9, 3, 3)
    assert (turn3 == turn3[:, :, :1]).all()
    assert not (turn3 == turn3[:, :1]).all()
    nothing = random_episodic_team(rng, 3, **shape, visibility="nothing")
    assert (nothing.policies[3] == nothing.policies[1][:, :1]).all()
    sees = random_episodic_team(rng, 3, **shape, visibility="everything")
    assert not (sees.policies[1] == sees.policies[1][:, :1]).all()


def test_routers_and_stopping() -> None:
    rng = np.random.default_rng(4)
    addressed = random_episodic_team(
        rng, 6, agents=3, horizon=4, space=MessageSpace(3, 1), router="addressed", stops=True
    )
    last = addressed.active[3].reshape(6, 9, 3)
    for b in range(6):
        for a in range(3):
            speakers = set(last[b, :, a].tolist()) - {NOBODY}
            assert len(speakers) <= 1  # the last message alone names the next speaker
    stopped = addressed.active[2] == NOBODY
    assert stopped.any()
    # Once stopped, for ever, and message 0 follows.
    assert (np.repeat(stopped, 3, axis=1) <= (addressed.active[3] == NOBODY)).all()
    assert (addressed.policies[2][stopped] == [1.0, 0.0, 0.0]).all()
    assert addressed.visits[-1].sum(axis=1) == pytest.approx(1.0)
    with_table = random_episodic_team(rng, 6, agents=3, horizon=3, space=MessageSpace(3, 1), router="table")
    assert len(np.unique(with_table.active[2][0])) > 1


def _slow(team: EpisodicTeam, other: EpisodicTeam, b: int, agent: int) -> tuple[float, float, list[float]]:
    """Return, surrogate and KL by own turn of team b, by plain recursion over histories."""
    messages, horizon = team.space.size, team.horizon

    def law(which: EpisodicTeam, t: int, h: int) -> np.ndarray:
        speaker = which.active[t][b, h]
        if speaker == NOBODY:
            return np.eye(messages)[0]
        logits = which.logits_BnRKV[b, speaker, which.rows[t][h]]
        tokens = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        prefixes = which.space.prefixes
        return np.array(
            [np.prod([tokens[prefixes.index(word[:u]), x] for u, x in enumerate(word)]) for word in which.space.words]
        )

    def value(t: int, h: int) -> float:
        if t == horizon:
            return float(team.reward_BN[b, h])
        return float(sum(p * value(t + 1, h * messages + a) for a, p in enumerate(law(team, t, h))))

    kls = [0.0] * horizon
    total = 0.0

    def walk(t: int, h: int, mass: float, spoken: int) -> None:
        nonlocal total
        if t == horizon:
            return
        p, own = law(team, t, h), team.active[t][b, h] == agent
        if own:
            q = law(other, t, h)
            kls[spoken] += mass * float((p * np.log(p / q)).sum())
            total += mass * sum((q[a] - p[a]) * value(t + 1, h * messages + a) for a in range(messages))
        for a in range(messages):
            if p[a] > 0:
                walk(t + 1, h * messages + a, mass * p[a], spoken + int(own))

    j = 0.0
    for x, share in enumerate(team.start_BX[b]):
        j += share * value(0, x)
        walk(0, x, float(share), 0)
    return j, total, kls


@pytest.mark.parametrize(
    ("router", "visibility", "stops", "rewards"),
    [
        ("cyclic", "everything", False, "dense"),
        ("addressed", "blind_round", True, "signed"),
        ("table", "nothing", True, "sparse"),
    ],
)
def test_a_slow_solver_agrees(router: str, visibility: str, stops: bool, rewards: str) -> None:
    rng = np.random.default_rng(8)
    stage = random_episodic_stage(
        rng,
        3,
        agents=2,
        horizon=3,
        space=MessageSpace(2, 2, ends=True),
        problems=2,
        router=router,
        visibility=visibility,
        stops=stops,
        rewards=rewards,
        kinds=("random",),
    )
    step = stage.steps[0]
    for b in range(3):
        j, surrogate, kls = _slow(step.old, step.new, b, step.agents[0])
        assert step.old.return_B[b] == pytest.approx(j, rel=1e-11)
        assert step.surrogate_B[b] == pytest.approx(surrogate, rel=1e-9, abs=1e-12)
        assert step.kl_by_turn_BK[b] == pytest.approx(kls, rel=1e-8, abs=1e-12)


def test_performance_difference_of_random_episodes() -> None:
    rng = np.random.default_rng(9)
    stage = random_episodic_stage(
        rng, 40, agents=3, horizon=5, space=MessageSpace(3, 1), router="addressed", stops=True
    )
    for step in (*stage.steps, stage.whole):
        new = sum((p * f).sum(axis=1) for p, f in zip(step.new.visits, step.expected_advantage, strict=False))
        assert new == pytest.approx(step.gain_B, abs=1e-12)
        for active_BN, f_BN in zip(step.old.active, step.expected_advantage, strict=True):
            assert (f_BN[~np.isin(active_BN, step.agents)] == 0.0).all()


def test_episodic_simulation_agrees() -> None:
    rng = np.random.default_rng(12)
    team = random_episodic_team(
        rng, 1, agents=2, horizon=4, space=MessageSpace(2, 2), problems=2, router="addressed", stops=True
    )
    runs = 40_000
    history = rng.choice(2, size=runs, p=team.start_BX[0])
    for policy_BNA in team.policies:
        history = history * 4 + _sample(rng, policy_BNA[0][history])
    assert _errors(team.reward_BN[0][history], team.return_B[0]) < 4.5
    for h in np.argsort(team.visits[-1][0])[-3:]:
        assert _errors((history == h).astype(float), team.visits[-1][0, h]) < 4.5


# -- updates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [1e-5, 1e-2, 0.5])
def test_updates_fill_their_radius(radius: float) -> None:
    rng = np.random.default_rng(6)
    kinds = ("random", "natural", "against", "unseen")
    discounted = random_discounted_team(rng, 60, agents=2, states=4, space=MessageSpace(2, 2), aliased=True)
    step = DiscountedStep(discounted, update_discounted(rng, discounted, 1, kinds=kinds, radius_B=np.full(60, radius)))
    speaks = (discounted.active_BS == 1).any(axis=1)
    # Where the bound on logits forbids more, less is used; never more.
    assert (step.kl_B <= radius * (1 + 1e-9)).all()
    assert np.median(step.kl_B[speaks]) == pytest.approx(radius, rel=1e-9)
    assert (np.abs(step.kl_B[speaks] / radius - 1) < 1e-9).mean() > 0.8
    episodic = random_episodic_team(rng, 60, agents=2, horizon=4, space=MessageSpace(2, 2), visibility="blind_round")
    new = update_episodic(rng, episodic, 0, kinds=("random", "against"), radius_B=np.full(60, radius))
    per_message = EpisodicStep(episodic, new, (0,)).kl_by_turn_BK.sum(axis=1) / 2
    assert (per_message <= radius * (1 + 1e-9)).all()
    assert np.median(per_message) == pytest.approx(radius, rel=1e-9)


def test_scale_to_radius_by_hand() -> None:
    # From (1/2, 1/2) along (0, c): KL = log cosh(c / 2). At c = 2 log 3 that is log(5/3).
    c = scale_to_radius(np.zeros((1, 1, 2)), np.array([[[0.0, 1.0]]]), np.ones((1, 1)), np.array([np.log(5 / 3)]))
    assert c == pytest.approx(2 * np.log(3.0), rel=1e-12)
    # Used half the time, the same radius reaches further: log cosh(c / 2) = 2 log(5/3).
    c = scale_to_radius(np.zeros((1, 1, 2)), np.array([[[0.0, 1.0]]]), np.full((1, 1), 0.5), np.array([np.log(5 / 3)]))
    assert c == pytest.approx(2 * np.arccosh((5 / 3) ** 2), rel=1e-12)


@pytest.mark.long
def test_natural_steps_climb_and_only_the_agent_moves() -> None:
    rng = np.random.default_rng(7)
    team = random_discounted_team(rng, 80, agents=2, states=5, space=MessageSpace(2, 2), rewards="dense")
    for kind, sign in (("natural", 1.0), ("gradient", 1.0), ("against", -1.0)):
        new = update_discounted(rng, team, 0, kinds=(kind,), radius_B=np.full(80, 1e-5))
        step = DiscountedStep(team, new)
        speaks = (team.active_BS == 0).any(axis=1)
        assert (sign * step.surrogate_B[speaks] > 0).all()
        assert (new.logits_BSKV[team.active_BS == 1] == team.logits_BSKV[team.active_BS == 1]).all()
    episodic = random_episodic_team(rng, 80, agents=2, horizon=4, space=MessageSpace(2, 1), visibility="blind_round")
    new = update_episodic(rng, episodic, 0, kinds=("natural",), radius_B=np.full(80, 1e-5))
    assert (EpisodicStep(episodic, new, (0,)).surrogate_B > 0).all()
    assert (new.logits_BnRKV[:, 1] == episodic.logits_BnRKV[:, 1]).all()


def test_a_natural_step_is_the_best_small_step_of_its_radius() -> None:
    """lem:lin-quad in one state: at radius e the surrogate is deviation(A) sqrt(2 e) / (1 - gamma), to first order."""
    rng = np.random.default_rng(1)
    team = random_discounted_team(
        rng, 30, agents=1, states=1, space=MessageSpace(3, 1), rewards="dense", gamma_B=np.full(30, 0.5)
    )
    step = DiscountedStep(team, update_discounted(rng, team, 0, kinds=("natural",), radius_B=np.full(30, 1e-7)))
    deviation = np.sqrt((team.policy_BSA * team.advantage_BSA**2).sum(axis=(1, 2)))
    small = team.policy_BSA.min(axis=(1, 2)) > 0.01  # to an almost deterministic policy no step is small
    assert small.sum() > 10
    assert step.surrogate_B[small] == pytest.approx(2.0 * deviation[small] * np.sqrt(2e-7), rel=0.01)


def _sample(rng: np.random.Generator, laws: np.ndarray) -> np.ndarray:
    return np.asarray((rng.random((len(laws), 1)) > np.cumsum(laws, axis=1)).sum(axis=1).clip(max=laws.shape[1] - 1))


def _errors(values: np.ndarray, expected: float) -> float:
    """Distance of the mean from what is expected, in standard errors."""
    return float(abs(values.mean() - expected) / (values.std() / np.sqrt(len(values))))
