"""Turns without waiting for the slowest: whichever rows end first, episodes say what they say in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import make_policy
from scripted import Letters, Numbers, Scripted, problems
from small import World
from teamtr.answers import AS_TRAINED, Decoding, Ended, Sample, Wanted
from teamtr.batches import Carried, RolloutBatch
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged.pool import SamplerPool
from teamtr.errors import UserError
from teamtr.ports import More
from teamtr.randomness import AT_ONCE, RowNoise, seed_of, uniforms
from teamtr.rollout import Ledger, RolloutContext, StaleWeights, play
from teamtr.rollout.redraw import redraw
from teamtr.session.tools import with_tool_turns
from teamtr.streams import InTurns, in_turns
from teamtr.team import Addressed, Agent, Schedule, Team
from teamtr.tools.kinds import WHOLE
from teamtr.tools.toolbox import Outcome, Toolbox, ToolboxTools
from teamtr.types import Message, Problem, Reply, Situation
from tiny_architectures import make_gpt2
from tiny_architectures import make_policy as make_small_policy


class Ragged:
    """A sampler whose rows end in an order drawn from ``seed``, some of them at once, and join as soon as they may."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler, self.rng = sampler, np.random.default_rng(seed)
        self.version = sampler.version
        self.sample = sampler.sample
        self.most_agents = 0

    def stream(self, more: More, **told: Any) -> None:
        waiting: dict[int, Wanted] = {}
        rows, ended = 0, []
        while True:
            for one in more(ended):
                waiting[rows] = one
                rows += 1
            if not waiting:
                return
            self.most_agents = max(self.most_agents, len({one.agent for one in waiting.values()}))
            chosen = self.rng.permutation(list(waiting))[: self.rng.integers(1, 4)]
            ended = [self._ended(int(row), waiting.pop(int(row))) for row in chosen]

    def _ended(self, row: int, one: Wanted) -> Ended:
        [sample] = self.sampler.sample(one.agent, [one.prompt], one.noise_T[None], decoding=one.decoding)
        return Ended(row, sample)


def assert_same(one: RolloutBatch, other: RolloutBatch) -> None:
    for a, b in zip(one.episodes, other.episodes, strict=True):
        assert (a.problem_id, a.answer, a.verdict, a.replies) == (b.problem_id, b.answer, b.verdict, b.replies)
        for s, t in zip(a.turns, b.turns, strict=True):
            assert (s.agent, s.round, s.text, s.results) == (t.agent, t.round, t.text, t.results)
            assert (s.finish, s.token_ids.tolist()) == (t.finish, t.token_ids.tolist())
            assert s.context_ids.tolist() == t.context_ids.tolist()
            assert s.sampler_logprobs.tobytes() == t.sampler_logprobs.tobytes()


# -- noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "tokens"), [(0, 1), (3, 7), (8, 5)])
def test_a_rows_noise_is_had_without_the_rows_before_it(row: int, tokens: int):
    assert RowNoise(11, tokens)[row].tobytes() == uniforms(11, 9, tokens)[row].tobytes()


@pytest.mark.parametrize("tokens", [2, AT_ONCE // 2, AT_ONCE + 1])
def test_rows_are_the_same_in_whatever_order_they_are_asked_for(tokens: int):
    """Whether they are made together (many, two) or one by one."""
    whole, noise = uniforms(12, 6, tokens), RowNoise(12, tokens)
    for row in (5, 0, 1, 1, 4, 2, 3):
        assert noise[row].tobytes() == whole[row].tobytes()


def test_the_noise_of_a_turn_is_the_episodes_row_of_what_the_turn_is_called():
    """As it always was where all episodes ask the same agent: old runs are gone on with."""
    world = World(rounds=2)
    asked: list[tuple[str, np.ndarray]] = []

    class Watched(InTurns):
        version = world.engine.version

        def sample(self, agent: str, prompts: Any, noise_BT: Any, **settings: Any) -> list[Sample]:
            asked.append((agent, noise_BT))
            return world.engine.sample(agent, prompts, noise_BT, **settings)

    play(replace(world.context, sampler=Watched()), world.team, world.context.task.problems("train"), 2, seed=5)
    assert [agent for agent, _ in asked] == ["x", "y", "x", "y"]
    for place, (agent, noise) in enumerate(asked):
        assert noise.tobytes() == uniforms(seed_of(5, "turn", place, agent), 6, 3).tobytes()


# -- streams made of batches --------------------------------------------------------------------------------------


def test_the_most_rows_that_wait_together_go_next_and_rows_are_numbered_as_they_come():
    batches: list[tuple[str, int, int]] = []

    class Counting:
        def sample(self, agent: str, prompts: Any, noise_BT: Any, **settings: Any) -> list[Sample]:
            batches.append((agent, *noise_BT.shape))
            return [Sample(prompt, np.zeros(1, np.float32), "stop", agent) for prompt in prompts]

    def ask(agent: str, number: int, tokens: int = 2, decoding: Decoding = AS_TRAINED) -> Wanted:
        return Wanted(agent, np.array([number], dtype=np.int32), np.zeros(tokens), decoding)

    first = [ask("a", 0), ask("b", 1), ask("b", 2), ask("b", 3, tokens=5), ask("b", 4, decoding=Decoding(0.5))]
    found: dict[int, int] = {}
    given = iter([first, [ask("a", 5)]])

    def more(ended: Sequence[Ended]) -> Sequence[Wanted]:
        found.update({one.row: int(one.sample.token_ids[0]) for one in ended})
        return next(given, [])

    in_turns(Counting(), more)
    assert batches == [("b", 3, 5), ("a", 2, 2), ("b", 1, 2)]
    assert found == {row: row for row in range(6)}, "a row's message is the one that it asked for"


@pytest.mark.parametrize("engine", ["plain", "paged", "positions in a table"])
def test_a_row_needs_room_for_its_own_tokens_only(engine: str):
    policy = make_small_policy(make_gpt2()) if engine == "positions in a table" else make_policy("full")
    if engine == "paged":
        policy.serving = SamplerPool("fp32", torch.device("cpu"), memory_bytes=1 << 24)
    sampler, noise = LocalEngine({"a": PolicyLearner("a", policy)}), uniforms(0, 2, 8)
    prompts = [np.full(length, 3, dtype=np.int32) for length in (policy.positions - 4, 5)]
    wanted = [Wanted("a", prompt, row[:tokens]) for prompt, row, tokens in zip(prompts, noise, (4, 8), strict=True)]
    found: dict[int, Sample] = {}

    def more(ended: Sequence[Ended]) -> Sequence[Wanted]:
        found.update({one.row: one.sample for one in ended})
        asked, wanted[:] = wanted.copy(), []
        return asked

    in_turns(sampler, more)
    for row, tokens in enumerate((4, 8)):
        (alone,) = sampler.sample("a", [prompts[row]], noise[row : row + 1, :tokens])
        assert found[row].token_ids.tolist() == alone.token_ids.tolist()
    with pytest.raises(UserError, match=f"need {policy.positions + 1} tokens"):
        sampler.sample("a", prompts[:1], noise[:1, :5])


# -- play ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_episodes_that_go_on_by_themselves_say_the_same_to_the_bit(seed: int):
    world = World(rounds=2)
    ragged, ledger, in_lockstep = Ragged(world.engine, seed), Ledger(), Ledger()
    problems = world.context.task.problems("train")
    expected = play(world.context, world.team, problems, 8, seed=3, ledger=in_lockstep)
    found = play(replace(world.context, sampler=ragged), world.team, problems, 8, seed=3, ledger=ledger)
    assert_same(found, expected)
    assert ragged.most_agents == 2, "nobody went ahead of the others: this proves nothing"
    assert (ledger.sampled_tokens, ledger.prompt_tokens) == (in_lockstep.sampled_tokens, in_lockstep.prompt_tokens)
    assert set(ledger.seconds) == {"x", "y"}


@pytest.mark.parametrize("seed", range(2))
def test_drafts_are_redrawn_alike(seed: int):
    world = World(rounds=2)
    batch = world.collect(world.team, 0, group=4)
    turns = int(batch.first_U[-1])
    kept = np.random.default_rng(0).integers(-1, 3, size=turns)
    lengths = np.array([len(turn.token_ids) for episode in batch.episodes for turn in episode.turns])
    carried = Carried(world.team.version, np.zeros(turns), np.minimum(kept, lengths), np.full(turns, 2))
    batch = replace(batch, carried=carried)
    ends = {name: frozenset({0, 1}) for name in world.team.names}
    expected = redraw(world.context, world.team, batch, seed=4, end_ids=ends)
    context = replace(world.context, sampler=Ragged(world.engine, seed))
    found = redraw(context, world.team, batch, seed=4, end_ids=ends)
    assert_same(found.batch, expected.batch)
    assert found.kept == expected.kept


def test_the_rest_of_a_kept_message_is_asked_for_with_the_room_that_is_left():
    """A prompt and a whole message may take every position of a model."""
    world = World()
    batch = world.collect(world.team, 0, group=4)
    turns = int(batch.first_U[-1])
    batch = replace(
        batch, carried=Carried(world.team.version, np.zeros(turns), np.zeros(turns, int), np.full(turns, 2))
    )
    asked: list[tuple[int, int]] = []

    class Watched(Ragged):
        def _ended(self, row: int, one: Wanted) -> Ended:
            asked.append((len(one.prompt), len(one.noise_T)))
            return super()._ended(row, one)

    ends = {name: frozenset({0, 1}) for name in world.team.names}
    context = replace(world.context, sampler=Watched(world.engine, 0))
    found = redraw(context, world.team, batch, seed=4, end_ids=ends).batch
    first = {len(episode.turns[0].context_ids) for episode in found.episodes}
    assert {prompt + tokens for prompt, tokens in asked if prompt - 1 in first} == {length + 3 for length in first}
    assert {tokens for _, tokens in asked} == {2, 3}


COUNTER: Toolbox[int] = Toolbox()


@COUNTER.tool(n=WHOLE)
def add(state: int, n: int) -> Outcome[int]:
    return Outcome(f"now {state + n}", state + n)


class Host(Numbers):
    """Replies with the seed that it was asked with, and how many were asked with it."""

    def __init__(self) -> None:
        super().__init__()
        self.environment = self
        self.is_sampling = False

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        assert not self.is_sampling, "asked within a stream, where it may not ask the same sampler"
        return [
            Reply((Message("host", f"{seed} {row} of {len(situations)}"),), ends="9" in "".join(s.acts))
            for row, s in enumerate(situations)
        ]

    def speakers(self, problem: Problem) -> tuple[str, ...]:
        return ("host",)


def calls_by_chance(agent: str, prompt: str, noise: float) -> str:
    return "add(n=2)" if noise < 0.4 else f"@{'ann' if agent == 'bob' else 'bob'} {noise:.3f}"


def with_tools(sampler: Any, task: Any, router: Any) -> tuple[RolloutContext, Team]:
    class Told(Letters):
        def encode(self, messages: Any, tools: Any = ()) -> Any:
            return super().encode(messages)

    team = Team(tuple(Agent(name, sampler.version(name), max_tokens=64) for name in ("ann", "bob")))
    tools = ToolboxTools(COUNTER, lambda problem: int(problem.answer))
    turns = with_tool_turns(router, team, 2)
    return RolloutContext(sampler, dict.fromkeys(team.names, Told()), turns, task, tools=tools), team


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["schedule", "addressed", "environment"])
def test_tool_turns_and_environments_come_out_alike(kind: str, seed: int):
    router = Addressed.planned(("ann", "bob"), turns=4) if kind == "addressed" else Schedule.repeated(("ann", "bob"), 3)
    task = Host() if kind == "environment" else Numbers()
    sampler = Scripted(calls_by_chance)
    context, team = with_tools(sampler, task, router)
    expected = play(context, team, problems(3), 4, seed=1)
    ragged = Ragged(sampler, seed)
    stream = ragged.stream

    def marked(more: More, **told: Any) -> None:
        if isinstance(task, Host):
            task.is_sampling = True
        stream(more, **told)
        if isinstance(task, Host):
            task.is_sampling = False

    ragged.stream = marked  # type: ignore[method-assign]
    assert_same(play(replace(context, sampler=ragged), team, problems(3), 4, seed=1), expected)
    lengths = {len(episode.turns) for episode in expected.episodes}
    assert len(lengths) > 1, "all episodes have as many turns: this proves nothing"
    assert any(turn.results for episode in expected.episodes for turn in episode.turns)
    assert ragged.most_agents == 2
    if kind == "environment":
        assert_asked_by_tick(expected, seed=1)


def assert_asked_by_tick(batch: RolloutBatch, seed: int) -> None:
    """An environment is asked once for all episodes in which a round opens after as many turns, with their seed."""
    opened: dict[int, list[str]] = {}
    for episode in batch.episodes:
        for round, reply in enumerate(episode.replies):
            tick = sum(turn.round < round for turn in episode.turns)
            opened.setdefault(tick, []).append(reply.messages[0].text)
    assert len(opened) > 4, "all rounds open together: this proves nothing"
    for tick, told in opened.items():
        seed_there = seed_of(seed, "environment", tick)
        assert told == [f"{seed_there} {row} of {len(told)}" for row in range(len(told))]


def test_a_message_of_other_weights_stops_the_play():
    world = World()
    stale = replace(world.team, agents=(world.team["x"], replace(world.team["y"], version="older")))
    context = replace(world.context, sampler=Ragged(world.engine, 0))
    with pytest.raises(StaleWeights, match="'y' wrote with weights"):
        play(context, stale, context.task.problems("train"), 2, seed=0)
