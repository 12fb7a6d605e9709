"""A team over several processes: the bits of one process, whoever dies on the way; and what is refused."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import killing
import numpy as np
import psutil
import pytest
from striking import SMALL, Strike, assert_same, trained

from forked import CONTEXT, LONG
from kept_workers import CORES
from teamtr.analysis.report import build_report, report_page
from teamtr.batches import AgentBatch
from teamtr.cli.progress import TrainingScreen
from teamtr.config import dump, loads
from teamtr.engines.cluster import ray_members
from teamtr.engines.cluster.engine import ClusterEngine
from teamtr.engines.cluster.ray_members import Group, RayMembers, Room, start_members
from teamtr.engines.cluster.seat import Call, OtherWeights, Seat
from teamtr.errors import UserError
from teamtr.ports import EngineLost
from teamtr.randomness import uniforms
from teamtr.session import cluster
from teamtr.session.build import build
from teamtr.session.cluster import _member, engine_of
from teamtr.session.models import local_engine
from teamtr.session.resume import OtherRun
from teamtr.session.task import build_task
from teamtr.store import StoreError
from teamtr.theory.objective import Objective

pytestmark = pytest.mark.cluster
ray = pytest.importorskip("ray", reason="needs teamtr[ray]")

WORKERS = (*SMALL, "cluster.engine=ray", "cluster.workers=2", "cluster.patience_s=300")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    """What one process makes of the run, in as many shards."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    trained(folder, *SMALL)
    return killing.result(folder)


# -- the same bits --------------------------------------------------------------------------------------------


@pytest.mark.slow  # one of which a worker dies (below) is quick, and ends with the same bits
def test_a_run_over_two_workers_is_that_of_one_process_to_the_bit(tmp_path, alone, no_kept):
    records = trained(tmp_path / "run", *WORKERS)
    assert [r["kind"] for r in records].count("resume") == 0
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_so_is_one_over_one_or_three(workers, tmp_path, alone, kept):
    trained(tmp_path / "run", *WORKERS, f"cluster.workers={workers}")
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("train_kind", ["lora", "full"])
def test_so_is_one_of_transformers(train_kind, tmp_path, kept):
    own = (f"team.train={train_kind}", "plan.stages=1", "tiny.warmup_steps=20", "cluster.shards=4")
    trained(tmp_path / "alone", *own)
    trained(tmp_path / "run", *own, "cluster.engine=ray", "cluster.workers=2")
    assert_same(tmp_path / "run", killing.result(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["plain", "paged"])
def test_so_is_one_whose_base_is_sharded(sampler, tmp_path, kept):
    own = ("team.train=lora", "plan.stages=1", "tiny.warmup_steps=20", "cluster.shards=4", f"sampling.engine={sampler}")
    trained(tmp_path / "alone", *own)
    trained(tmp_path / "run", *own, "cluster.engine=ray", "cluster.workers=2", "cluster.shard_base=true")
    assert_same(tmp_path / "run", killing.result(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["plain", pytest.param("paged", marks=pytest.mark.matrix)])
def test_a_team_trained_in_parts_is_the_same_over_one_worker_two_and_two_of_which_one_dies(
    sampler, tmp_path, monkeypatch, kept
):
    own = (
        *("team.train=full", "plan.stages=1", "tiny.warmup_steps=20", f"sampling.engine={sampler}"),
        *("cluster.engine=ray", "cluster.shards=4", "cluster.shard_base=true", "cluster.patience_s=300"),
    )
    trained(tmp_path / "one", *own, "cluster.workers=1")
    alone = killing.result(tmp_path / "one")
    trained(tmp_path / "two", *own, "cluster.workers=2")
    assert_same(tmp_path / "two", alone)
    strike = Strike(monkeypatch, "step", 1, nth=2)
    records = trained(tmp_path / "struck", *own, "cluster.workers=2")
    assert strike.struck
    assert [r["kind"] for r in records].count("resume") == 1
    assert_same(tmp_path / "struck", alone)


@pytest.mark.slow
def test_another_number_of_shards_has_other_bits(tmp_path, alone):
    """Else the tests above could not tell."""
    own = ("team.train=lora", "plan.stages=1", "tiny.warmup_steps=20")
    for shards in (1, 4):
        trained(tmp_path / str(shards), *own, f"cluster.shards={shards}")
    one, four = (killing.result(tmp_path / str(shards)) for shards in (1, 4))
    assert one["files"] != four["files"]


@pytest.mark.slow
def test_a_run_goes_on_with_other_workers_and_not_with_other_shards(tmp_path, alone, kept):
    trained(tmp_path / "run", *SMALL, updates=2)
    with pytest.raises(OtherRun, match=r"cluster\.shards"):
        trained(tmp_path / "run", *SMALL, "cluster.shards=2")
    trained(tmp_path / "run", *WORKERS)
    assert_same(tmp_path / "run", alone)


# -- whoever dies ---------------------------------------------------------------------------------------------

QUICK = {("step", 1)}
CELLS = {
    *(("sample_parts", 0), ("begin", 1), ("step", 1), ("measure", 0)),
    *(("save", 0), ("publish", 1), ("snapshot", 0)),
}
"""Of ``make test-cluster``: every call, and either worker. ``make test-cluster-all`` kills either at each of them."""
CALLS = ("sample_parts", "begin", "step", "measure", "save", "publish", "snapshot")


def cell(call: str, worker: int) -> Any:
    marks = [] if (call, worker) in QUICK else [pytest.mark.slow]
    return pytest.param(call, worker, marks=marks if (call, worker) in CELLS else [*marks, pytest.mark.matrix])


@pytest.mark.long
@pytest.mark.parametrize(("call", "worker"), [cell(call, worker) for call in CALLS for worker in (0, 1)])
def test_a_worker_that_is_killed_costs_time_and_nothing_else(call, worker, tmp_path, alone, monkeypatch, kept):
    strike = Strike(monkeypatch, call, worker, nth=4)
    records = trained(tmp_path / "run", *WORKERS)
    assert strike.struck
    assert_same(tmp_path / "run", alone)
    (resumed,) = [r for r in records if r["kind"] == "resume"]
    assert "is gone" in resumed["lost"]["why"]
    assert resumed["lost"]["seconds"] > 0
    (told,) = build_report(tmp_path / "run").data["lost"]
    assert told["why"] == resumed["lost"]["why"]
    assert told["updates"] == resumed["updates"]
    assert "Workers that were lost" in report_page(build_report(tmp_path / "run"))
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), TrainingScreen() as screen:
        list(screen.watch([resumed]))
    assert f"worker {worker} (process" in " ".join(shown.getvalue().split())


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["optimizer", "noise"])
def test_what_is_wrong_in_workers_shows(sabotage, tmp_path, alone, monkeypatch, kept):
    """Controls of the tests above: moments that are lost with the worker, and other noise, which needs no loss."""
    kept.keep = False
    sabotaged(monkeypatch, sabotage)
    strike = Strike(monkeypatch, "step", 1, nth=4) if sabotage == "optimizer" else None
    trained(tmp_path / "run", *WORKERS)
    assert strike is None or strike.struck
    assert killing.result(tmp_path / "run")["files"] != alone["files"]


@pytest.mark.slow
def test_sums_in_another_order_show(tmp_path, monkeypatch, kept):
    """A third, with transformers: in a table, the shards of a step seldom meet in one row."""
    kept.keep = False
    own = ("team.train=lora", "plan.stages=1", "tiny.warmup_steps=20", "cluster.shards=4")
    trained(tmp_path / "alone", *own)
    sabotaged(monkeypatch, "order")
    trained(tmp_path / "run", *own, "cluster.engine=ray", "cluster.workers=2")
    assert killing.result(tmp_path / "run")["files"] != killing.result(tmp_path / "alone")["files"]


def sabotaged(monkeypatch, sabotage: str) -> None:
    """In every worker."""
    ray.cloudpickle.register_pickle_by_value(killing)  # workers do not find the tests' modules
    monkeypatch.setattr(cluster, "_member", partial(killing.sabotaged_member, sabotage))


@pytest.mark.slow
def test_a_dead_head_of_ray_ends_the_command_and_the_same_goes_on(tmp_path, alone, kept):
    """Ray's processes are killed, all but the workers: the command cannot go on by itself, and says so or dies."""
    process = driver(tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    until(lambda: log.exists() and '"update"' in log.read_text(), "the run never got anywhere", process)
    head = [one for one in started_by(tmp_path / "run") if name_of(one) in ("gcs_server", "raylet")]
    assert len(head) == 2
    for one in head:
        one.kill()
    process.join(LONG)
    assert process.exitcode not in (0, None)
    until(lambda: not started_by(tmp_path / "run"), "processes of Ray are left behind")
    trained(tmp_path / "run", *WORKERS)
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("worker", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_so_does_one_that_is_killed_while_weights_are_loaded(worker, tmp_path, alone, monkeypatch, kept):
    first = Strike(monkeypatch, "step", 1)
    second = Strike(monkeypatch, "load", worker)
    records = trained(tmp_path / "run", *WORKERS)
    assert first.struck
    assert second.struck
    assert_same(tmp_path / "run", alone)
    assert [r["kind"] for r in records].count("resume") == 1, "the second time it had not yet gone on"


@pytest.mark.slow
def test_a_worker_that_hangs_is_made_anew(tmp_path, alone, monkeypatch, kept):
    """Once it is stopped it has a second to answer; how long the others take depends on the machine."""
    assert cluster._room(killing.team_file(*WORKERS)).patience_s == 300.0

    def stop(members: RayMembers, worker: int) -> None:
        os.kill(members.processes[worker][1], signal.SIGSTOP)
        members.room = replace(members.room, patience_s=1.0)

    strike = Strike(monkeypatch, "step", 1, blow=stop)
    records = trained(tmp_path / "run", *WORKERS)
    assert strike.struck
    assert_same(tmp_path / "run", alone)
    (resumed,) = [r for r in records if r["kind"] == "resume"]
    assert "not answered for 1 s" in resumed["lost"]["why"]


@pytest.mark.slow
def test_a_full_disk_under_a_worker_ends_the_command_and_the_same_goes_on(tmp_path, alone, monkeypatch, kept):
    """It is told as if the driver had found it full."""

    def fill_up(members: RayMembers, worker: int) -> None:
        psutil.Process(members.processes[worker][1]).rlimit(psutil.RLIMIT_FSIZE, (1024, 1024))
        kept.keep = False

    with monkeypatch.context() as patch:
        strike = Strike(patch, "save", 0, nth=1, blow=fill_up)
        with pytest.raises(StoreError, match=r"cannot write .*: File too large.*make room"):
            trained(tmp_path / "run", *WORKERS)
        assert strike.struck
    kept.keep = True
    trained(tmp_path / "run", *WORKERS)
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_full_object_store_costs_time_and_nothing_else(tmp_path, alone, kept):
    """Ray writes what nobody reads at the moment to disk, and the calls of a run are small."""
    held = [ray.put(np.zeros(32 << 20, dtype=np.uint8)) for _ in range(12)]
    assert ray_members.STORE_BYTES < 12 * (32 << 20)
    records = trained(tmp_path / "run", *WORKERS)
    assert [r["kind"] for r in records].count("resume") == 0
    assert_same(tmp_path / "run", alone)
    assert all(len(ray.get(one)) == 32 << 20 for one in held)


@pytest.mark.slow
def test_restarts_end_and_the_same_command_goes_on(tmp_path, alone, monkeypatch, kept):
    with monkeypatch.context() as patch:
        strikes = [Strike(patch, "step", 1, nth=nth) for nth in (0, 2)]
        with pytest.raises(EngineLost, match="is gone"):
            trained(tmp_path / "run", *WORKERS, "cluster.max_restarts=1")
        assert all(strike.struck for strike in strikes)
    trained(tmp_path / "run", *WORKERS)
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(("before_commit", 2), marks=pytest.mark.matrix),
        ("after_commit", 2),
        pytest.param(("after_log", 2), marks=pytest.mark.matrix),
    ],
)
def test_a_driver_that_is_killed_leaves_nobody_behind_and_goes_on(moment, tmp_path, alone, kept):
    process = driver(tmp_path / "run", die=moment)
    process.join(LONG)
    assert process.exitcode == -signal.SIGKILL
    until(lambda: not started_by(tmp_path / "run"), "processes of Ray are left behind")
    trained(tmp_path / "run", *WORKERS)
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
def test_so_does_a_driver_that_ends(tmp_path, alone):
    process = driver(tmp_path / "run")
    process.join(LONG)
    assert process.exitcode == 0
    until(lambda: not started_by(tmp_path / "run"), "processes of Ray are left behind")
    assert_same(tmp_path / "run", alone)


def driver(folder: Path, **options: Any) -> Any:
    """A process that trains, with a Ray of its own."""
    options = {"overrides": WORKERS, "mark": str(folder), **options}
    process = CONTEXT.Process(target=killing.train, args=(str(folder),), kwargs=options)
    process.start()
    return process


def started_by(folder: Path) -> list[psutil.Process]:
    """Processes that the driver of this folder has started, and those that they have: other tests have such too."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(killing.MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


def until(reached: Callable[[], bool], otherwise: str, process: Any = None) -> None:
    end = time.monotonic() + LONG
    while not reached():
        assert time.monotonic() < end, otherwise
        assert process is None or process.exitcode is None, f"the process ended with {process.exitcode}"
        time.sleep(0.05)


# -- weights of the right version -----------------------------------------------------------------------------


class Together:
    """Members in this process, each with the whole team, which they compute wholly."""

    def __init__(self, team_file, count: int = 2) -> None:
        self.count = count
        task, plan = build_task(team_file), team_file.sized_plan()
        self.seats = [Seat(local_engine(team_file, task, plan, None).engine, f"worker {k}") for k in range(count)]

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        answers = {member: self.seats[member].answer(call) for member, call in calls.items()}
        for answer in answers.values():
            if answer.error is not None:
                raise answer.error
        return {member: answer.result for member, answer in answers.items()}

    def close(self) -> None:
        """Nothing is elsewhere."""


def batch_of(engine: ClusterEngine) -> AgentBatch:
    prompts = [np.array([3, 4, 5 + k % 2], dtype=np.int32) for k in range(4)]
    samples = engine.sample("left", prompts, uniforms(0, 4, 2))
    at = np.arange(4)
    ids, logprobs = tuple(s.token_ids for s in samples), tuple(s.logprobs for s in samples)
    return AgentBatch("left", tuple(prompts), ids, logprobs, at, at // 2, np.zeros(4, dtype=np.int64))


@pytest.mark.long
@pytest.mark.parametrize("times", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_worker_that_missed_an_update_is_caught_every_time(times: int):
    members = Together(killing.team_file(*SMALL, "cluster.shards=1"))
    engine, rng, caught = ClusterEngine(members, shards=2), np.random.default_rng(0), 0
    learner, batch = engine.learner("left"), batch_of(engine)
    first = learner.snapshot()
    for _ in range(times):
        learner.restore(first)
        learner.begin(batch)
        steps, missed, late = int(rng.integers(1, 4)), int(rng.integers(2)), int(rng.integers(4))
        own = members.seats[missed].engine.learner("left")
        for step in range(steps):
            saved = own.snapshot()
            learner.step(np.arange(4), np.array([1.0, -1.0, 1.0, -1.0]), Objective(), beta=0.0, learning_rate=0.1)
            if step == late % steps:
                own.restore(saved)
        with pytest.raises(RuntimeError, match="cannot be published"):
            engine.publish("left", members.seats[1 - missed].engine.version("left"))
        with pytest.raises(OtherWeights, match="holds weights"):
            engine.sample("left", list(batch.prompts), uniforms(0, 4, 2))
        caught += 1
    assert caught == times


def test_workers_that_agree_publish_and_sample():
    """The control of the test above."""
    members = Together(killing.team_file(*SMALL, "cluster.shards=1"))
    engine = ClusterEngine(members, shards=2)
    learner, batch = engine.learner("left"), batch_of(engine)
    learner.begin(batch)
    learner.step(np.arange(4), np.array([1.0, -1.0, 1.0, -1.0]), Objective(), beta=0.0, learning_rate=0.1)
    engine.publish("left", learner.version())
    assert {s.version for s in engine.sample("left", list(batch.prompts), uniforms(0, 4, 2))} == {learner.version()}


def test_snapshots_are_dropped_when_nobody_holds_them():
    members = Together(killing.team_file(*SMALL, "cluster.shards=1"))
    learner = ClusterEngine(members, shards=1).learner("left")
    kept = learner.snapshot()
    for _ in range(5):
        learner.snapshot()
    learner.restore(kept)
    assert [len(seat.kept) for seat in members.seats] == [1, 1]


# -- what is refused ------------------------------------------------------------------------------------------


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"cluster.workers needs cluster.engine: ray"):
        killing.team_file("cluster.workers=2")
    with pytest.raises(UserError, match=r"cluster.shards is 2, and 3 workers need as many"):
        killing.team_file("cluster.engine=ray", "cluster.workers=3", "cluster.shards=2")
    with pytest.raises(UserError, match=r"cluster.shard_base needs cluster.engine: ray"):
        killing.team_file("cluster.shard_base=true")
    assert killing.team_file("cluster.engine=ray", "cluster.workers=3").cluster.shards == 3
    assert killing.team_file().cluster.shards == 1


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'teamtr\[ray\]'"):
        build(killing.team_file(*WORKERS))


@pytest.mark.long
def test_objects_of_a_program_stay_in_it():
    text = killing.TEAM.replace("model: tiny", "model: 'object:0123'")
    team_file = loads(text, "objects", ("cluster.engine=ray",))
    with pytest.raises(UserError, match=r"the model of agent 'left'.*object of this program"):
        engine_of(team_file, None, team_file.sized_plan(), None)


@pytest.mark.slow
def test_where_there_is_no_room_it_is_refused_at_first_and_fewer_are_taken_later(kept):
    make = partial(_member, dump(killing.team_file(*SMALL)), True, os.getcwd(), None)
    with pytest.raises(UserError, match=r"cluster\.workers is 4, and the cluster has 3 cores"):
        start_members([Group(make, 4)], Room(shards=4))
    (members,) = start_members([Group(make, 4)], Room(shards=4, may_be_fewer=True))
    assert members.count == CORES == 3
    assert ClusterEngine(members, 4).agents == ("left", "right", "speaker")
    members.close()
    with pytest.raises(EngineLost, match="have ended"):
        members.ask({0: Call("agents")})


@pytest.mark.slow
def test_what_a_worker_refuses_is_told_as_here(tmp_path, kept):
    """A model that is not there: the same words, and no restart."""
    with pytest.raises(UserError, match="no such folder"):
        trained(tmp_path / "run", *WORKERS, f"team.model={tmp_path / 'nothing'}")
    assert not (tmp_path / "run").exists()
