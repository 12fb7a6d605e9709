"""Feeds one tracker from a thread of its own: the caller never waits and never gets an exception.

What a tracker holds is always a prefix of the log, each record once and in order (wandb takes no step twice and none
out of order): a record that failed is retried before the next one, and once a record had to be dropped, so is
everything after it. Hence one number per kind determines what a resumed run has to send.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

from teamtr.store import write_atomic
from teamtr.text import visible
from teamtr.trackers.conversations import conversations_of
from teamtr.trackers.metrics import Point
from teamtr.trackers.sinks import Sink, Tracked, Unusable, missing

MOST_WAITING = 1000
MOST_FAILURES = 3


@dataclass(frozen=True)
class State:
    """A tracker's state in the run folder, so that a resumed run continues where the tracker stopped.

    ``delivered`` holds the number of the last record of each kind that the tracker accepted; it has all before it.
    ``failures`` and ``dropped`` (records that were not sent to it) are counts of one command.
    """

    id: str | None = None
    delivered: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    dropped: int = 0
    problem: str | None = None

    @classmethod
    def read(cls, path: Path) -> State:
        """The stored state; a new one if there is none that can be read."""
        try:
            found = json.loads(path.read_bytes())
            delivered = {str(kind): int(number) for kind, number in found["delivered"].items()}
            return cls(None if found["id"] is None else str(found["id"]), delivered)
        except Exception:  # the file may hold anything
            return cls()

    def wants(self, point: Point) -> bool:
        return point.number > self.delivered.get(point.kind, -1)


class Feed:
    """Feeds one sink. ``news`` holds messages for the user about problems since it was last read."""

    def __init__(self, name: str, sink: Sink, run: Tracked, state: State, backlog: Sequence[Point]) -> None:
        self.name = name
        self.news: SimpleQueue[str] = SimpleQueue()
        self.state = state
        self._sink = sink
        self._run = replace(run, id=state.id)
        self._backlog = backlog
        self._waiting: SimpleQueue[Point | None] = SimpleQueue()
        self._held: deque[Point] = deque()
        self._open = False
        self._full = False
        self._off = False
        self._in_a_row = 0
        self._told_unread = False
        self._abandoned = False
        self._lock = threading.Lock()
        # A daemon thread, because a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started
            self._failed(Unusable(str(error)))

    @property
    def path(self) -> Path:
        return self._run.folder / f"{self.name}.json"

    def put(self, point: Point) -> None:
        """Queue a record without waiting. If the queue is full, the record and all later ones are dropped and
        counted."""
        if not (self._full or self._off) and self._waiting.qsize() >= MOST_WAITING:
            self._full = True
            self.news.put(
                f"tracker {self.name} is too slow: records are left out of it from here on (the log has them)"
            )
        if self._full or self._off:
            self._count(dropped=1)
        else:
            self._waiting.put(point)

    def end(self) -> None:
        """Request that queued records are delivered and the tracker is closed; does not wait."""
        self._waiting.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the tracker is closed, at most until ``deadline`` (of ``time.monotonic``)."""
        if self._thread.ident is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._abandoned = True
            self.news.put(f"tracker {self.name} did not close in time and is left alone; the log has everything")
        elif self.state.failures or self.state.dropped:
            self.news.put(f"tracker {self.name}: failures {self.state.failures}, records left out {self.state.dropped}")

    # -- in the thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        for point in self._backlog:
            self._deliver(point)
        while (taken := self._waiting.get()) is not None:
            self._deliver(taken)
        self._deliver_held()
        self._count(dropped=len(self._held))
        if self._open:
            self._guarded(self._sink.close)
        self._save()

    def _deliver(self, point: Point) -> None:
        self._held.append(point)
        self._deliver_held()

    def _deliver_held(self) -> None:
        """Deliver all held records until the first failure; the rest waits until the next record comes."""
        while self._held and not self._off and self._guarded(self._send_first):
            point = self._held.popleft()
            self._in_a_row = 0
            self._change(delivered={**self.state.delivered, point.kind: point.number})
            self._save()

    def _send_first(self) -> None:
        point = self._held[0]
        if not self._open:
            if lacking := missing(self.name):
                raise Unusable(lacking)
            self._run.folder.mkdir(parents=True, exist_ok=True)
            self._change(id=self._sink.open(self._run))
            self._open = True
        if point.kind == "stage" and self._run.filing.conversations:
            self._show(point)
        self._sink.send(point.step, point.seconds, point.values)

    def _show(self, point: Point) -> None:
        """Send a table of the stage's conversations. If they cannot be read, its numbers are sent all the same."""
        try:
            found = conversations_of(self._run.folder.parent, point.number, self._run.filing.conversations)
        except Exception as error:  # a file that is gone, damaged or of another version
            if not self._told_unread:
                self._told_unread = True
                told = visible(" ".join(str(error).split()))[:200]
                self.news.put(f"tracker {self.name} gets no conversations of stage {point.number}: {told}")
            return
        if found.rows:
            self._sink.show(point.step, found)

    def _guarded(self, act: Callable[[], object]) -> bool:
        """Whether ``act`` succeeded. SystemExit and the like count as failures, since this is not the main thread."""
        try:
            act()
        except BaseException as error:
            self._failed(error)
            return False
        return True

    def _failed(self, error: BaseException) -> None:
        self._in_a_row += 1
        told = visible(" ".join(str(error).split()))[:300] or "no message"
        problem = told if isinstance(error, Unusable) else f"{type(error).__name__}: {told}"
        if self.state.problem is None:
            self.news.put(f"tracker {self.name} failed: {problem}. Training continues")
        if not self._off and (isinstance(error, Unusable) or self._in_a_row >= MOST_FAILURES):
            self._off = True
            self.news.put(f"tracker {self.name} is switched off for the rest of this command; the log has everything")
        self._change(failures=self.state.failures + 1, problem=problem)

    def _save(self) -> None:
        if self._abandoned:
            return  # another process may have opened the run since
        try:
            write_atomic(self.path, json.dumps(asdict(self.state), indent=1).encode())
        except Exception as error:  # a full disk must not end the thread
            self._failed(error)

    # -- from both threads ------------------------------------------------------------------------------------

    def _change(self, **values: object) -> None:
        with self._lock:
            self.state = replace(self.state, **values)  # type: ignore[arg-type]

    def _count(self, *, dropped: int) -> None:
        with self._lock:
            self.state = replace(self.state, dropped=self.state.dropped + dropped)
