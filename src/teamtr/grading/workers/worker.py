"""The process in which untrusted code runs: a user's reward file, a pattern that may backtrack forever.

It is started by ``forkserver.py`` as a plain script, and imports only the standard library until a request names more.
What is started is the *forkserver*: it imports the preloaded modules, then forks a *worker* for each request to fork.
Channels are sockets, moved at once to descriptors of their own, so that what a grader prints cannot reach them. A frame
is eight bytes of length, then JSON. With the forkserver::

    <- {"sys_path": [...], "memory_bytes": ..., "show_output": ..., "preload": [...]}   -> {} | {"error": "..."}
    <- {"fork": true}, with the worker's end of a socket   -> {"pid": n}
    <- {"end": n}                                          -> {"status": n}

and with a worker, which gets its key before any grader is loaded::

    <- {"key": hex}
    <- {"id": ..., "load": name, "setup": {...}}      -> {"last": true} | {"error": "...", "last": true}
    <- {"id": ..., "call": [...items], "processor_s": s, "alarm_s": s}   -> {"streams": true}?  {"values": [...]}*
                                                         {"last": true} | {"error": "...", "last": true, ...}

The last frame of an answer has ``printed``, what the grader wrote to its standard output and error, unless that is
shown at once; what exceeds the first ``PRINTED_BYTES`` is counted and dropped.

A worker's frames begin with a keyed digest of the JSON, which holds the id of the request, random for each one, and the
number of the frame in the answer. So nothing counts that a grader writes to the channel itself, nor a repeated answer,
nor one to another request. Only the process that got the request answers: if the grader forks and the child returns
from the grader too, the child exits.

A *factory* (``load`` names it) turns a setup into a grader: a function of a list of items. A grader that returns a
list answers for all items at once; one that yields answers item by item, which shows the pool which item failed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import re
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any, BinaryIO, NamedTuple

Item = dict[str, Any]
Grader = Callable[[list[Item]], Iterable[Any]]

HEADER_BYTES = 8
DIGEST_BYTES = 32
PRINTED_BYTES = 16 << 10
"""Maximum number of bytes kept of what a grader prints in one call."""


class Miscount(ValueError):
    """A grader returned more or fewer values than it was given items."""


class Signer:
    """Computes keyed digests; the key cannot be read back from it."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)

    def digest(self, body: bytes) -> bytes:
        made = self._keyed.copy()
        made.update(body)
        return made.digest()


def encode_frame(content: Any, signer: Signer | None = None) -> bytes:
    body = json.dumps(content).encode()
    if signer is not None:
        body = signer.digest(body) + body
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def regex(pattern: str) -> Grader:
    """A grader that returns the group of the last match in each ``item["text"]``; None if nothing matches."""
    compiled = re.compile(pattern)

    def last_groups(items: list[Item]) -> Iterator[str | None]:
        for item in items:
            last = None
            for match in compiled.finditer(item["text"]):
                last = match
            yield None if last is None else last.group(1)

    return last_groups


def reward(path: str, function: str, columns: list[str]) -> Grader:
    """A user's ``f(prompts, completions, conversations, **columns)`` from a Python file: for each completion a number,
    a mapping from agents to numbers, or a list of numbers, one for each message of an agent.

    Items hold ``prompt``, ``completion``, ``conversation`` and ``columns``. A function without ``**`` gets only what it
    names; one that requires a missing column fails here, before anything is graded.
    """
    import inspect

    called = _function_in_file(path, function)
    parameters = inspect.signature(called).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    passed = [name for name in columns if takes_any or name in parameters]
    own = {"prompts": "prompt", "completions": "completion", "conversations": "conversation"}
    given = {name: key for name, key in own.items() if takes_any or name in parameters}
    try:
        inspect.signature(called).bind(**{name: [] for name in (*given, *passed)})
    except TypeError as error:
        raise TypeError(
            f"{function}{inspect.signature(called)} cannot be called with {', '.join(own)} and the columns "
            f"{columns}: {error}; let it name these columns, or give them its names with task.columns"
        ) from None

    def rewards(items: list[Item]) -> list[Any]:
        returned = called(
            **{name: [item.get(key) for item in items] for name, key in given.items()},
            **{name: [item["columns"].get(name) for item in items] for name in passed},
        )
        try:
            values = list(returned)
        except TypeError:
            raise TypeError(f"{function} must return a list of rewards, it returned {returned!r:.80}") from None
        if len(values) != len(items):
            raise Miscount(f"{function} returned {len(values)} rewards for {len(items)} completions")
        return [reward_value(value) for value in values]

    return rewards


def reward_value(value: Any) -> float | list[float] | dict[str, float]:
    """The reward of one completion: for the team, for each message, or for each agent."""
    if hasattr(value, "tolist"):  # of an array or a tensor
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(agent): float(earned) for agent, earned in value.items()}
    if isinstance(value, list | tuple):
        return [float(earned) for earned in value]
    return float(value)


FACTORIES: dict[str, Callable[..., Grader]] = {"regex": regex, "reward": reward}


def resolve(name: str) -> Callable[..., Grader]:
    """The factory with this name in ``FACTORIES``, or at ``package.module:function``."""
    if name in FACTORIES:
        return FACTORIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise LookupError(f"no grader {name!r}: use one of {sorted(FACTORIES)} or 'package.module:function'")
    found: Callable[..., Grader] = getattr(importlib.import_module(module), attribute)
    return found


def _function_in_file(path: str, name: str) -> Callable[..., Any]:
    import importlib.machinery
    import importlib.util

    class AsItStands(importlib.machinery.SourceFileLoader):
        """Runs the file's source, never bytecode: Python would use that of an older source of the same size and
        modification time in seconds."""

        def get_code(self, fullname: str) -> Any:
            return self.source_to_code(self.get_data(self.path), self.path)

    if not path.endswith(".py"):
        raise ImportError(f"{path} is not a Python file")
    # As for any script, the modules next to the file can be imported.
    sys.path.insert(0, os.path.dirname(path))
    loader = AsItStands("teamtr_user_reward", path)
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise AttributeError(f"{path} has no function {name!r}; it has {names}")
    return found


def _limit(memory_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None and sys.platform == "linux":  # elsewhere the system does not enforce it
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        allowed = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))


class _Kept(io.RawIOBase):
    """Accepts all that is written, and keeps the beginning of it."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = bytearray()
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def write(self, data: Any) -> int:
        given = bytes(data)
        room = PRINTED_BYTES - len(self._bytes)
        self._bytes += given[:room]
        self._dropped += len(given[room:])
        return len(given)

    def take(self) -> str:
        """Return and clear what was written since the last call."""
        text, dropped = self._bytes.decode(errors="replace"), self._dropped
        self._bytes, self._dropped = bytearray(), 0
        return f"{text}\n... and {dropped} bytes more\n" if dropped else text


_KEPT: list[_Kept] = []
"""The buffer of this worker's output; empty if the output is shown instead."""


def _keep_output() -> None:
    _KEPT.append(_Kept())
    kept: Any = _KEPT[0]
    buffered = io.BufferedWriter(kept)
    sys.stdout = sys.stderr = io.TextIOWrapper(buffered, "utf-8", errors="backslashreplace", write_through=True)


def _printed() -> dict[str, str]:
    """What was printed since the last call, as part of a frame; empty if nothing was."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a grader may have closed or replaced them
            stream.flush()
    text = "".join(kept.take() for kept in _KEPT)
    return {"printed": text} if text else {}


class _Answer:
    """The answer to one request: frames with its id and their number, only from the process that got the request."""

    def __init__(self, end: socket.socket, signer: Signer, asked: str) -> None:
        self._end = end
        self._signer = signer
        self._asked = asked
        self._numbers = count()
        self._pid = os.getpid()

    def say(self, **content: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # the grader forked and both processes returned: the parent answers
        numbered = {**content, "id": self._asked, "number": next(self._numbers)}
        self._end.sendall(encode_frame(numbered, self._signer))


def _serve(end: socket.socket) -> None:
    graders: dict[str, Grader] = {}
    requests = end.makefile("rb")
    first = _read_frame(requests)
    if first is None:
        return
    signer = Signer(bytes.fromhex(first.pop("key")))
    current: Grader | None = None
    while (request := _read_frame(requests)) is not None:
        answer = _Answer(end, signer, request["id"])
        try:
            if "load" in request:
                key = json.dumps([request["load"], request["setup"]], sort_keys=True)
                if key not in graders:
                    graders[key] = resolve(request["load"])(**request["setup"])
                current = graders[key]
            else:
                assert current is not None, "the pool loads before it calls"
                _call(current, request["call"], _Timers(request["processor_s"], request["alarm_s"]), answer)
            answer.say(last=True, **_printed())
        except BaseException as error:  # a grader may also raise SystemExit and KeyboardInterrupt
            answer.say(error=_describe(error), miscounted=isinstance(error, Miscount), last=True, **_printed())
        finally:
            _Timers(0, 0).start()


class _Timers(NamedTuple):
    """Timers after which the kernel kills this process. Their signals keep their default action, so that even code that
    holds the GIL is stopped. The first counts processor time, so that a busy machine causes no timeouts. The second is
    for the case that the pool, which has a deadline of its own, is gone."""

    processor_s: float
    alarm_s: float

    def start(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self.processor_s)
        signal.setitimer(signal.ITIMER_REAL, self.alarm_s)


def _call(grader: Grader, items: list[Item], timers: _Timers, answer: _Answer) -> None:
    timers.start()
    answered = grader(items)
    if not isinstance(answered, Iterator):
        values = list(answered)
        if len(values) != len(items):
            raise Miscount(f"the grader returned {len(values)} values for {len(items)} items")
        answer.say(values=values)
        return
    answer.say(streams=True)
    given = 0
    for value in islice(answered, len(items)):
        answer.say(values=[value])
        timers.start()
        given += 1
    if given < len(items):
        raise ValueError(f"the grader yielded {given} values for {len(items)} items")


def _describe(error: BaseException) -> str:
    """``ValueError: text (file.py:12)``: the line where the untrusted code raised it."""
    ours = (__file__, "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    kind = "" if isinstance(error, Miscount) else f"{type(error).__name__}: "  # our own error needs no type name
    return f"{kind}{error}"[:500] + where


def _read_frame(stream: BinaryIO) -> Any | None:
    """The next frame, or None if the other side is gone."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    length = int.from_bytes(header, "big")
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def _worker(channel: int, hello: Item) -> None:
    """The main function of a worker; never returns."""
    status = 1
    try:
        _limit(hello["memory_bytes"])
        if not hello["show_output"]:
            # Only now: a process that cannot even start must be able to report why.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            _keep_output()
        _serve(socket.socket(fileno=channel))
        status = 0
    finally:
        # Threads or exit handlers that a grader left behind must not keep the process alive.
        os._exit(status)


class _Nursery:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()

    def run(self) -> None:
        """Serve requests until the other side closes the channel."""
        hello, _ = self._next()
        if hello is None:
            return
        sys.path[:] = hello["sys_path"]
        try:
            for name in hello["preload"]:
                importlib.import_module(name)
        except BaseException as error:
            self._reply({"error": _describe(error)})
            return
        gc.collect()
        gc.freeze()  # so that garbage collection in a worker does not copy every page
        self._reply({})
        while True:
            request, passed = self._next()
            if request is None:
                break
            if "fork" in request:
                self._reply({"pid": self._fork(passed, hello)})
            else:
                self._reply({"status": self._end(request["end"])})
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _end(self, pid: int) -> int:
        """Kill a worker and everything it started. Returns its exit status, negative for a signal."""
        # Before waitpid: until then its pid cannot belong to another group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._children.discard(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _fork(self, channel: int, hello: Item) -> int:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            self._control.close()
            _worker(channel, hello)
        # In the parent too: the group must exist before the pid is passed on.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        os.close(channel)
        self._children.add(pid)
        return pid

    def _next(self) -> tuple[Item | None, int]:
        """The next frame (None if the other side is gone) and the descriptor that came with it, or -1."""
        received, passed = bytearray(), -1
        wanted = HEADER_BYTES
        while len(received) < wanted:
            chunk, descriptors, _, _ = socket.recv_fds(self._control, wanted - len(received), 1)
            if not chunk:
                return None, -1
            passed = descriptors[0] if descriptors else passed
            received += chunk
            if len(received) == HEADER_BYTES:
                wanted = HEADER_BYTES + int.from_bytes(received, "big")
        return json.loads(received[HEADER_BYTES:]), passed

    def _reply(self, content: Any) -> None:
        self._control.sendall(encode_frame(content))


def main() -> None:
    """Move the channel off stdin, then serve until the other side closes it."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(ConnectionError):
        _Nursery(control).run()
    os._exit(0)


if __name__ == "__main__":
    main()
