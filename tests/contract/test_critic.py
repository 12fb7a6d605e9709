"""PPO's critic: exact where a table can be, a part of every snapshot and checkpoint, and no part of the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remote_engine import remote_engine
from small import World
from teamtr.analysis.report import build_report, read_run
from teamtr.analysis.report.section import shown
from teamtr.batches import AgentBatch
from teamtr.config import loads
from teamtr.engines.critic import LinearHead
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.tabular import TabularPolicy
from teamtr.ports import Learner
from teamtr.presets import PRESETS, Plan
from teamtr.randomness import uniforms
from teamtr.session.build import Parts, Session, build
from teamtr.session.demo import demo_file
from teamtr.session.export import export
from teamtr.session.models import local_engine
from teamtr.session.train import train
from teamtr.store import Log
from teamtr.swap import Request, swap
from teamtr.theory.estimators import CriticAdvantage
from teamtr.theory.objective import Objective
from teamtr.training.algorithm import run_stage, schedule

PPO = PRESETS["ppo"]
TOKEN = Objective(ratio="token", average_over="tokens")


# -- against exact values ----------------------------------------------------------------------------------------

ENDS, LETTERS, LONGEST = frozenset({0}), 3, 3
PROMPTS = [np.array([7], dtype=np.int32), np.array([8], dtype=np.int32)]


class Solved:
    """A tabular agent that answers two prompts with up to three tokens, each message with a reward of its own: every
    value is known by going back from the ends."""

    def __init__(self, seed: int = 0) -> None:
        policy = TabularPolicy(LETTERS, end_ids=ENDS, rows=4096, spread=0.8, seed=seed)
        self.learner = PolicyLearner("x", policy, micro_batch=4096, critic=True)
        self.policy, self.rng = policy, np.random.default_rng(seed)
        self.reward: dict[tuple[int, ...], float] = {}
        self.value: dict[tuple[int, ...], float] = {}
        for k in range(len(PROMPTS)):
            self._solve((k,))

    def _solve(self, state: tuple[int, ...]) -> float:
        """``state`` is the prompt's number and the message so far."""
        prompt, said = PROMPTS[state[0]], np.array(state[1:], dtype=np.int32)
        if len(said) == LONGEST or (len(said) and said[-1] in ENDS):
            return self.reward.setdefault(state, float(self.rng.uniform()))
        chances = torch.softmax(self.policy.logits[self.policy.row(prompt, said)].detach(), -1).tolist()
        value = sum(p * self._solve((*state, token)) for token, p in enumerate(chances))
        return self.value.setdefault(state, value)

    def batch(self, count: int, seed: int) -> tuple[AgentBatch, np.ndarray]:
        numbers = np.arange(count) % len(PROMPTS)
        samples = self.policy.sample([PROMPTS[k] for k in numbers], uniforms(seed, count, LONGEST))
        batch = AgentBatch(
            "x",
            tuple(PROMPTS[k] for k in numbers),
            tuple(s.token_ids for s in samples),
            tuple(s.logprobs for s in samples),
            np.arange(count),
            numbers,
            np.zeros(count, dtype=np.int64),
        )
        states = [(int(k), *map(int, s.token_ids)) for k, s in zip(numbers, samples, strict=True)]
        return batch, np.array([[self.reward[state]] for state in states])

    def states(self, batch: AgentBatch) -> list[tuple[int, ...]]:
        said = zip(batch.problem_M.tolist(), batch.messages, strict=True)
        return [(k, *map(int, message[:u])) for k, message in said for u in range(len(message))]

    def values(self) -> dict[tuple[int, ...], float]:
        """The critic's value of every state that a batch may visit."""
        assert self.learner.critic is not None
        table = self.learner.critic.head.parameters()["table"].detach().numpy()
        rows = {s: self.policy.row(PROMPTS[s[0]], np.array(s[1:], dtype=np.int32)) for s in self.value}
        assert len(set(rows.values())) == len(rows), "two states share a row: choose another seed"
        return {state: float(table[row]) for state, row in rows.items()}


def fit(solved: Solved, batch: AgentBatch, returns_PG: np.ndarray, lam: float, steps: int, rate: float) -> None:
    solved.learner.begin(batch)
    tokens = CriticAdvantage(gae_lambda=lam).of_tokens(solved.learner.values(), batch, returns_PG, 1.0)
    for _ in range(steps):
        rows = np.arange(len(batch))
        assert solved.learner.fit_values(rows, tokens.targets, clip=math.inf, learning_rate=rate).applied
    solved.learner.end()


@pytest.mark.long
def test_the_tabular_fit_is_the_mean_return_of_every_state_and_that_is_near_its_value():
    """With lambda 1 the least squares over a table are sample means; those are within five standard errors of what
    dynamic programming says."""
    solved = Solved()
    batch, returns_PG = solved.batch(400, seed=1)
    for rate in (0.1, 0.01, 0.001):
        fit(solved, batch, returns_PG, 1.0, steps=60, rate=rate)
    seen: dict[tuple[int, ...], list[float]] = {}
    for state, reward in zip(solved.states(batch), np.repeat(returns_PG[:, 0], batch.lengths_M), strict=True):
        seen.setdefault(state, []).append(reward)
    values = solved.values()
    for state, rewards in seen.items():
        if len(rewards) >= 20:
            assert values[state] == pytest.approx(np.mean(rewards), abs=2e-3)
            error = np.std(rewards) / math.sqrt(len(rewards))
            assert abs(np.mean(rewards) - solved.value[state]) <= 5 * error + 1e-9
    assert sum(len(rewards) >= 20 for rewards in seen.values()) >= 6


@pytest.mark.long
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_values_approach_the_exact_ones_with_fresh_batches(lam):
    """Targets of lambda below 1 rest on the critic itself, and still lead there."""
    solved = Solved(3)
    weight = dict.fromkeys(solved.value, 0.0)
    for state in solved.states(solved.batch(1000, seed=9)[0]):
        weight[state] += 1.0

    def error() -> float:
        values = solved.values()
        gaps = [weight[s] * (values[s] - solved.value[s]) ** 2 for s in solved.value]
        return math.sqrt(sum(gaps) / sum(weight.values()))

    errors = [error()]
    for k in range(20):
        batch, returns_PG = solved.batch(200, seed=100 + k)
        fit(solved, batch, returns_PG, lam, steps=4, rate=0.1 if k < 10 else 0.02)
        errors.append(error())
    assert errors[0] > 0.4, "values begin at 0, and rewards are 0.5 on average"
    assert errors[-1] < 0.08
    assert errors[5] < 0.5 * errors[0]


@pytest.mark.long
def test_ppo_solves_the_tabular_game():
    """Both agents learn to say the problem's letter, and the critics come to know the return."""
    plan = replace(PPO, stages=8, problems=3)
    world = World(plan=plan, learning_rate=0.2)
    world.optimization = replace(world.optimization, value_learning_rate=0.05)
    rewards, explained = [], []
    team = world.team
    for stage in range(plan.stages):
        slots = schedule(plan.order, team.names, np.random.default_rng(0))

        def collect(team, step, worn, stage=stage):
            return world.collect(team, step, worn, group=32, stage=stage)

        def update(agent, data, stage=stage):
            return world.update(agent, data, seed=stage)

        for step in run_stage(team, world.plan, collect, update, slots):
            team = step.team
            rewards.append(np.mean([e.reward for e in step.batch.episodes]))
            assert step.report.outcome == "accepted"
            assert step.report.critic is not None
            explained.append(step.report.critic.explained_variance)
    assert rewards[0] < 0.35
    assert rewards[-1] > 0.95
    assert explained[0] == pytest.approx(0.0, abs=1e-9), "values are 0 at first"
    assert max(explained[2:12]) > 0.1, "the critics come to tell good beginnings from bad ones"


def test_a_group_of_equal_rewards_teaches_and_without_a_critic_it_does_not():
    """Every episode of a problem is worth the same, and other problems are worth more or less."""
    by_problem = {"a": 0.0, "b": 0.5, "c": 1.0}

    def update(plan: Plan) -> str:
        world = World(plan=plan, reward=lambda k, value: by_problem["abc"[k // 16]])
        return world.update("x", world.training_batch("x", world.collect(world.team, 0))).report.outcome

    assert update(Plan(objective=TOKEN, region=PPO.region)) == "skipped_no_signal"
    assert update(PPO) == "accepted"


# -- no part of the policy, and part of everything that is kept ---------------------------------------------------

TEAM = """
name: critic
task: {name: code, half_length: 1, symbols: ABC, held_out: 0.3}
team: {model: tiny, train: TRAIN, max_tokens: 4, agents: [{name: left}, {name: right, frozen: true}, {name: speaker}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {preset: ppo, stages: 1, problems: 3, group_size: 4}
learner: {micro_batch: 8, minibatches: 2}
eval: {every: 0}
"""
MAKERS = {"local": local_engine, "remote": remote_engine}


@pytest.fixture(
    scope="module", params=["local-full", "local-lora", pytest.param("remote-lora", marks=pytest.mark.long)]
)
def session(request: Any) -> Iterator[Session]:
    where, kind = request.param.split("-")
    built = build(loads(TEAM.replace("TRAIN", kind), name="critic"), parts=Parts(make_engine=MAKERS[where]))
    yield built
    built.engine.close()


def begun(session: Session, count: int = 8) -> tuple[Learner, AgentBatch]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(6, 60, size=3 + k % 3).astype(np.int32) for k in range(count)]
    samples = session.engine.sample("left", prompts, uniforms(3, count, 4))
    numbers = np.arange(count)
    batch = AgentBatch(
        "left",
        tuple(prompts),
        tuple(s.token_ids for s in samples),
        tuple(s.logprobs for s in samples),
        numbers,
        numbers // 2,
        np.zeros(count, dtype=np.int64),
    )
    learner = session.engine.learner("left")
    learner.begin(batch)
    return learner, batch


def targets_of(batch: AgentBatch) -> list[np.ndarray]:
    return [np.full(n, float(k % 2)) for k, n in enumerate(batch.lengths_M)]


@pytest.mark.long
def test_the_critic_learns_and_the_policy_stays_to_the_bit(session: Session):
    learner, batch = begun(session)
    before, version, start = learner.fingerprint(), learner.version(), learner.snapshot()
    assert [len(v) for v in learner.values()] == batch.lengths_M.tolist()
    rows, losses = np.arange(len(batch)), []
    for _ in range(30):
        stats = learner.fit_values(rows, targets_of(batch), clip=math.inf, learning_rate=0.1)
        assert stats.applied
        losses.append(stats.loss)
    assert losses[-1] < 0.5 * losses[0]
    assert learner.version() == version
    assert learner.fingerprint() != before, "the critic is part of what is stored"
    old = learner.values()
    learner.begin(batch)
    assert max(np.abs(a - b).max() for a, b in zip(learner.values(), old, strict=True)) > 0.1
    learner.restore(start)
    assert learner.fingerprint() == before
    learner.end()


def test_moving_the_policy_leaves_the_critic(session: Session):
    learner, batch = begun(session)
    start = learner.snapshot()
    rows = np.arange(len(batch))
    advantages = [np.linspace(-1.0, 1.0, n) for n in batch.lengths_M]
    assert learner.step(rows, advantages, TOKEN, beta=0.0, learning_rate=1e-2).applied
    learner.fit_values(rows, targets_of(batch), clip=math.inf, learning_rate=0.1)
    tried, version = learner.snapshot(), learner.version()
    learner.move(start, tried, 0.5)
    assert learner.version() != version
    learner.move(start, tried, 1.0)
    learner.begin(batch)
    assert any(np.abs(values).max() > 0 for values in learner.values()), "the critic stays as it was trained"
    learner.restore(start)
    learner.end()


def test_saved_and_loaded_it_is_the_same_critic(session: Session, tmp_path: Path):
    learner, batch = begun(session)
    start, rows = learner.snapshot(), np.arange(len(batch))
    learner.fit_values(rows, targets_of(batch), clip=0.2, learning_rate=0.1)
    learner.save(tmp_path)
    then = learner.fingerprint()
    learner.fit_values(rows, targets_of(batch), clip=0.2, learning_rate=0.1)
    after = learner.fingerprint()
    assert then != after
    learner.load(tmp_path)
    assert learner.fingerprint() == then
    learner.begin(batch)  # values, and the clip range around them, are those of the critic as it is
    learner.restore(start)
    learner.end()
    session.engine.learner("right").save(tmp_path / "frozen")
    assert not (tmp_path / "frozen" / "critic.safetensors").exists(), "a frozen agent needs no critic"


def test_micro_batches_change_nothing_but_rounding():
    found = []
    for micro_batch in (1, 64):
        solved = Solved()
        solved.learner.passes.micro_batch = micro_batch
        batch, returns_PG = solved.batch(40, seed=2)
        fit(solved, batch, returns_PG, 0.95, steps=3, rate=0.05)
        found.append(np.array(list(solved.values().values())))
    np.testing.assert_allclose(found[0], found[1], atol=1e-12)


def test_advantages_per_token_reach_the_gradient():
    """A step on tokens that share their message's advantage is a step on the message's; one token alone is another."""
    versions = []
    for kind in ("message", "tokens", "first"):
        world = World(plan=PPO)
        batch = world.collect(world.team, 0).of("x")
        learner = world.engine.learner("x")
        learner.begin(batch)
        own = np.where(np.arange(len(batch)) % 2, 1.0, -1.0)
        tokens = [np.full(n, a) for n, a in zip(batch.lengths_M, own, strict=True)]
        if kind == "first":
            tokens = [np.where(np.arange(len(t)) == 0, t, 0.0) for t in tokens]
        given = own if kind == "message" else tokens
        assert learner.step(np.arange(len(batch)), given, TOKEN, beta=0.0, learning_rate=0.1).applied
        versions.append(learner.version())
    assert versions[0] == versions[1] != versions[2]


def test_a_learner_without_a_critic_says_so():
    world = World()
    learner = world.engine.learner("x")
    batch = world.collect(world.team, 0).of("x")
    learner.begin(batch)
    with pytest.raises(RuntimeError, match="without a critic: it has no values"):
        learner.values()
    with pytest.raises(RuntimeError, match="without a critic: there is nothing to fit"):
        learner.fit_values(np.arange(1), [np.zeros(1)], clip=0.2, learning_rate=0.1)


def test_a_target_that_is_not_finite_moves_nothing():
    solved = Solved()
    batch, _ = solved.batch(4, seed=2)
    solved.learner.begin(batch)
    before = solved.learner.fingerprint()
    bad = [np.full(n, math.nan) for n in batch.lengths_M]
    assert not solved.learner.fit_values(np.arange(4), bad, clip=0.2, learning_rate=0.1).applied
    assert solved.learner.fingerprint() == before


def test_an_update_is_judged_by_its_messages_returns_less_their_values():
    """The surrogate of the kept step, and with it a gate, by hand; values are 0, and normalized advantages centred."""
    world = World(plan=PPO, learning_rate=0.02)
    data = world.training_batch("x", world.collect(world.team, 0))
    update = world.update("x", data, optimization=replace(world.optimization, gate_share=1.0))
    returns_M = data.returns_PG.reshape(-1)[data.messages.episode_M]
    advantages_M = (returns_M - returns_M.mean()) / np.sqrt(returns_M.var() + 1e-6)
    expected = float(np.mean(np.expm1(update.log_ratio_M) * advantages_M))
    assert update.report.surrogate == pytest.approx(expected, rel=1e-9)
    assert expected > 0.0


@pytest.mark.parametrize("clip", [0.5, np.inf])
def test_an_update_tells_how_many_of_a_critic_s_advantages_are_clipped(clip):
    """Values are 0, so that every token's advantage is its episode's return."""
    world = World(plan=replace(PPO, advantage=replace(PPO.advantage, clip=clip)))
    data = world.training_batch("x", world.collect(world.team, 0))
    returns_N = np.repeat(data.returns_PG.reshape(-1)[data.messages.episode_M], data.messages.lengths_M)
    over_N = np.maximum(np.abs(returns_N - returns_N.mean()) / np.sqrt(returns_N.var() + 1e-6) - clip, 0.0)
    report = world.update("x", data).report
    assert report.advantage_clip_rate == pytest.approx((over_N > 0.0).mean())
    assert report.zeta_clip == pytest.approx(over_N.mean())
    assert (report.zeta_clip > 0.0) == (clip < 1.0)


def test_a_rejected_update_leaves_no_trace_of_its_critic():
    plan = replace(PPO, region=PRESETS["teamtr"].region)
    world = World(plan=plan, radius=1e-12, learning_rate=5.0)
    world.optimization = replace(world.optimization, max_backtracks=0)
    learner = world.engine.learner("x")
    before = learner.fingerprint()
    report = world.update("x", world.training_batch("x", world.collect(world.team, 0))).report
    assert report.outcome == "restored"
    assert report.critic is not None
    assert report.critic.loss > 0.0
    assert learner.fingerprint() == before


def test_a_linear_head_does_not_depend_on_the_length_of_features():
    head = LinearHead(4, torch.device("cpu"))
    with torch.no_grad():
        head.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
    features_NH = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.values(features_NH, [], []), head.values(100 * features_NH, [], []))


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_reports_its_critic_and_what_it_was_matched_to_and_is_exported_and_swapped(tmp_path: Path):
    text = TEAM.replace("TRAIN", "full").replace("preset: ppo", "preset: sequential_ppo, match: rollouts")
    list(train(loads(text, name="critic"), tmp_path / "run"))
    records = Log(tmp_path / "run" / "log.jsonl").read()
    updates = [record for record in records if record["kind"] == "update"]
    assert [update["agent"] for update in updates] == ["left", "speaker"]
    assert all(update["critic"]["value_error"] >= 0.0 for update in updates)
    budget = records[0]["budget"]
    assert (budget["problems"], budget["planned"]["rollouts"], budget["reference"]["rollouts"]) == (6, 24, 24)
    assert updates[-1]["episodes_total"] == 24, "what was planned is what was sampled"

    report = build_report(read_run(tmp_path / "run"))
    sections = {section.key: section for section in shown(report.data)}
    assert {row["agent"] for row in report.data["critic"]} == {"left", "speaker"}
    assert "critic" in sections
    assert report.data["budget"]["rows"][0] == {"what": "rollouts", "spent": 24, "planned": 24, "reference": 24}
    tokens = report.data["budget"]["tokens"]
    assert tokens["spent"] == tokens["planned"] == tokens["reference"] == updates[-1]["sampled_tokens_total"]

    export(tmp_path / "run", tmp_path / "left", agent="left")
    assert not (tmp_path / "left" / "critic.safetensors").exists()
    request = Request(agent="left", model="tiny", mode="direct", probes=8, eval_problems=2, eval_samples=1)
    *_, last = swap(tmp_path / "run", request, tmp_path / "swapped")
    assert last["kind"] == "swap"
    team_file = loads((tmp_path / "swapped" / "team.yaml").read_text(), name="swapped")
    assert (team_file.plan.match, team_file.plan.problems) == ("off", 6), "sizes stay what they were matched to"
    *_, finished = train(team_file, tmp_path / "swapped")
    assert finished["kind"] == "finished"


@pytest.mark.slow
def test_ppo_learns_the_demo(tmp_path: Path):
    """Code exchange from one held-out code in six to more than half of them in five stages."""
    small = ["plan.problems=16", "eval.every=5", "learner.learning_rate=2e-3", "store.episodes=false"]
    settings = demo_file("code", agents=3, preset="ppo", seed=0, stages=5, changes=small)
    success = [r["avg_at_k"] for r in train(settings, tmp_path / "run") if r["kind"] == "eval"]
    assert success[0] < 0.3
    assert success[-1] > 0.5
