"""A pool of workers that can be killed, and the search for the one item that made a worker fail.

A thread or a future cannot stop a pattern that backtracks forever or a power tower: only killing a process can. So each
worker is a process with its own process group and a limit of processor time. It answers over a socket with a deadline
that is ten times as long, so that a busy machine does not make an honest grader late. A worker that is late, dies,
sends too much, or sends anything but one answer to the current request is killed with everything it started, and
replaced by a fork of a process that has everything loaded (``forkserver.py``).

    with WorkerPool(seconds_per_item=2.0) as pool:
        pool.submit("regex", [{"text": "#### 7"}], {"pattern": r"#### (\\d+)"})    # [Result("ok", "7")]

This protects against accidents and is not a sandbox: a grader runs with the user's rights, unless the pool is given a
container (``container.py``).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from teamtr.grading.workers.channel import DeadError, GarbledError, LateError, TooMuchError
from teamtr.grading.workers.container import Container
from teamtr.grading.workers.forkserver import Child, ForeignError, ForkServer, GraderError
from teamtr.grading.workers.lifetime import Owner

MIB = 1 << 20
GIB = 1 << 30
PATIENCE = 10
"""The wall-clock limit of a grader, as a multiple of its processor time."""
SECONDS_TO_REAP = 10.0  # a killed process is normally gone at once


@dataclass(frozen=True)
class Result:
    """The result of one item. ``value`` is the grader's if ``ok``; otherwise ``message`` says what went wrong."""

    kind: Literal["ok", "timeout", "crash"]
    value: Any = None
    message: str = ""


_FOREIGN = Result(
    "crash", message="the grader wrote to the worker's own channel: bytes that are no answer, or an answer too many"
)


@dataclass(frozen=True)
class _Attempt:
    """One call: the values received, the failure if some are missing, whether values came one by one, whether the
    failure may be due to something that the worker graded before, whether the number of values was wrong, and what was
    printed."""

    values: list[Any]
    failure: Result | None
    streams: bool
    inherited: bool = False
    miscounted: bool = False
    printed: str = ""


@dataclass(frozen=True)
class _Graded:
    results: list[Result]
    printed: str


class _Worker:
    """One process and the parent's end of its channel. Forked again automatically when used after ``kill``."""

    def __init__(self, forkserver: ForkServer) -> None:
        self._forkserver = forkserver
        self._process: Child | None = None
        self.loaded: str | None = None

    def answers(self, content: Mapping[str, Any], to_ask: float, per_frame: float) -> Iterator[dict[str, Any]]:
        """Send a request within ``to_ask`` seconds, and yield the frames of the answer; each may take ``per_frame``
        seconds."""
        deadline = time.monotonic() + to_ask
        if self._process is None:
            self._process = self._forkserver.fork(deadline)
        self._process.ask(content, deadline)
        while True:
            said = self._process.hear(time.monotonic() + per_frame)
            yield said
            if "last" in said:
                return

    def drop_if_unasked(self) -> None:
        """Kill a worker that has sent something since its last answer, or has died."""
        if self._process is not None and self._process.channel.has_more():
            self.kill()

    def kill(self) -> int | None:
        """Kill the process and everything it started. Returns its exit status, negative for a signal, or None if
        unknown."""
        process, self._process = self._process, None
        self.loaded = None
        if process is None:
            return None
        try:
            return self._forkserver.end(process.pid, time.monotonic() + SECONDS_TO_REAP)
        finally:
            process.channel.close()


class WorkerPool(Owner):
    """Grades items in processes that can be killed.

    Args:
        workers: number of processes; items are divided among them in contiguous parts.
        seconds_per_item: the limit of processor time for one item; the wall-clock limit is ``PATIENCE`` times that, for
            graders that wait rather than compute. A grader that answers for a whole list at once has the same time for
            the list. If that is not enough, the list is halved, so that one endless item among n costs log2(n) + 1
            times this, and an honest but slow grader at most about twice its own time.
        seconds_to_load: the time a grader may take to load (imports included).
        memory_bytes: address space of a worker, None for no limit; enforced on Linux. A grader that imports a
            GPU library reserves far more than it uses: give it None.
        output_bytes: the longest answer that a worker may send at once.
        show_output: show what graders print on stderr at once.
        printed: otherwise called with what graders print through Python's own streams, call by call; a no-op by
            default. Output of programs that they start, and of a grader that is killed, is discarded.
        preload: modules that every worker has from its start. Only our own, or those of libraries that start no
            threads: they are imported once, and the process that imported them is forked.
        container: the container that all processes run in; None for none.
    """

    def __init__(
        self,
        workers: int = 1,
        seconds_per_item: float = 5.0,
        *,
        seconds_to_load: float = 60.0,
        memory_bytes: int | None = 4 * GIB,
        output_bytes: int = 256 * MIB,
        show_output: bool = False,
        printed: Callable[[str], None] = lambda text: None,
        preload: Sequence[str] = (),
        container: Container | None = None,
    ) -> None:
        if workers < 1 or not seconds_per_item > 0 or not seconds_to_load > 0:
            raise ValueError(
                f"a pool needs at least one worker and positive times, got workers={workers}, "
                f"seconds_per_item={seconds_per_item}, seconds_to_load={seconds_to_load}"
            )
        self._seconds_per_item = seconds_per_item
        self._seconds_to_load = seconds_to_load
        self._output_bytes = output_bytes
        self._heard = printed
        hello = {
            "sys_path": sys.path[:] if container is None else container.module_path(),
            "memory_bytes": memory_bytes,
            "show_output": show_output,
            "preload": list(preload),
        }
        self._forkserver = ForkServer(hello, output_bytes, container)
        self._workers = tuple(_Worker(self._forkserver) for _ in range(workers))
        super().__init__(partial(_kill_all, self._workers, self._forkserver))

    def load(self, function: str, setup: Mapping[str, Any] | None = None) -> None:
        """Check that this grader loads; raises GraderError with its error message if it does not."""
        with self._use():
            self._tell(self._load(self._workers[0], function, setup or {}))

    def submit(
        self, function: str, items: Sequence[Mapping[str, Any]], setup: Mapping[str, Any] | None = None
    ) -> list[Result]:
        """One result per item, in order; an item that is late, raises or kills the worker does not affect others.

        ``function`` names a factory of ``worker.py``, or ``package.module:factory``; ``factory(**setup)`` makes the
        grader. Items and setup must be JSON. Raises GraderError if the grader cannot be loaded, or if it returns a
        wrong number of values for several items although each alone is fine.
        """
        with self._use():
            runs = [part for part in _share(list(items), len(self._workers)) if part]
            if len(runs) <= 1:
                graded = [self._grade(self._workers[0], function, part, setup or {}) for part in runs]
            else:
                with ThreadPoolExecutor(len(runs)) as threads:
                    graded = list(
                        threads.map(
                            lambda worker, part: self._grade(worker, function, part, setup or {}), self._workers, runs
                        )
                    )
            self._tell("".join(part.printed for part in graded))
            return [result for part in graded for result in part.results]

    def _tell(self, printed: str) -> None:
        if printed:
            self._heard(printed)

    def _grade(
        self, worker: _Worker, function: str, items: list[Mapping[str, Any]], setup: Mapping[str, Any]
    ) -> _Graded:
        results: list[Result] = []
        printed = ""
        miscounted = ""
        pending = [items]
        while pending:
            part = pending.pop()
            attempt = self._attempt(worker, function, part, setup)
            results += [Result("ok", value) for value in attempt.values]
            if attempt.failure is None:
                printed += attempt.printed
                continue
            if attempt.miscounted and not miscounted:
                miscounted = attempt.failure.message
            left = part[len(attempt.values) :]
            if len(left) > 1 and not attempt.streams:
                middle = len(left) // 2
                pending += [left[middle:], left[:middle]]
            elif attempt.inherited:
                # An earlier item may have left something behind: grade this one again, alone in a new worker.
                pending += [part for part in (left[1:], left[:1]) if part]
            else:
                results.append(attempt.failure)
                printed += attempt.printed  # output of a repeated call counts once
                if len(left) > 1:
                    pending.append(left[1:])
        if miscounted and all(result.kind == "ok" for result in results):
            # Alone, each item got one value by chance: no item is at fault, and the values mean nothing.
            raise GraderError(f"{miscounted}: it must return one for each of them, in their order")
        return _Graded(results, printed)

    def _attempt(
        self, worker: _Worker, function: str, items: list[Mapping[str, Any]], setup: Mapping[str, Any]
    ) -> _Attempt:
        worker.drop_if_unasked()
        fresh = worker.loaded is None
        printed = self._load(worker, function, setup)
        values: list[Any] = []
        streams = False
        try:
            # The kernel's alarm fires after our own deadline: it is for the case that this process is gone.
            by_clock = PATIENCE * self._seconds_per_item
            call = {"call": items, "processor_s": self._seconds_per_item, "alarm_s": by_clock + 1}
            for said in worker.answers(call, self._seconds_to_load, by_clock):
                printed += said.get("printed", "")
                if "error" in said:
                    failure = Result("crash", message=said["error"])
                    return _Attempt(values, failure, streams, miscounted=said["miscounted"], printed=printed)
                streams = streams or "streams" in said
                values += said.get("values", [])
            if len(values) != len(items):
                raise ForeignError
        except LateError:
            worker.kill()
            return _Attempt(values, Result("timeout", message=f"no answer within {by_clock:g} s"), streams)
        except GarbledError as error:
            worker.kill()
            return _Attempt(values, Result("crash", message=str(error)), streams)
        except DeadError:
            status = worker.kill()
            if status == -signal.SIGPROF:
                used_up = f"no answer within {self._seconds_per_item:g} s of processor time"
                return _Attempt(values, Result("timeout", message=used_up), streams)
            dead = Result("crash", message=_obituary(status))
            return _Attempt(values, dead, streams, inherited=bool(values) or not fresh)
        except ForeignError:
            worker.kill()
            # If items are answered one by one, the last one may have sent the extra frame: its value does not count.
            alone = len(items) == 1 or not streams
            return _Attempt(values[:-1] if streams else [], _FOREIGN, streams, inherited=not (fresh and alone))
        except TooMuchError:
            worker.kill()
            much = f"an answer of more than {self._output_bytes} bytes, or bytes that are no answer"
            return _Attempt(values, Result("crash", message=much), streams)
        except BaseException:
            worker.kill()  # an interrupt leaves a reply in the channel, which the next call must not read
            raise
        return _Attempt(values, None, streams, printed=printed)

    def _load(self, worker: _Worker, function: str, setup: Mapping[str, Any]) -> str:
        """Load a grader, unless it is loaded; returns what was printed."""
        key = json.dumps([function, setup], sort_keys=True)
        if worker.loaded == key:
            return ""
        named = f"grader {function!r} with {dict(setup)}"
        try:
            load = {"load": function, "setup": setup}
            (said,) = worker.answers(load, self._seconds_to_load, self._seconds_to_load)
        except LateError:
            worker.kill()
            raise GraderError(
                f"{named} did not load within {self._seconds_to_load:g} s: see what it does at import, or raise "
                "seconds_to_load"
            ) from None
        except DeadError:
            raise GraderError(f"{named}: {_obituary(worker.kill())} on loading") from None
        except (ForeignError, TooMuchError):
            worker.kill()
            raise GraderError(f"{named}: {_FOREIGN.message} on loading") from None
        except BaseException:
            worker.kill()
            raise
        if "error" in said:
            raise GraderError(f"{named} did not load: {said['error']}")
        worker.loaded = key
        return str(said.get("printed", ""))


def _share(items: list[Any], parts: int) -> list[list[Any]]:
    """Contiguous parts whose lengths differ by one at most."""
    return [items[len(items) * i // parts : len(items) * (i + 1) // parts] for i in range(parts)]


def _obituary(status: int | None) -> str:
    if status is None:
        return "the worker was lost"
    if status >= 0:
        return f"the worker exited with status {status}"
    return f"the worker was killed by signal {-status} ({signal.strsignal(-status)})"


def _kill_all(workers: Sequence[_Worker], forkserver: ForkServer) -> None:
    for worker in workers:
        worker.kill()
    forkserver.kill()
