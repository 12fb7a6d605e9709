"""Whatever a tracker does, the run ends with the same bits, in time, and says once what was wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import killing
import pytest

from made_run import update_record
from teamtr.config import loads
from teamtr.session import train as run
from teamtr.trackers import feed as feeding
from teamtr.trackers import following, sinks

START = {"kind": "start"}
TEAM = """
name: small
task: {name: roles}
team:
  model: tabular
  max_tokens: 2
  agents: [{name: a1, sees: blind}, {name: a2, sees: blind}]
plan: {stages: 2, problems: 4, group_size: 16, radius_nats_per_message: 0.05}
learner: {minibatches: 2, learning_rate: 0.1}
eval: {every: 1, samples: 2, problems: 4}
"""


class Quiet:
    """A tracker that takes everything."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def open(self, run: sinks.Tracked) -> str:
        return "q-1"

    def send(self, step: int, seconds: float, values: dict[str, float]) -> None:
        self.sent.append(step)

    def close(self) -> None:
        pass


class Bad(Quiet):
    """One that fails at these calls ("open", "send", "close") with this error, so often, after so many that pass."""

    def __init__(self, *where: str, error: BaseException | None = None, times: int = 10**9, after: int = 0) -> None:
        super().__init__()
        self.where, self.error, self.times, self.after = where, error or ConnectionError("no network"), times, after

    def _at(self, where: str) -> None:
        if where not in self.where or self.times <= 0:
            return
        if self.after > 0:
            self.after -= 1
            return
        self.times -= 1
        raise self.error

    def open(self, run: sinks.Tracked) -> str:
        self._at("open")
        return super().open(run)

    def send(self, step: int, seconds: float, values: dict[str, float]) -> None:
        self._at("send")
        super().send(step, seconds, values)

    def close(self) -> None:
        self._at("close")


class Hanging(Quiet):
    """One that never comes back from this call, until the test lets it go."""

    def __init__(self, where: str, gate: threading.Event) -> None:
        super().__init__()
        self.where, self.gate, self.came_back = where, gate, False

    def _at(self, where: str) -> None:
        if where == self.where:
            self.gate.wait(60)
            self.came_back = True

    def open(self, run: sinks.Tracked) -> str:
        self._at("open")
        return super().open(run)

    def send(self, step: int, seconds: float, values: dict[str, float]) -> None:
        self._at("send")
        super().send(step, seconds, values)

    def close(self) -> None:
        self._at("close")


@pytest.fixture
def gate() -> Any:
    gate = threading.Event()
    yield gate
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tracker "):
            thread.join(5)


@pytest.fixture
def soon_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is waited for when the others are through, and then not for long."""
    join = feeding.Feed.join

    def others_first(feed: feeding.Feed, deadline: float) -> None:
        if isinstance(feed._sink, Hanging):
            for thread in threading.enumerate():
                if thread.name.startswith("tracker ") and thread is not feed._thread:
                    thread.join(60)
        join(feed, deadline)

    monkeypatch.setattr(feeding.Feed, "join", others_first)
    monkeypatch.setattr(following, "CLOSE_SECONDS", 0.2)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "missing", lambda name: None)


def use(monkeypatch: pytest.MonkeyPatch, sink: Quiet, name: str = "wandb") -> Quiet:
    monkeypatch.setattr(following, "SINKS", {**following.SINKS, name: lambda: sink})
    return sink


def updates(count: int) -> list[dict[str, Any]]:
    return [update_record(k + 1, k, 0, "left") for k in range(count)]


def follow(
    folder: Path, records: Iterable[dict[str, Any]], names: tuple[str, ...] = ("wandb",)
) -> tuple[list[str], dict]:
    seen: list[dict[str, Any]] = []
    passing = (seen.append(record) or record for record in records)
    out = list(following.follow(passing, names, folder, name="x", settings={}, history=lambda: [START]))
    assert [r for r in out if r["kind"] != "tracker"] == seen
    told = [r["text"] for r in out if r["kind"] == "tracker"]
    path = folder / "trackers" / "wandb.json"
    return told, json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("where", ["open", "send"])
@pytest.mark.parametrize("error", [ConnectionError("no network"), OSError(28, "No space left"), SystemExit(1)])
def test_repeated_failures_are_told_once_counted_and_switch_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    sink = use(monkeypatch, Bad(where, error=error))
    told, state = follow(tmp_path, [START, *updates(20)])
    assert [text.startswith("tracker wandb failed: ") for text in told] == [True, False, False]
    assert type(error).__name__ in told[0]
    assert "switched off" in told[1]
    assert told[2] == "tracker wandb: failures 3, records left out 20"
    assert (state["failures"], state["dropped"], state["delivered"]) == (3, 20, {})
    assert sink.sent == []


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_passing_failure_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Also not that of the last record: it is tried once more before the tracker is closed."""
    sink = use(monkeypatch, Bad("send", times=1, after=at - 1))
    told, state = follow(tmp_path, [START, *updates(6)])
    assert sink.sent == [1, 2, 3, 4, 5, 6]
    assert len(told) == 2
    assert (state["failures"], state["dropped"], state["delivered"]) == (1, 0, {"update": 6})


def test_a_command_that_ends_in_failures_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record once and in order, over both: nothing after a gap was taken."""
    records = [START, *updates(9)]
    first = use(monkeypatch, Bad("send", times=3, after=2))
    _, state = follow(tmp_path, records[:7])
    assert first.sent == [1, 2]
    assert (state["delivered"], state["dropped"]) == ({"update": 2}, 4)
    second = use(monkeypatch, Quiet())
    out = following.follow(
        iter([{"kind": "resume"}, *records[7:]]),
        ["wandb"],
        tmp_path,
        name="x",
        settings={},
        history=lambda: records[:7],
    )
    assert not [r for r in out if r["kind"] == "tracker"]
    assert second.sent == [3, 4, 5, 6, 7, 8, 9]


def test_what_found_the_queue_full_is_sent_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(feeding, "MOST_WAITING", 3)
    first = use(monkeypatch, Hanging("send", gate))
    records = [START, *updates(12)]

    def freed() -> Any:
        yield from records[:9]
        gate.set()
        time.sleep(0.2)  # the queue is empty again: what comes now must not be taken over the heads of the dropped
        yield from records[9:]

    told = [
        r["text"]
        for r in following.follow(freed(), ["wandb"], tmp_path, name="x", settings={}, history=lambda: [START])
        if r["kind"] == "tracker"
    ]
    assert 3 <= len(first.sent) <= 5
    assert first.sent == list(range(1, len(first.sent) + 1))
    assert told[-1] == f"tracker wandb: failures 0, records left out {12 - len(first.sent)}"
    second = use(monkeypatch, Quiet())
    list(
        following.follow(
            iter([{"kind": "resume"}]), ["wandb"], tmp_path, name="x", settings={}, history=lambda: records
        )
    )
    assert first.sent + second.sent == list(range(1, 13))


def test_a_log_that_cannot_be_read_back_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent: it would be taken for all that was."""
    sink, asked, records = use(monkeypatch, Quiet()), [], [{"kind": "resume"}, *updates(3)]

    def history() -> Any:
        asked.append(True)
        raise OSError(5, "Input/output error\x1b[2J")

    out = list(following.follow(iter(records), ["wandb"], tmp_path, name="x", settings={}, history=history))
    assert [r for r in out if r["kind"] != "tracker"] == records
    (told,) = [r["text"] for r in out if r["kind"] == "tracker"]
    assert told.startswith(
        "tracker wandb: the log could not be read back (OSError: [Errno 5] Input/output error⟨U+001B⟩"
    )
    assert (sink.sent, len(asked)) == ([], 1)


def test_what_a_tracker_says_cannot_write_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Bad("send", error=RuntimeError("a\x1b[2Jb\u202ec\r\nd"), times=1))
    told, state = follow(tmp_path, [START, *updates(2)])
    assert told[0] == "tracker wandb failed: RuntimeError: a⟨U+001B⟩[2Jb⟨U+202E⟩c d. Training continues"
    assert "⟨U+202E⟩" in state["problem"]


def test_a_failure_to_close_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = use(monkeypatch, Bad("close"))
    told, state = follow(tmp_path, [START, *updates(2)])
    assert sink.sent == [1, 2]
    assert "ConnectionError: no network" in told[0]
    assert state["failures"] == 1


def test_a_package_that_is_not_there_is_told_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "missing", lambda name: f"{name} is not installed: pip install 'teamtr[{name}]'")
    told, state = follow(tmp_path, [START, *updates(5)])
    assert told[0].startswith("tracker wandb failed: wandb is not installed: pip install 'teamtr[wandb]'")
    assert (state["failures"], state["dropped"]) == (1, 5), "switched off at once: trying again is of no use"


@pytest.mark.long
@pytest.mark.parametrize("where", ["send", *(pytest.param(w, marks=pytest.mark.slow) for w in ("open", "close"))])
def test_one_that_hangs_neither_blocks_nor_keeps_the_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, soon_left_alone: None, where: str
) -> None:
    """Not the other trackers either, which get all the time there is."""
    monkeypatch.setattr(feeding, "MOST_WAITING", 10)
    hanging = use(monkeypatch, Hanging(where, gate))
    other = use(monkeypatch, Quiet(), "mlflow")
    told, _ = follow(tmp_path, [START, *updates(100)], ("wandb", "mlflow"))
    assert not hanging.came_back, "nobody waited for it"
    assert "tracker wandb did not close in time and is left alone; the log has everything" in told
    if where != "close":
        slow = "tracker wandb is too slow: records are left out of it from here on (the log has them)"
        assert told.count(slow) == 1
    hung = [thread for thread in threading.enumerate() if thread.name == "tracker wandb"]
    assert [thread.daemon for thread in hung] == [True], "it must not keep the process from ending"
    assert other.sent[0] == 1
    assert not any("mlflow" in text and "close" in text for text in told)


def test_a_machine_without_threads_to_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    use(monkeypatch, Quiet())
    monkeypatch.setattr(threading.Thread, "start", start)
    told, _ = follow(tmp_path, [START, *updates(3)])
    assert "can't start new thread" in told[0]
    assert told[-1] == "tracker wandb: failures 1, records left out 3"


def test_a_slow_one_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "MOST_WAITING", 5)
    sink = use(monkeypatch, Quiet())
    send, allowed = sink.send, threading.Semaphore(0)
    sink.send = lambda *a: (allowed.acquire(), send(*a))

    def told_while_it_takes_one_record_in_five() -> Any:
        for number, record in enumerate([START, *updates(50)]):
            yield record
            if number % 5 == 0:
                allowed.release()
        allowed.release(50)

    told, state = follow(tmp_path, told_while_it_takes_one_record_in_five())
    assert 5 <= len(sink.sent) < 50
    assert state["dropped"] == 50 - len(sink.sent)
    assert told[-1] == f"tracker wandb: failures 0, records left out {state['dropped']}"


def test_trackers_close_when_the_run_dies_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = use(monkeypatch, Quiet())
    closed = []
    sink.close = lambda: closed.append(True)

    def records() -> Any:
        yield START
        yield from updates(2)
        raise RuntimeError("the run itself")

    with pytest.raises(RuntimeError, match="the run itself"):
        list(following.follow(records(), ["wandb"], tmp_path, name="x", settings={}, history=lambda: [START]))
    assert (sink.sent, closed) == ([1, 2], [True])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1",
        b"[]",
        b'{"id": 3}',
        b'{"id": "a", "delivered": {"update": "x"}}',
        b'{"id": "a", "delivered": {"update": 1e999}}',
        b"[" * 100_000,
        b"\xff",
    ],
    ids=lambda text: repr(text[:40]),
)
def test_a_damaged_state_is_a_fresh_one(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "wandb.json").write_bytes(text)
    assert feeding.State.read(tmp_path / "wandb.json") == feeding.State()


@pytest.mark.long
def test_the_same_bits_with_trackers_good_and_bad_and_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, request: pytest.FixtureRequest
) -> None:
    """Also: a resumed run may change its trackers, and one that went on has every update once."""
    for _ in run.train(loads(TEAM), tmp_path / "without"):
        pass
    good = use(monkeypatch, Quiet(), "tensorboard")
    use(monkeypatch, Bad("send"), "wandb")
    use(monkeypatch, Hanging("send", gate), "mlflow")
    stopped = loads(TEAM, overrides=["trackers=[tensorboard, wandb]"])
    seen = 0

    def stop() -> bool:
        return seen >= 2

    for record in run.train(stopped, tmp_path / "with", stop=stop):
        seen += record["kind"] == "update"
    request.getfixturevalue("soon_left_alone")
    for _ in run.train(loads(TEAM, overrides=["trackers=[mlflow, tensorboard]"]), tmp_path / "with"):
        pass
    without, tracked = killing.result(tmp_path / "without"), killing.result(tmp_path / "with")
    for part in ("agents", "files", "records", "episodes", "tokens"):
        assert tracked[part] == without[part], part
    assert sum(r.get("outcome") == "accepted" for r in without["records"]) >= 2, "too little happens to prove anything"
    steps = [r.get("update", r.get("updates")) for r in without["records"] if r["kind"] in ("update", "eval", "stage")]
    assert good.sent == steps, "each record once and in order, over both commands"
