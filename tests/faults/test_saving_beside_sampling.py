"""An update is saved while the next batch of its stage is sampled: all is as if it were saved first, whatever fails and
whenever the run is killed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import killing
import pytest
from safetensors import SafetensorError

from forked import CONTEXT, LONG
from teamtr.engines import saving
from teamtr.engines.learner import PolicyLearner
from teamtr.session import beside
from teamtr.session.beside import work_beside
from teamtr.session.driver import Driver
from teamtr.session.rollouts import StageRollouts
from teamtr.session.train import train
from teamtr.store import Checkpoints, RunFolder, StoreError, checkpoint
from teamtr.store.log import RunLog

TABLES = ("team.model=tabular", "plan.stages=2", "eval.every=2")
FULL = "Error while serializing: I/O error: No space left on device (os error 28)"
PATIENCE_S = 60.0
"""For what another thread does at once, unless it never does."""

Events = list[tuple[str, int]]


def in_thread() -> bool:
    return threading.current_thread() is not threading.main_thread()


def nothing_runs() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "saving"]


def saved_beside(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of every commit that is made from now on its number, and whether another thread makes it."""
    found: list[tuple[int, bool]] = []
    commit = Checkpoints.commit

    def told(self: Checkpoints, number: int, *arguments: Any) -> Any:
        found.append((number, in_thread()))
        return commit(self, number, *arguments)

    monkeypatch.setattr(Checkpoints, "commit", told)
    return found


def around(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, before: Any = None, after: Any = None) -> None:
    """Call these with the arguments of a method, before and after it."""
    method = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments)
        found = method(self, *arguments, **options)
        if after is not None:
            after(*arguments)
        return found

    monkeypatch.setattr(owner, name, wrapped)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    list(train(killing.team_file(*TABLES), folder))
    found = killing.result(folder)
    assert [record["kind"] for record in found["records"]].count("update") == 6
    return found


def assert_same(folder: Path, expected: dict[str, Any]) -> None:
    found = killing.result(folder)
    for key, value in expected.items():
        assert found[key] == value, key


def finish(folder: Path, expected: dict[str, Any]) -> None:
    """Go on to the end, undisturbed."""
    list(train(killing.team_file(*TABLES), folder))
    assert_same(folder, expected)


# -- the same, at another time -----------------------------------------------------------------------------


def save_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyLearner, "set_aside", lambda self: None)


@pytest.mark.long
def test_a_run_that_saves_first_ends_the_same(
    undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = saved_beside(monkeypatch)
    save_first(monkeypatch)
    list(train(killing.team_file(*TABLES), tmp_path / "run"))
    assert found == [(number, False) for number in range(7)]
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ("team.train=lora", "team.lora.rank=2", "plan.stages=1", "eval.every=0"),
        pytest.param(("plan.stages=2", "eval.every=1"), marks=pytest.mark.slow),
        pytest.param(("plan.stages=2", "plan.critic=true", "plan.ratio=token"), marks=pytest.mark.slow),
        pytest.param(("plan.stages=2", "learner.score=sampler", "diagnostics.every=1"), marks=pytest.mark.slow),
    ],
    ids=["adapters", "all weights", "critics", "scores and probes"],
)
def test_and_so_do_models(
    overrides: tuple[str, ...], taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits are the same to the bit as well, but for what a clock says."""
    overrides = (*overrides, "tiny.warmup_steps=15")
    found = saved_beside(monkeypatch)
    list(train(killing.team_file(*overrides), tmp_path / "beside"))
    assert [beside for number, beside in found if number] == [True, True, False] * (len(found) // 3)
    save_first(monkeypatch)
    list(train(killing.team_file(*overrides), tmp_path / "first"))
    folders = [tmp_path / name for name in ("beside", "first")]
    one, other = (_timeless({**killing.result(f), "progress": _latest(f).progress}) for f in folders)
    assert all(one[key] == other[key] for key in one), [key for key in one if one[key] != other[key]]


def _latest(folder: Path) -> Any:
    return RunFolder.read(folder).checkpoints.latest()


def _timeless(value: Any) -> Any:
    """Without what a clock said, and what it is part of."""
    if isinstance(value, dict):
        left_out = ("seconds", "grading_seconds", "time", "log", "versions")
        return {k: _timeless(v) for k, v in value.items() if k not in left_out}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


@pytest.mark.long
def test_the_two_are_at_once_and_everything_else_is_in_its_old_order(
    undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling goes on only when the thread writes, and the thread only when something is sampled."""
    events: Events = []
    at_once = threading.Barrier(2, timeout=PATIENCE_S)  # broken where one of them does not come

    def begin_commit(number: int, *_: Any) -> None:
        if in_thread():
            at_once.wait()

    def begin_sampling(team: Any, step: int, worn: Any) -> None:
        if step:
            at_once.wait()
        events.append(("sample", step))

    around(monkeypatch, Checkpoints, "commit", begin_commit, lambda number, *_: events.append(("commit", number)))
    around(monkeypatch, StageRollouts, "gather", begin_sampling)
    around(monkeypatch, Driver, "_teach", lambda *_: events.append(("update", 0)))
    around(monkeypatch, RunLog, "write", after=lambda record: events.append(("log", getattr(record, "update", 0))))
    for record in train(killing.team_file(*TABLES), tmp_path / "run"):
        if record["kind"] == "update":
            events.append(("yield", record["update"]))
            store = RunFolder.read(tmp_path / "run")
            assert _latest(tmp_path / "run").number == record["update"], "what is yielded is a commit on disk"
            assert [r["update"] for r in store.log.read() if r["kind"] == "update"][-1] == record["update"]
            assert nothing_runs()
    assert_same(tmp_path / "run", undisturbed)
    order = [what for what, _ in events if what != "sample"]
    assert "".join(what[0] for what in order if what in ("update", "commit", "yield")) == "c" + "ucy" * 6
    for number in range(1, 7):
        places = [events.index((what, number)) for what in ("commit", "log", "yield")]
        assert places == sorted(places)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["auto", "joint", "naive_sequential"])
def test_plans_that_may_go_on_with_their_batch_save_first(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = saved_beside(monkeypatch)
    list(train(killing.team_file(*TABLES, f"plan.preset={preset}", "plan.stages=1"), tmp_path / "run"))
    assert len(found) > 3
    assert not any(beside for _, beside in found)


# -- killed ------------------------------------------------------------------------------------------------

MOMENTS = {
    "before the writing": -1,
    "in the writing": -1,
    "when the agent is written": -1,
    "when all is committed": 0,
    "in the sampling, before the writing": -1,
    "in the sampling, when all is committed": 0,
}
"""And which commit is the last that is there, counted from the update's own."""


def train_and_die(folder: str, moment: str, at: int) -> None:
    """When update ``at`` is saved. The thread begins when something is sampled, and that waits for the thread."""
    killing.torch.set_num_threads(1)
    commit, write_folder, gather, save_file = (
        Checkpoints.commit,
        checkpoint._commit,
        StageRollouts.gather,
        saving.save_file,
    )
    samples, waits, committed = threading.Event(), threading.Event(), threading.Event()

    def now(what: str) -> None:
        if what == moment and samples.is_set():
            killing._die()

    def commit_it(self: Checkpoints, number: int, *arguments: Any) -> Any:
        if number != at:
            return commit(self, number, *arguments)
        assert in_thread()
        assert samples.wait(PATIENCE_S)
        now("before the writing")
        if moment == "in the sampling, before the writing":
            waits.set()
            threading.Event().wait(PATIENCE_S)
        found = commit(self, number, *arguments)
        now("when all is committed")
        committed.set()
        return found

    def write_it(final: Path, fill: Any) -> str:
        found = write_folder(final, fill)
        now("when the agent is written")
        return found

    def save_it(tensors: Any, path: Path) -> None:
        now("in the writing")
        save_file(tensors, path)

    def gather_it(self: StageRollouts, team: Any, step: int, worn: Any) -> Any:
        if 3 * self.stage + step == at:
            samples.set()
            for_whom = {
                "in the sampling, before the writing": waits,
                "in the sampling, when all is committed": committed,
            }
            assert for_whom.get(moment, threading.Event()).wait(PATIENCE_S)
            killing._die()
        return gather(self, team, step, worn)

    Checkpoints.commit, checkpoint._commit = commit_it, write_it  # type: ignore[method-assign,assignment]
    StageRollouts.gather, saving.save_file = gather_it, save_it  # type: ignore[method-assign,assignment]
    list(train(killing.team_file(*TABLES), folder))


@pytest.mark.long
@pytest.mark.parametrize(
    ("moments", "updates"),
    [
        (("in the writing", "in the sampling, when all is committed"), (1, 1)),
        pytest.param(tuple(MOMENTS), (1, 1, 2, 2, 4, 4), marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_killed_while_it_is_written(
    moments: tuple[str, ...], updates: tuple[int, ...], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for moment, number in zip(moments, updates, strict=True):
        process = CONTEXT.Process(target=train_and_die, args=(str(folder), moment, number))
        process.start()
        process.join(LONG)
        assert process.exitcode == -signal.SIGKILL, (moment, number)
        assert _latest(folder).number == number + MOMENTS[moment], moment
    finish(folder, undisturbed)


# -- errors ------------------------------------------------------------------------------------------------


def updates_until(error: type[BaseException], folder: Path, **options: Any) -> tuple[list[int], BaseException]:
    """The updates that were yielded before it was raised, and the error."""
    seen: list[int] = []
    with pytest.raises(error) as raised:
        seen.extend(r["update"] for r in train(killing.team_file(*TABLES), folder, **options) if r["kind"] == "update")
    assert nothing_runs()
    assert not list(folder.rglob(".tmp-*"))
    return seen, raised.value


def logged(folder: Path) -> list[int]:
    return [record["update"] for record in RunFolder.read(folder).log.read() if record["kind"] == "update"]


@pytest.mark.long
def test_a_disk_that_is_full_beside_the_sampling_is_told_as_ever(
    undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file, calls = saving.save_file, []

    def until_full(tensors: Any, path: Path) -> None:
        calls.append(in_thread())
        if len(calls) > 4:  # three agents of the beginning, and the first update
            raise SafetensorError(FULL)
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_file", until_full)
        seen, error = updates_until(StoreError, tmp_path / "run")
    assert calls == [False] * 3 + [True] * 2
    assert seen == logged(tmp_path / "run") == [1]
    assert "No space left on device. What was saved before is intact: make room" in str(error)
    assert _latest(tmp_path / "run").number == 1
    finish(tmp_path / "run", undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "yielded"), [(RuntimeError, [1]), pytest.param(KeyboardInterrupt, [], marks=pytest.mark.slow)]
)
def test_sampling_that_fails_takes_no_update_with_it(
    error: type[BaseException],
    yielded: list[int],
    undisturbed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update is committed and logged. Its record is yielded before an error is raised, as if it had been sampled
    later; who interrupts waits for nobody else."""
    writes = threading.Event()

    def fail(team: Any, step: int, worn: Any) -> None:
        if step == 1:
            assert writes.wait(PATIENCE_S)
            raise error("of the sampler")

    with monkeypatch.context() as patch:
        around(patch, StageRollouts, "gather", fail)
        around(patch, Checkpoints, "commit", lambda number, *_: writes.set() if in_thread() else None)
        seen, raised = updates_until(error, tmp_path / "run")
    assert seen == yielded
    assert "of the sampler" in str(raised)
    assert logged(tmp_path / "run") == [1]
    assert _latest(tmp_path / "run").number == 1
    finish(tmp_path / "run", undisturbed)


def test_where_both_fail_the_writing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes first where nothing is done beside it."""

    def fail(team: Any, step: int, worn: Any) -> None:
        if step == 1:
            raise RuntimeError("of the sampler")

    def refuse(number: int, *_: Any) -> None:
        if in_thread():
            raise StoreError("of the store")

    around(monkeypatch, StageRollouts, "gather", fail)
    around(monkeypatch, Checkpoints, "commit", refuse)
    seen, raised = updates_until(StoreError, tmp_path / "run")
    assert (seen, logged(tmp_path / "run"), str(raised)) == ([], [], "of the store")


@pytest.mark.long
@pytest.mark.parametrize("when", ["update", pytest.param("sampling", marks=pytest.mark.slow)])
def test_who_asks_to_stop_gets_the_update_and_no_other(
    when: str, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sampled = threading.Event(), []

    def gathering(team: Any, step: int, worn: Any) -> None:
        sampled.append(step)
        if step == 1 and when == "sampling":
            asked.set()

    with monkeypatch.context() as patch:
        around(patch, StageRollouts, "gather", gathering)
        around(patch, Driver, "_teach", lambda *_: asked.set() if when == "update" else None)
        records = list(train(killing.team_file(*TABLES), tmp_path / "run", stop=asked.is_set))
    assert [record["kind"] for record in records] == ["start", "eval", "update", "stopped"]
    assert sampled == ([0] if when == "update" else [0, 1]), "nothing is sampled for somebody who has asked to stop"
    assert _latest(tmp_path / "run").number == 1
    finish(tmp_path / "run", undisturbed)


# -- the thread itself -------------------------------------------------------------------------------------


@contextmanager
def interrupts_tell(struck: threading.Event) -> Iterator[None]:
    def interrupted(*_: Any) -> None:
        struck.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def nothing() -> None:
    """Meanwhile."""


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def wait_until_main_waits() -> None:
    main, until = threading.main_thread().ident or 0, time.monotonic() + PATIENCE_S
    while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
        assert time.monotonic() < until, "nobody waits"
        time.sleep(0.001)


def test_a_thread_that_begins_late_does_the_work_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the main thread an interrupt would end it."""
    run, meanwhile_over = beside._Job.run, threading.Event()

    def late(job: Any) -> None:
        if in_thread():
            assert meanwhile_over.wait(PATIENCE_S)
            job.over.wait(0.1)  # nobody else does it
        run(job)

    monkeypatch.setattr(beside._Job, "run", late)
    assert work_beside(in_thread, meanwhile_over.set, "saving").found


def test_ctrl_c_while_the_writing_is_waited_for_ends_neither_early() -> None:
    """A real one, twice, from within the work, and each time while it is waited for."""
    struck = threading.Event()

    def work() -> int:
        for _ in range(2):
            wait_until_main_waits()
            struck.clear()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert struck.wait(PATIENCE_S)
        return 7

    with interrupts_tell(struck):
        done = work_beside(work, nothing, "saving")
    assert done.found == 7
    assert isinstance(done.raised, KeyboardInterrupt)
    assert nothing_runs()


def test_ctrl_c_before_the_thread_has_begun_leaves_no_work_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: raising(KeyboardInterrupt())())
    done = work_beside(lambda: 7, nothing, "saving")
    assert done.found == 7
    assert isinstance(done.raised, KeyboardInterrupt)


def test_what_the_work_raises_is_raised_and_what_came_meanwhile_is_told() -> None:
    with pytest.raises(StoreError, match="full"):
        work_beside(raising(StoreError("full")), nothing, "saving")
    with pytest.raises(StoreError, match="full"):
        work_beside(raising(StoreError("full")), raising(ValueError("meanwhile")), "saving")
    done = work_beside(lambda: 7, raising(ValueError("meanwhile")), "saving")
    assert (done.found, str(done.raised)) == (7, "meanwhile")
    assert nothing_runs()
