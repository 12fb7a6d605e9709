"""Runs code from a dataset or a model in a sandbox, where it can do no harm and gains nothing by false results.

    with Sandbox() as sandbox:
        sandbox.run([Program("def double(x): return 2 * x", "double", [[1], [4]])])    # [Result("ok", [2, 8])]
        sandbox.verify([Verification("def small(x): return len(x) < 3", "{1, 2}", ["small"])])  # [Result("ok", True)]

Each job has a process of its own, forked from a server that has imported what jobs may import; ``isolation.py`` lists
the restrictions of that process. If the system offers no namespaces, the remaining restrictions must suffice, and a
warning says so once.

What is trusted:

* A *verification* runs a dataset's code on an answer that is data. The code is kept from doing harm, but its verdict is
  trusted, since it could always return True. Only a plain true value counts: not what it prints, not its exit status,
  not an object that claims to equal True.
* A *program* is written by a model, and only the values that it returns are used. The expected values never enter the
  sandbox; compare them here, with ``same_json``. Code under test and a secret in one interpreter cannot be kept apart,
  so there is no secret.

In both, an answer counts only with the job's nonce, which the job's process has never held.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from teamtr.grading.workers.channel import Channel, DeadError, GarbledError, LateError
from teamtr.grading.workers.lifetime import Owner
from teamtr.grading.workers.pool import PATIENCE, Result

MIB = 1 << 20

NAMESPACES = ("user namespace", "network namespace", "process namespace")
WALLS = (*NAMESPACES, "empty root", "plain user", "call filter")

PRELOADED = (
    *("abc", "array", "bisect", "calendar", "cmath", "collections", "collections.abc", "copy", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "graphlib", "hashlib", "heapq", "io", "itertools"),
    *("json", "math", "numbers", "operator", "pprint", "random", "re", "statistics", "string", "struct", "sys"),
    *("textwrap", "time", "traceback", "types", "typing", "unicodedata", "weakref", "_strptime", "encodings.gbk"),
)
"""Modules that a job may import: all that puzzles and small programs use, and only the standard library."""

_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from sandbox.server import main; main()"
_GRACE_S = 10.0
_SECONDS_TO_START = 60.0
_LONGEST_FRAME = 1 << 40  # the server enforces each job's own limit
_LONGEST_MESSAGE = 1000
_OTHER_FORM = Result("crash", message="an answer of another form")


@dataclass(frozen=True)
class Limits:
    """Limits of one job: processor time (ten times that on the wall clock), address space, and size of the reply."""

    seconds: float = 5.0
    memory_bytes: int = 1024 * MIB
    reply_bytes: int = MIB

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.memory_bytes < 64 * MIB or self.reply_bytes < 1:
            raise ValueError(f"a job needs time, at least 64 MiB of memory and a reply, got {self}")


@dataclass(frozen=True)
class Verification:
    """Checks defined by ``code``, to be called with one argument.

    Attributes:
        code: Python source.
        argument: a Python literal, as ``repr`` writes it (so that it may hold sets and tuples).
        checks: names in the code, each of a function or a list of functions. All get the same object, in this order.
    """

    code: str
    argument: str
    checks: Sequence[str]

    def job(self) -> dict[str, Any]:
        return {"kind": "verify", "code": self.code, "argument": self.argument, "checks": list(self.checks)}


@dataclass(frozen=True)
class Program:
    """``function`` of ``code``, to be called with each list of arguments in ``inputs`` (JSON)."""

    code: str
    function: str
    inputs: Sequence[Sequence[Any]]

    def job(self) -> dict[str, Any]:
        return {"kind": "call", "code": self.code, "function": self.function, "inputs": list(self.inputs)}


class Sandbox(Owner):
    """Runs verifications and programs, each in its own process with all isolation that the system supports.

    Args:
        workers: number of server processes; each runs one job at a time.
        limits: of each job, unless a call gives others.
        preload: the modules that jobs may import; nothing else of ``sys.path`` is available to them.
        without: kinds of isolation (names in ``WALLS``) to leave out, to test what holds without them.
    """

    def __init__(
        self,
        workers: int = 1,
        limits: Limits | None = None,
        *,
        preload: Sequence[str] = PRELOADED,
        without: Sequence[str] = (),
    ) -> None:
        unknown = sorted(set(without) - set(WALLS))
        if workers < 1 or unknown:
            raise ValueError(f"a sandbox needs a worker and walls among {WALLS}, got workers={workers}, {unknown}")
        self._limits = limits or Limits()
        hello = {"sys_path": sys.path[:], "preload": list(preload)}
        unwanted = dict.fromkeys(without, "not wanted")
        self._servers = tuple(_Server(hello, unwanted) for _ in range(workers))
        super().__init__(partial(_end_all, self._servers))

    def missing(self) -> dict[str, str]:
        """The kinds of isolation that are missing, and why."""
        with self._use():
            return dict(self._servers[0].missing())

    def verify(self, jobs: Sequence[Verification], limits: Limits | None = None) -> list[Result]:
        """Per job, whether all checks hold; if one does not, ``message`` says which and what it returned.

        Code that does not load, dies or gives no reply is a crash.
        """
        return [_verdict(result) for result in self._run([job.job() for job in jobs], limits)]

    def run(self, jobs: Sequence[Program], limits: Limits | None = None) -> list[Result]:
        """Per job, the list of the function's return values; a crash if it raises on any input."""
        results = self._run([job.job() for job in jobs], limits)
        return [_values(result, len(job.inputs)) for job, result in zip(jobs, results, strict=True)]

    def _run(self, jobs: Sequence[Mapping[str, Any]], limits: Limits | None) -> list[Result]:
        with self._use():
            idle: SimpleQueue[_Server] = SimpleQueue()
            for server in self._servers:
                idle.put(server)

            def run_one(job: Mapping[str, Any]) -> Result:
                server = idle.get()
                try:
                    return server.run(job, limits or self._limits)
                finally:
                    idle.put(server)

            if len(self._servers) == 1 or len(jobs) < 2:
                return [run_one(job) for job in jobs]
            with ThreadPoolExecutor(len(self._servers)) as threads:
                return list(threads.map(run_one, jobs))


def same_json(left: Any, right: Any) -> bool:
    """Whether two values are equal in value and type throughout: 1 is neither True nor 1.0. For values parsed by
    ``json``."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    return bool(left == right)


class _Server:
    """One server process and our end of its channel. Restarted automatically when used after ``end``."""

    def __init__(self, hello: Mapping[str, Any], unwanted: Mapping[str, str]) -> None:
        self._hello = hello
        self._without = dict(unwanted)
        self._missing: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    def missing(self) -> Mapping[str, str]:
        self._started()
        return self._missing

    def run(self, job: Mapping[str, Any], limits: Limits) -> Result:
        channel = self._started()
        nonce = secrets.token_hex(16)
        clock_s = PATIENCE * limits.seconds
        deadline = time.monotonic() + clock_s + _GRACE_S
        try:
            for frame in ({**asdict(limits), "clock_s": clock_s}, job, nonce):
                channel.send(frame, deadline)
            head = channel.receive(deadline)
            if not secrets.compare_digest(head["nonce"], nonce):
                raise DeadError
            if head["kind"] == "ok":
                return _result(channel, deadline)
            return Result("timeout" if head["kind"] == "timeout" else "crash", message=head["message"])
        except (DeadError, LateError):
            self.end()
            return Result("crash", message="the sandbox's server ended, hung or lost the thread, and was replaced")
        except BaseException:
            self.end()  # an interrupt leaves an answer in the channel, which the next job must not read
            raise

    def end(self) -> None:
        """Close the channel, on which the server kills its job and exits. If it does not exit, kill it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert self._channel is not None
        self._channel.close()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _started(self) -> Channel:
        if self._process is None:
            answer = self._start()
            if "failed" in answer:
                self.end()
                self._without |= dict.fromkeys(NAMESPACES, answer["failed"])
                answer = self._start()
            self._missing = answer["missing"]
            _warn_once(self._missing)
        assert self._channel is not None
        return self._channel

    def _start(self) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        kept = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-S", "-c", _BOOTSTRAP, str(Path(__file__).parents[1])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # also shields it from the user's Ctrl-C
                env={**kept, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            )
        self._channel = Channel(ours, _LONGEST_FRAME)
        deadline = time.monotonic() + _SECONDS_TO_START
        try:
            self._channel.send({**self._hello, "without": self._without}, deadline)
            answer: dict[str, Any] = self._channel.receive(deadline)
        except (DeadError, LateError):
            self.end()
            raise RuntimeError("the sandbox's server did not start: it says why on stderr") from None
        except BaseException:
            self.end()
            raise
        return answer


def _result(channel: Channel, deadline: float) -> Result:
    """The result that the job wrote; it may have written anything."""
    try:
        said = channel.receive(deadline)
    except GarbledError as garbled:
        return Result("crash", message=str(garbled))
    match said:
        case {"error": str(error)}:
            return Result("crash", message=error[:_LONGEST_MESSAGE])
        case {"value": value}:
            return Result("ok", value)
    return _OTHER_FORM


def _verdict(result: Result) -> Result:
    if result.kind != "ok":
        return result
    match result.value:
        case {"failed": str(failed)}:
            return Result("ok", failed == "", failed[:_LONGEST_MESSAGE])
    return _OTHER_FORM


def _values(result: Result, count: int) -> Result:
    if result.kind != "ok" or (isinstance(result.value, list) and len(result.value) == count):
        return result
    return _OTHER_FORM


_warned: set[str] = set()


def _warn_once(missing: Mapping[str, str]) -> None:
    if missing.keys() <= _warned:
        return
    _warned.update(missing)
    reasons = "; ".join(f"no {name} ({why})" for name, why in missing.items())
    standing = [name for name in WALLS if name not in missing]
    warnings.warn(
        f"untrusted code runs behind fewer walls than it could: {reasons}. What stands: {', '.join(standing)}"
        f"{' and ' if standing else ''}limits on processes, files, memory and time",
        RuntimeWarning,
        stacklevel=2,
    )


def _end_all(servers: Sequence[_Server]) -> None:
    for server in servers:
        server.end()
