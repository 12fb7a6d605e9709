"""Forks an isolated process for each job and reports its result. Started by ``grading/sandbox/client.py``.

The channel is a socket on descriptor 0. A frame is eight bytes of length, then JSON::

    <- {"sys_path": [...], "preload": [...], "without": {wall: why}}
    -> {"missing": {wall: why}} | {"failed": why there are no namespaces}
    <- {"seconds": s, "clock_s": s, "memory_bytes": b, "reply_bytes": b}, the job, a nonce       three frames
    -> {"nonce": ..., "kind": "ok" | "timeout" | "crash", "message": ...}          and, when ok, what the job wrote

The job's own process reads the job from the channel before it is isolated and loses the channel. Only then does the
server read the nonce. So the nonce is never in the memory of a job, and neither is anything of earlier jobs: the
server, of which the job's process is a copy, has never held a job, and has wiped the replies that it forwarded unread.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from . import program
from .isolation import Isolation, NoNamespacesError, enter, restrict

HEADER_BYTES = 8
TAKEN = b"\n"  # what a job's process writes when it has read the job from the channel
_OUT_OF_TIME = (-signal.SIGPROF, -signal.SIGXCPU)  # the timer, and the kernel's limit for jobs that stop the timer
COULD_NOT_SHUT_IN = 90  # exit status


class _LostError(Exception):
    """The owner is gone, or a job's process died while reading its job: the server cannot continue."""


@dataclass(frozen=True)
class _End:
    """How a job ended, and how many bytes of the buffer it filled, which are its reply if it is ``ok``."""

    kind: str
    message: str = ""
    filled: int = 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 must not have a handler that a job could trigger
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    with contextlib.suppress(_LostError):
        hello = _receive(channel)
        _preload(hello["sys_path"], hello["preload"])
        try:
            isolation = enter(hello["without"])
        except NoNamespacesError as error:
            _send(channel, {"failed": str(error)})
            os._exit(0)
        _send(channel, {"missing": isolation.missing})
        os.dup2(0, 2)  # only now: a server that cannot start must be able to report why
        buffer = bytearray()
        while True:
            request = _receive(channel)
            if len(buffer) <= request["reply_bytes"]:
                buffer = bytearray(request["reply_bytes"] + 1)  # one more, to detect a reply that is too long
            _serve(channel, isolation, memoryview(buffer), **request)
    os._exit(0)


def _preload(path: list[str], names: list[str]) -> None:
    """Import all that a job may import, since there are no files to import from later."""
    sys.path[:] = path
    for name in names:
        importlib.import_module(name)
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.meta_path.remove(importlib.machinery.PathFinder)
    os.environ.clear()
    gc.freeze()  # so that garbage collection in a job does not touch, and so copy, all of our pages


def _serve(
    channel: socket.socket,
    isolation: Isolation,
    buffer: memoryview,
    seconds: float,
    clock_s: float,
    memory_bytes: int,
    reply_bytes: int,
) -> None:
    reply_read, reply_write = os.pipe()
    child = os.fork()
    if child == 0:
        _do_job(channel, reply_write, isolation, seconds, memory_bytes)
    os.close(reply_write)
    try:
        if os.read(reply_read, len(TAKEN)) != TAKEN:
            raise _LostError
        nonce = _receive(channel)
        end = _await(channel, reply_read, clock_s, buffer[: reply_bytes + 1])
    finally:
        os.close(reply_read)
        status = _end_all(child, isolation)
    if end.kind == "ok" and (not end.filled or status in _OUT_OF_TIME):
        end = replace(_obituary(status, seconds), filled=end.filled)
    _send(channel, {"nonce": nonce, "kind": end.kind, "message": end.message})
    if end.kind == "ok":
        _send_frame(channel, buffer[: end.filled])
    buffer[: end.filled] = bytes(end.filled)


def _do_job(channel: socket.socket, reply_fd: int, isolation: Isolation, seconds: float, memory_bytes: int) -> None:
    """Run the job in the child process; never returns."""
    status = COULD_NOT_SHUT_IN
    try:
        job = _read_frame(channel)
        os.write(reply_fd, TAKEN)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        restrict(isolation, reply_fd, seconds, memory_bytes)
        status = 0
        program.run(job, reply_fd)
    finally:
        os._exit(status)


def _await(channel: socket.socket, reply_fd: int, clock_s: float, buffer: memoryview) -> _End:
    """Read all that the job writes until it closes its pipe, unless it takes too long or writes too much. The
    wall-clock limit is longer than that of processor time, so that a busy machine causes no timeouts."""
    deadline = time.monotonic() + clock_s
    poll = select.poll()
    poll.register(reply_fd, select.POLLIN)
    poll.register(channel, select.POLLIN)  # before we answer, only the owner's disconnect makes it readable
    filled = 0
    while True:
        ready = {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        if not ready:
            return _End("timeout", f"no answer within {clock_s:g} s", filled)
        if channel.fileno() in ready:
            raise _LostError
        if filled == len(buffer):
            return _End("crash", f"a reply of more than {len(buffer) - 1} bytes", filled)
        count = os.readv(reply_fd, [buffer[filled:]])
        if count == 0:
            return _End("ok", filled=filled)
        filled += count


def _end_all(child: int, isolation: Isolation) -> int:
    """Kill the job and everything it started; returns the job's exit status, negative for a signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if isolation.init:
            os.kill(-1, signal.SIGKILL)  # everything in our namespace but ourselves
        else:
            os.kill(child, signal.SIGKILL)
            os.killpg(child, signal.SIGKILL)
    status = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, raw = os.wait()
            if ended == child:
                status = os.waitstatus_to_exitcode(raw)
    return status


def _obituary(status: int, seconds: float) -> _End:
    if status == COULD_NOT_SHUT_IN:
        return _End("crash", "could not be shut in, and so was not run")
    if status in _OUT_OF_TIME:
        return _End("timeout", f"no answer within {seconds:g} s of processor time")
    if status < 0:
        return _End("crash", f"killed by signal {-status} ({signal.strsignal(-status)})")
    return _End("crash", f"left with status {status} and no answer")


def _send(channel: socket.socket, content: Any) -> None:
    _send_frame(channel, json.dumps(content).encode())


def _send_frame(channel: socket.socket, body: bytes | memoryview) -> None:
    try:
        channel.sendall(len(body).to_bytes(HEADER_BYTES, "big"))
        channel.sendall(body)
    except OSError:
        raise _LostError from None


def _receive(channel: socket.socket) -> Any:
    return json.loads(_read_frame(channel))


def _read_frame(channel: socket.socket) -> bytes:
    return _read(channel, int.from_bytes(_read(channel, HEADER_BYTES), "big"))


def _read(channel: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes: what follows is not for this process, or not yet."""
    taken = bytearray()
    while len(taken) < count:
        chunk = channel.recv(min(count - len(taken), 1 << 20))
        if not chunk:
            raise _LostError
        taken += chunk
    return bytes(taken)
