"""Workers that can be killed, and the search for the one item that killed them.

A thread or a future cannot stop a pattern that backtracks for ever or a power tower: only the death of a process
can. So each worker is a process with its own process group, spoken to over a socket under a
deadline; when it is late, dies or says too much it is killed with everything it started, and replaced by a fork of a
process that has everything loaded (``forkserver.py``).

    with WorkerPool(seconds_per_item=2.0) as pool:
        pool.submit("regex", [{"text": "#### 7"}], {"pattern": r"#### (\\d+)"})    # [Result("ok", "7")]

This is a fence against accidents, not a sandbox: a grader runs with the rights of the user.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from teamtr.grading.workers.channel import DeadError, GarbledError, LateError, TooMuchError
from teamtr.grading.workers.forkserver import Child, ForkServer, GraderError

MIB = 1 << 20
GIB = 1 << 30
SECONDS_TO_REAP = 10.0  # a killed process is gone at once, unless the machine is in great trouble


@dataclass(frozen=True)
class Result:
    """What became of one item. ``value`` is the grader's when ``ok``; ``message`` says what went wrong otherwise."""

    kind: Literal["ok", "timeout", "crash"]
    value: Any = None
    message: str = ""


@dataclass(frozen=True)
class _Attempt:
    """One call: the values that came, what stopped it if not all did, whether they came one by one, whether it ended
    in the death of a worker that had already graded something else, and whether the number of values was wrong."""

    values: list[Any]
    failure: Result | None
    streams: bool
    inherited_death: bool = False
    miscounted: bool = False


class _Worker:
    """One process and the parent's end of its channel. Forked anew by itself when used after ``kill``."""

    def __init__(self, forkserver: ForkServer) -> None:
        self._forkserver = forkserver
        self._process: Child | None = None
        self.loaded: str | None = None

    def send(self, content: Any, deadline: float) -> None:
        if self._process is None:
            self._process = self._forkserver.fork(deadline)
        self._process.channel.send(content, deadline)

    def receive(self, deadline: float) -> Any:
        assert self._process is not None
        return self._process.channel.receive(deadline)

    def kill(self) -> int | None:
        """End the process and all it started. Returns its exit status, negative for a signal."""
        process, self._process = self._process, None
        self.loaded = None
        if process is None:
            return None
        # Before it is reaped: until then its number cannot belong to another group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.channel.close()
        return self._forkserver.reap(process.pid, time.monotonic() + SECONDS_TO_REAP)


class WorkerPool:
    """Grades items in processes that can be killed.

    Args:
        workers: processes; items are shared out among them in contiguous runs.
        seconds_per_item: the time one item may take. A grader that answers for a whole list at once has that same
            time for the list; when it is not enough the list is halved, so that one endless item among n costs
            log2(n) + 1 times this, and an honest but slow grader at most about twice its own time.
        seconds_to_load: the time a grader may take to load (imports included).
        memory_bytes: address space of a worker, None for no limit; enforced on Linux. A grader that imports a
            GPU library reserves far more than it uses: give it None.
        output_bytes: the longest answer that a worker may send at once.
        show_output: let what graders print reach stderr; otherwise it is thrown away.
        preload: modules that every worker has from birth. Only ours or a library's that start no threads: they are
            imported once, and what has imported them is forked.
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
        preload: Sequence[str] = (),
    ) -> None:
        if workers < 1 or not seconds_per_item > 0 or not seconds_to_load > 0:
            raise ValueError(
                f"a pool needs at least one worker and positive times, got workers={workers}, "
                f"seconds_per_item={seconds_per_item}, seconds_to_load={seconds_to_load}"
            )
        self._seconds_per_item = seconds_per_item
        self._seconds_to_load = seconds_to_load
        self._output_bytes = output_bytes
        hello = {
            "sys_path": sys.path[:],
            "memory_bytes": memory_bytes,
            "show_output": show_output,
            "preload": list(preload),
        }
        self._forkserver = ForkServer(hello, output_bytes)
        self._workers = tuple(_Worker(self._forkserver) for _ in range(workers))
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _kill_all, self._workers, self._forkserver, os.getpid())  # runs at exit too

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker and whatever it started. The pool cannot be used afterwards."""
        with self._lock:
            self._end()

    def load(self, function: str, setup: Mapping[str, Any] | None = None) -> None:
        """Check that this grader loads; raises GraderError with its own words if it does not."""
        with self._use():
            self._load(self._workers[0], function, setup or {})

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
                return [r for part in runs for r in self._grade(self._workers[0], function, part, setup or {})]
            with ThreadPoolExecutor(len(runs)) as threads:
                graded = threads.map(
                    lambda worker, part: self._grade(worker, function, part, setup or {}), self._workers, runs
                )
                return [result for part in graded for result in part]

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("this WorkerPool is closed: make a new one")
            yield

    def _grade(
        self, worker: _Worker, function: str, items: list[Mapping[str, Any]], setup: Mapping[str, Any]
    ) -> list[Result]:
        results: list[Result] = []
        miscounted = ""
        pending = [items]
        while pending:
            part = pending.pop()
            attempt = self._attempt(worker, function, part, setup)
            results += [Result("ok", value) for value in attempt.values]
            if attempt.failure is None:
                continue
            if attempt.miscounted and not miscounted:
                miscounted = attempt.failure.message
            left = part[len(attempt.values) :]
            if len(left) > 1 and not attempt.streams:
                middle = len(left) // 2
                pending += [left[middle:], left[:middle]]
            elif attempt.inherited_death:
                pending.append(left)  # an earlier item may have left something behind: judge this one afresh
            else:
                results.append(attempt.failure)
                if len(left) > 1:
                    pending.append(left[1:])
        if miscounted and all(result.kind == "ok" for result in results):
            # With each item alone the number was right by luck: no item is to blame, and the values mean nothing.
            raise GraderError(f"{miscounted}: it must return one for each of them, in their order")
        return results

    def _attempt(
        self, worker: _Worker, function: str, items: list[Mapping[str, Any]], setup: Mapping[str, Any]
    ) -> _Attempt:
        fresh = worker.loaded is None
        self._load(worker, function, setup)
        values: list[Any] = []
        streams = False
        try:
            # The kernel's alarm comes long after our own deadline: it is for the case that we are gone.
            alarm_s = 2 * self._seconds_per_item + 1
            worker.send({"call": items, "alarm": alarm_s}, time.monotonic() + self._seconds_to_load)
            while len(values) < len(items):
                reply = worker.receive(time.monotonic() + self._seconds_per_item)
                if "error" in reply:
                    failure = Result("crash", message=str(reply["error"]))
                    return _Attempt(values, failure, streams, miscounted=reply.get("miscounted") is True)
                streams = streams or "streams" in reply
                values += _values(reply, most=len(items) - len(values))
        except LateError:
            worker.kill()
            late = Result("timeout", message=f"no answer within {self._seconds_per_item:g} s")
            return _Attempt(values, late, streams)
        except GarbledError as error:
            worker.kill()
            return _Attempt(values, Result("crash", message=str(error)), streams)
        except DeadError:
            dead = Result("crash", message=_obituary(worker.kill()))
            return _Attempt(values, dead, streams, inherited_death=bool(values) or not fresh)
        except TooMuchError:
            worker.kill()
            return _Attempt(
                values, Result("crash", message=f"an answer of more than {self._output_bytes} bytes"), streams
            )
        except BaseException:
            worker.kill()  # an interrupt has left a reply on its way; the next call must not read it
            raise
        return _Attempt(values, None, streams)

    def _load(self, worker: _Worker, function: str, setup: Mapping[str, Any]) -> None:
        key = json.dumps([function, setup], sort_keys=True)
        if worker.loaded == key:
            return
        deadline = time.monotonic() + self._seconds_to_load
        try:
            worker.send({"load": function, "setup": setup}, deadline)
            reply = worker.receive(deadline)
        except LateError:
            worker.kill()
            raise GraderError(
                f"grader {function!r} with {dict(setup)} did not load within {self._seconds_to_load:g} s: "
                "see what it does at import, or raise seconds_to_load"
            ) from None
        except (GarbledError, TooMuchError) as error:
            worker.kill()
            what = str(error) or "too long an answer"
            raise GraderError(f"grader {function!r} with {dict(setup)}: {what} on loading") from None
        except DeadError:
            raise GraderError(
                f"grader {function!r} with {dict(setup)}: {_obituary(worker.kill())} on loading"
            ) from None
        except BaseException:
            worker.kill()
            raise
        if "error" in reply:
            raise GraderError(f"grader {function!r} with {dict(setup)} did not load: {reply['error']}")
        worker.loaded = key


def _share(items: list[Any], parts: int) -> list[list[Any]]:
    """Contiguous runs whose lengths differ by one at most."""
    return [items[len(items) * i // parts : len(items) * (i + 1) // parts] for i in range(parts)]


def _values(reply: Mapping[str, Any], most: int) -> list[Any]:
    """The values in an answer of a worker; GarbledError where it answers for more than it was asked."""
    values = reply.get("values", [])
    if not isinstance(values, list) or len(values) > most:
        raise GarbledError("an answer of another form")
    return values


def _obituary(status: int | None) -> str:
    if status is None:
        return "the worker was lost"
    if status >= 0:
        return f"the worker exited with status {status}"
    return f"the worker was killed by signal {-status} ({signal.strsignal(-status)})"


def _kill_all(workers: Sequence[_Worker], forkserver: ForkServer, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a fork of us is leaving; the workers are not its own
        return
    for worker in workers:
        worker.kill()
    forkserver.kill()
