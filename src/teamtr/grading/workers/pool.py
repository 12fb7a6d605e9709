"""Workers that can be killed, and the search for the one item that killed them.

A thread or a future cannot stop a pattern that backtracks for ever or a power tower: only the death of a process
can. So each worker is a process with its own process group and a limit of processor time, spoken to over a socket under
a deadline that is ten times as long: a busy machine makes no honest grader late. When it is late, dies, says too much
or says anything but one answer to the request at hand, it is killed with everything it started, and replaced by a fork
of a process that has everything loaded (``forkserver.py``).

    with WorkerPool(seconds_per_item=2.0) as pool:
        pool.submit("regex", [{"text": "#### 7"}], {"pattern": r"#### (\\d+)"})    # [Result("ok", "7")]

This is a fence against accidents, not a sandbox: a grader runs with the rights of the user, unless the pool is given a
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
"""A grader is late by the clock after so many times its processor time."""
SECONDS_TO_REAP = 10.0  # a killed process is gone at once, unless the machine is in great trouble


@dataclass(frozen=True)
class Result:
    """What became of one item. ``value`` is the grader's when ``ok``; ``message`` says what went wrong otherwise."""

    kind: Literal["ok", "timeout", "crash"]
    value: Any = None
    message: str = ""


_FOREIGN = Result(
    "crash", message="the grader wrote to the worker's own channel: bytes that are no answer, or an answer too many"
)


@dataclass(frozen=True)
class _Attempt:
    """One call: the values that came, what stopped it if not all did, whether they came one by one, whether it was
    spoilt in a worker that had already graded something else, whether the number of values was wrong, and what was
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
    """One process and the parent's end of its channel. Forked anew by itself when used after ``kill``."""

    def __init__(self, forkserver: ForkServer) -> None:
        self._forkserver = forkserver
        self._process: Child | None = None
        self.loaded: str | None = None

    def answers(self, content: Mapping[str, Any], to_ask: float, per_frame: float) -> Iterator[dict[str, Any]]:
        """Ask, within so many seconds, and hand on every frame of the answer; each may take ``per_frame`` seconds."""
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
        """End a worker that has said something since its last answer, or has died."""
        if self._process is not None and self._process.channel.has_more():
            self.kill()

    def kill(self) -> int | None:
        """End the process and all it started. Returns its exit status, negative for a signal."""
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
        workers: processes; items are shared out among them in contiguous runs.
        seconds_per_item: the processor time one item may take; on the clock it may take ``PATIENCE`` times that, which
            is for graders that wait and do not compute. A grader that answers for a whole list at once has that same
            time for the list; when it is not enough the list is halved, so that one endless item among n costs
            log2(n) + 1 times this, and an honest but slow grader at most about twice its own time.
        seconds_to_load: the time a grader may take to load (imports included).
        memory_bytes: address space of a worker, None for no limit; enforced on Linux. A grader that imports a
            GPU library reserves far more than it uses: give it None.
        output_bytes: the longest answer that a worker may send at once.
        show_output: let what graders print reach stderr at once.
        printed: otherwise told of what they print with Python's own means, call by call; nobody by default. What a
            program that they start prints, and what one that is killed had printed, is thrown away.
        preload: modules that every worker has from birth. Only ours or a library's that start no threads: they are
            imported once, and what has imported them is forked.
        container: what all of it runs in; None for none.
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
        """Check that this grader loads; raises GraderError with its own words if it does not."""
        with self._use():
            self._tell(self._load(self._workers[0], function, setup or {}))

    def submit(
        self, function: str, items: Sequence[Mapping[str, Any]], setup: Mapping[str, Any] | None = None
    ) -> list[Result]:
        """One result per item, in order; an item that is late, raises or kills the worker spoils no other.

        ``function`` names a factory of ``worker.py``, or ``package.module:factory``; ``factory(**setup)`` gives the
        grader. Items and setup must be JSON. A grader that cannot be loaded, or that answers for another number of
        items than it is given though each alone is fine, raises GraderError.
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
                # An earlier item may have left something behind: judge this one afresh, and alone.
                pending += [part for part in (left[1:], left[:1]) if part]
            else:
                results.append(attempt.failure)
                printed += attempt.printed  # what a call prints that is made again counts once
                if len(left) > 1:
                    pending.append(left[1:])
        if miscounted and all(result.kind == "ok" for result in results):
            # With each item alone the number was right by luck: no item is to blame, and the values mean nothing.
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
            # The kernel's alarm comes after our own deadline: it is for the case that we are gone.
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
            # Of items that are answered one by one the last that was may have spoken twice: its value does not count.
            alone = len(items) == 1 or not streams
            return _Attempt(values[:-1] if streams else [], _FOREIGN, streams, inherited=not (fresh and alone))
        except TooMuchError:
            worker.kill()
            much = f"an answer of more than {self._output_bytes} bytes, or bytes that are no answer"
            return _Attempt(values, Result("crash", message=much), streams)
        except BaseException:
            worker.kill()  # an interrupt has left a reply on its way; the next call must not read it
            raise
        return _Attempt(values, None, streams, printed=printed)

    def _load(self, worker: _Worker, function: str, setup: Mapping[str, Any]) -> str:
        """Returns what was printed on the way."""
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
    """Contiguous runs whose lengths differ by one at most."""
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
