"""Agents on workers of their own: the bits of one process, whichever group dies; what a worker holds; refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import killing
import numpy as np
import pytest
from striking import SMALL, Strike, assert_same, trained

from teamtr.analysis.report import build_report, report_page
from teamtr.batches import AgentBatch
from teamtr.config import dump, loads
from teamtr.engines.cluster.engine import ClusterEngine
from teamtr.engines.cluster.groups import GroupedEngine
from teamtr.engines.cluster.ray_members import Group, RayMembers, Room, share_out, start_members
from teamtr.engines.cluster.seat import Call, Seat
from teamtr.engines.shards import Shards
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.errors import UserError
from teamtr.randomness import uniforms
from teamtr.session.build import build
from teamtr.session.cluster import _member
from teamtr.session.memory import demand_of
from teamtr.session.models import local_engine
from teamtr.session.task import build_task
from teamtr.theory.objective import Objective
from teamtr.types import PLAYER

pytestmark = pytest.mark.cluster

IN_GROUPS = ("cluster.engine=ray", "cluster.patience_s=300")
PAIR_AND_ONE = "cluster.groups=[{agents: [left, right], workers: 2}, {agents: [speaker]}]"
ONE_AND_ONE = "cluster.groups=[{agents: [left, right]}, {agents: [speaker]}]"
ONE_AND_PAIR = "cluster.groups=[{agents: [right]}, {agents: [speaker, left], workers: 2}]"
EACH_ALONE = "cluster.groups=[{agents: [left]}, {agents: [right]}, {agents: [speaker]}]"
MIXED = ("team.train=lora", "team.agents.speaker.train=full", "tiny.warmup_steps=20", "plan.stages=1")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    """What one process makes of the run, in as many shards."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    trained(folder, *SMALL)
    return killing.result(folder)


# -- the same bits --------------------------------------------------------------------------------------------


@pytest.mark.slow  # one in which a worker dies (below) is quick, and ends with the same bits
def test_a_run_in_two_groups_is_that_of_one_process_to_the_bit(tmp_path, alone, kept):
    records = trained(tmp_path / "run", *SMALL, *IN_GROUPS, PAIR_AND_ONE)
    assert [r["kind"] for r in records].count("resume") == 0
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["plain", "paged"])
def test_so_is_one_of_adapters_in_one_group_and_all_weights_in_the_other(sampler, tmp_path, kept):
    own = (*MIXED, "cluster.shards=4", f"sampling.engine={sampler}")
    trained(tmp_path / "alone", *own)
    trained(tmp_path / "run", *own, *IN_GROUPS, PAIR_AND_ONE)
    assert_same(tmp_path / "run", killing.result(tmp_path / "alone"))


@pytest.mark.slow
def test_so_is_one_whose_base_is_spread_over_the_workers_of_its_group(tmp_path, kept):
    """The other group's weights are frozen: where all are trained in parts, one process rounds otherwise."""
    own = (*MIXED, "team.agents.speaker.frozen=true", "cluster.shards=4")
    trained(tmp_path / "alone", *own)
    trained(tmp_path / "run", *own, *IN_GROUPS, PAIR_AND_ONE, "cluster.shard_base=true")
    assert_same(tmp_path / "run", killing.result(tmp_path / "alone"))


@pytest.mark.slow
def test_a_run_goes_on_in_other_groups_with_other_workers_and_without_groups(tmp_path, alone, kept):
    for groups in (PAIR_AND_ONE, ONE_AND_PAIR, EACH_ALONE):
        trained(tmp_path / "run", *SMALL, *IN_GROUPS, groups, updates=1)
    trained(tmp_path / "run", *SMALL)
    assert_same(tmp_path / "run", alone)


# -- whoever dies ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("groups", "group", "worker", "call", "nth"),
    [
        pytest.param(ONE_AND_ONE, 1, 0, "step", 1, marks=(pytest.mark.slow, pytest.mark.matrix)),
        pytest.param(PAIR_AND_ONE, 1, 0, "step", 1, marks=(pytest.mark.slow, pytest.mark.matrix)),
        pytest.param(PAIR_AND_ONE, 0, 1, "step", 1, marks=pytest.mark.slow),
        pytest.param(PAIR_AND_ONE, 0, 0, "sample_parts", 8, marks=pytest.mark.slow),  # after the first commit
        pytest.param(PAIR_AND_ONE, 1, 0, "save", 1, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_killed_in_either_group_costs_time_and_nothing_else(
    groups, group, worker, call, nth, tmp_path, alone, monkeypatch, kept
):
    strike = Strike(monkeypatch, call, worker, nth=nth, group=group)
    records = trained(tmp_path / "run", *SMALL, *IN_GROUPS, groups)
    assert strike.struck
    assert_same(tmp_path / "run", alone)
    (resumed,) = [r for r in records if r["kind"] == "resume"]
    agents = ("left, right", "speaker")[group]
    assert f"worker {worker} of group {group} ({agents}; process " in resumed["lost"]["why"]
    assert f"worker {worker} of group {group} ({agents}" in report_page(build_report(tmp_path / "run"))


# -- what a worker holds --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_worker_holds_a_model_of_another_group(kept):
    built = build(killing.team_file(*SMALL, *IN_GROUPS, PAIR_AND_ONE))
    try:
        for group, held in zip(built.engine.groups, (("left", "right"), ("speaker",)), strict=True):
            members = group.members
            for member in range(members.count):
                assert members.ask({member: Call("agents")}) == {member: held}
                for agent in set(built.team.names) - set(held):
                    with pytest.raises(KeyError, match=agent):
                        members.ask({member: Call("version", None, (agent,))})
        assert [group.members.count for group in built.engine.groups] == [2, 1]
    finally:
        built.engine.close()


def in_groups(team_file, *, taught: bool = True) -> list[Any]:
    """The engine of one worker of each group, in this process, as a worker makes it."""
    held = [team_file.cluster.held_by(number) for number in range(len(team_file.cluster.groups))]
    text = dump(team_file)
    return [_member(text, taught, os.getcwd(), one, Shards(team_file.cluster.parts)) for one in held]


def test_a_worker_makes_no_model_of_another_group(monkeypatch):
    """Not even for a moment: it may have no memory for it."""
    made: list[TransformerPolicy] = []
    begin = TransformerPolicy.__init__

    def begun(self: TransformerPolicy, *arguments: Any, **options: Any) -> None:
        made.append(self)
        begin(self, *arguments, **options)

    monkeypatch.setattr(TransformerPolicy, "__init__", begun)
    pair, one = in_groups(killing.team_file("team.train=full", "tiny.warmup_steps=0", *IN_GROUPS, PAIR_AND_ONE))
    held = [learner.policy for engine in (pair, one) for learner in engine.learners.values()]
    assert made == held
    assert len({id(policy.model) for policy in made}) == 3


@pytest.mark.long
@pytest.mark.parametrize("train_kind", ["full", "mixed"])
def test_a_group_holds_the_very_weights_that_the_whole_team_has(train_kind):
    """What the built-in model is taught, and what adapters begin with, depends on all agents of a source."""
    own = MIXED if train_kind == "mixed" else ("team.train=full", "tiny.warmup_steps=20")
    team_file = killing.team_file(*own, *IN_GROUPS, PAIR_AND_ONE)
    whole = _member(dump(team_file), True, os.getcwd(), None, Shards(2))
    pair, one = in_groups(team_file)
    assert (pair.agents, one.agents) == (("left", "right"), ("speaker",))
    for engine in (pair, one):
        for agent in engine.agents:
            assert engine.version(agent) == whole.version(agent)
            assert engine.info(agent) == whole.info(agent)
    demand = demand_of(build(killing.team_file(*own)))
    weights = [
        next(item.bytes for item in engine.memory_plan(demand.of(engine.agents)).items if item.what == "weights")
        for engine in (whole, pair, one)
    ]
    assert weights[0] == weights[1] + weights[2], "each model is in one group only"
    assert min(weights) > 0


def test_a_player_of_its_own_model_lives_in_the_first_group(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"surface": "A man laughs.", "bottom": "He is a clown."}) + "\n")
    text = f"""
name: played
task: {{name: 'arbench:sp', path: {tmp_path / "rows.jsonl"}, player: {{model: tiny, max_tokens: 8}}}}
team: {{model: tiny, max_tokens: 8, router: {{rounds: 2}}, agents: [{{name: asker}}, {{name: judge}}]}}
tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
cluster: {{engine: ray, groups: [{{agents: [judge]}}, {{agents: [asker]}}]}}
"""
    team_file = loads(text, "played")
    task, player = build_task(team_file), team_file.task.wanted_player
    engines = [
        local_engine(team_file, task, team_file.sized_plan(), player, held=team_file.cluster.held_by(number)).engine
        for number in (0, 1)
    ]
    assert [engine.agents for engine in engines] == [("judge", PLAYER), ("asker",)]
    engine = GroupedEngine(engines, team_file.cluster.group_names, ("asker", "judge", PLAYER))
    assert {engine.info(name).device for name in engine.agents} == {"cpu"}


# -- who is asked ---------------------------------------------------------------------------------------------


class Recorded:
    """Members in this process that write down what they are asked."""

    def __init__(self, engine: Any, count: int) -> None:
        self.count = count
        self.seats = [Seat(engine, f"worker {k}") for k in range(count)]
        self.asked: list[str] = []
        self.closed = False

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        self.asked += [call.name for call in calls.values()]
        answers = {member: self.seats[member].answer(call) for member, call in calls.items()}
        for answer in answers.values():
            if answer.error is not None:
                raise answer.error
        return {member: answer.result for member, answer in answers.items()}

    def close(self) -> None:
        self.closed = True
        if self.count == 2:
            raise RuntimeError("one that cannot be closed")


def recorded() -> tuple[GroupedEngine, Recorded, Recorded]:
    team_file = killing.team_file(*SMALL, *IN_GROUPS, PAIR_AND_ONE)
    pair, one = (Recorded(engine, 2 - k) for k, engine in enumerate(in_groups(team_file)))
    engines = [ClusterEngine(members, shards=4) for members in (pair, one)]
    pair.asked.clear()
    one.asked.clear()
    return GroupedEngine(engines, team_file.cluster.group_names, team_file.team.names), pair, one


@pytest.mark.parametrize("agent", ["left", "speaker"])
def test_whatever_is_asked_of_an_agent_is_asked_of_its_group_alone(agent, tmp_path):
    engine, pair, one = recorded()
    own, other = (pair, one) if agent != "speaker" else (one, pair)
    prompts = [np.array([3, 4, 5 + k % 2], dtype=np.int32) for k in range(4)]
    samples = engine.sample(agent, prompts, uniforms(0, 4, 2))
    at = np.arange(4)
    ids, logprobs = tuple(s.token_ids for s in samples), tuple(s.logprobs for s in samples)
    learner = engine.learner(agent)
    before = learner.snapshot()
    learner.begin(AgentBatch(agent, tuple(prompts), ids, logprobs, at, at // 2, np.zeros(4, dtype=np.int64)))
    learner.step(at, np.array([1.0, -1.0, 1.0, -1.0]), Objective(), beta=0.0, learning_rate=0.1)
    learner.measure()
    with suppress(RuntimeError):  # here all members of a group are one engine, which took the step twice
        engine.publish(agent, learner.version())
    learner.fingerprint()
    learner.save(tmp_path / "agent")
    learner.load(tmp_path / "agent")
    learner.restore(before)
    learner.end()
    engine.info(agent)
    engine.set_precision(agent, "fp32")
    of_learner = {"snapshot", "begin", "step", "measure", "fingerprint", "save", "load", "restore", "end"}
    assert set(own.asked) == of_learner | {"sample_parts", "version", "publish", "info", "set_precision"}
    assert other.asked == []
    assert {sample.version for sample in samples} == {engine.version(agent)}


@pytest.mark.long
def test_what_is_asked_of_all_is_asked_of_every_group_for_its_own_agents():
    engine, pair, one = recorded()
    demand = demand_of(build(killing.team_file(*SMALL)))
    found = engine.rehearse(demand)
    assert set(found.micro_batch) == {"left", "right", "speaker"}
    assert engine.memory_plan(demand).where in ("group 0 (left, right)", "group 1 (speaker)")
    engine.peak_bytes()
    assert set(pair.asked) == set(one.asked) == {"rehearse", "memory_plan", "peak_bytes"}


@pytest.mark.long
def test_a_plan_is_that_of_the_group_with_least_to_spare(monkeypatch):
    team_file = killing.team_file("team.train=full", "tiny.warmup_steps=0", *IN_GROUPS, PAIR_AND_ONE)
    engines = in_groups(team_file)
    engine = GroupedEngine(engines, team_file.cluster.group_names, team_file.team.names)
    demand = demand_of(build(killing.team_file("team.train=full", "tiny.warmup_steps=0")))
    plans = [one.memory_plan(demand.of(one.agents)) for one in engines]
    assert plans[1].total > plans[0].total, "the speaker reads most"
    found = engine.memory_plan(demand)
    assert (found.where, found.items) == ("group 1 (speaker)", plans[1].items)
    little, much = (replace(plan, available=plan.total + left) for plan, left in zip(plans, (1, 1000), strict=True))
    for one, plan in zip(engines, (little, much), strict=True):
        monkeypatch.setattr(one, "memory_plan", lambda demand, plan=plan: plan)
    assert engine.memory_plan(demand).where == "group 0 (left, right)"


def test_every_group_is_closed_whatever_the_others_do():
    engine, pair, one = recorded()
    with pytest.raises(RuntimeError, match="cannot be closed"):
        engine.close()
    assert pair.closed
    assert one.closed


# -- where there is room --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "cores", "counts"),
    [
        ([2, 1], 3, [2, 1]),
        ([2, 1], 2, [1, 1]),
        ([5, 2, 4], 7, [2, 2, 3]),
        ([3], 2, [2]),
        ([1, 1, 1], 2, [1, 1, 1]),  # which is refused
    ],
)
def test_the_largest_group_gives_workers_first_and_none_its_last(wanted, cores, counts):
    assert share_out(wanted, cores) == counts


@pytest.mark.slow
def test_groups_that_find_no_room_are_refused_at_first_and_get_fewer_workers_later(kept):
    groups = "cluster.groups=[{agents: [left, right], workers: 3}, {agents: [speaker]}]"
    team_file = killing.team_file(*SMALL, *IN_GROUPS, groups)
    with pytest.raises(UserError, match=r"cluster\.workers is 4, and the cluster has 3 cores"):
        build(team_file)
    lost = [Group(lambda shards: None, 1) for _ in range(4)]
    with pytest.raises(UserError, match="4 groups need one each at least"):
        start_members(lost, Room(shards=4, may_be_fewer=True))
    from teamtr.session.build import Parts

    built = build(team_file, parts=Parts().again())
    assert [group.members.count for group in built.engine.groups] == [2, 1]
    assert all(isinstance(group.members, RayMembers) for group in built.engine.groups)
    built.engine.close()


def test_a_worker_is_called_by_its_group():
    make = Recorded
    assert Group(make, 2).worker(1) == "worker 1"
    assert Group(make, 2).worker(1, "process 7 on host") == "worker 1 (process 7 on host)"
    assert Group(make, 2, 0, ("a", "b")).worker(1) == "worker 1 of group 0 (a, b)"
    assert Group(make, 2, 0, ("a", "b")).worker(1, "process 7 on host") == (
        "worker 1 of group 0 (a, b; process 7 on host)"
    )


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("cluster.engine=local", PAIR_AND_ONE), "cluster.groups needs cluster.engine: ray"),
        (("cluster.groups=[{agents: [left, rigth]}, {agents: [speaker]}]",), 'no agent "rigth"; did you mean "right"?'),
        (("cluster.groups=[{agents: [left, right]}]",), 'no group for "speaker": every agent needs one'),
        (
            ("cluster.groups=[{agents: [left, right]}, {agents: [speaker, right]}]",),
            'cluster.groups.1 names "right", which cluster.groups.0 names already',
        ),
        (
            ("cluster.groups=[{agents: [left, right, left, speaker]}]",),
            'cluster.groups.0 names "left", which the same group names already',
        ),
        (
            (PAIR_AND_ONE, "team.train=lora"),
            '"left" and "speaker" in different groups, and they train adapters on one base (tiny)',
        ),
        ((PAIR_AND_ONE, "cluster.workers=2"), "cluster.workers is 2, and the groups have 3 workers together"),
        ((PAIR_AND_ONE, "cluster.shards=1"), "cluster.shards is 1, and 2 workers of a group need as many at least"),
        (("cluster.groups=[{agents: []}]",), "cluster.groups.0.agents must have at least 1 item"),
        (("cluster.groups=[{workers: 2}]",), 'missing key "agents" in cluster.groups.0'),
        ((PAIR_AND_ONE, "cluster.groups.1.workers=0"), "cluster.groups.1.workers must be at least 1, got 0"),
        (("cluster.groups=[[left, right, speaker]]",), "cluster.groups.0 must be a mapping of keys to values"),
    ],
)
def test_groups_that_do_not_fit_are_refused(overrides, told):
    with pytest.raises(UserError) as refused:
        killing.team_file("cluster.engine=ray", *overrides)
    assert told in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1, "one mistake is told once"


def test_workers_of_groups_are_counted_and_shards_are_those_of_the_largest():
    found = killing.team_file("cluster.engine=ray", PAIR_AND_ONE).cluster
    assert (found.workers, found.shards) == (3, 2)
    assert killing.team_file("cluster.engine=ray", PAIR_AND_ONE, "cluster.workers=3").cluster == found
    mixed = killing.team_file("cluster.engine=ray", PAIR_AND_ONE, *MIXED)
    assert mixed.cluster.workers == 3, "adapters of one base are in one group, and whole models where they like"


def test_whoever_has_another_base_may_live_elsewhere(tmp_path: Path):
    text = killing.TEAM.replace("model: tiny", "model: one\n  train: lora").replace(
        "max_tokens: 3", "max_tokens: 3, model: two"
    )
    assert loads(text, "two", ("cluster.engine=ray", PAIR_AND_ONE)).cluster.workers == 3
    apart = "cluster.groups=[{agents: [left]}, {agents: [right, speaker]}]"
    with pytest.raises(UserError, match=r"on one base \(one\)"):
        loads(text, "two", ("cluster.engine=ray", apart))
