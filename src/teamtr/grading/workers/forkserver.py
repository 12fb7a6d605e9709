"""The process that workers are forked from.

Starting Python and importing sympy takes half a second, a fork of a process that has both takes milliseconds: so a
worker that had to be killed is replaced at next to no cost. The forkserver itself never sees untrusted text. It waits
for its children only when told to: until then the number of a dead one cannot belong to another process.

With a container it is the forkserver that runs in it, and so do its workers. Their numbers then mean nothing out here,
so that it is the forkserver that kills them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teamtr.errors import UserError
from teamtr.grading.workers.channel import Channel, DeadError, LateError, read_body
from teamtr.grading.workers.container import Container
from teamtr.grading.workers.worker import DIGEST_BYTES, Signer


class GraderError(UserError):
    """A grader that cannot be used at all: no item is to blame, the settings are."""


class ForeignError(Exception):
    """What came is no answer to what was asked: bytes of the grader's own, an answer twice or to another request."""


@dataclass
class Child:
    """A forked worker: its number where the forkserver is, our end of its channel, and what it was last asked."""

    pid: int
    channel: Channel
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _asked: str = ""
    _heard: int = 0

    def greet(self, deadline: float) -> None:
        """Give it its key; nothing else runs in it as yet."""
        self.channel.send({"key": self._key.hex()}, deadline)

    def ask(self, content: Mapping[str, Any], deadline: float) -> None:
        self._asked, self._heard = secrets.token_hex(16), 0
        self.channel.send({**content, "id": self._asked}, deadline)

    def hear(self, deadline: float) -> dict[str, Any]:
        """The next frame of the answer to what was asked last."""
        try:
            frame = self.channel.receive_bytes(deadline)
        except LateError:
            if self.channel.has_more():  # the beginning of a frame: an answer comes whole, unless it is none
                raise ForeignError from None
            raise
        digest, body = frame[:DIGEST_BYTES], frame[DIGEST_BYTES:]
        if not secrets.compare_digest(digest, Signer(self._key).digest(body)):
            raise ForeignError
        said = read_body(body)
        if (said.get("id"), said.get("number")) != (self._asked, self._heard):
            raise ForeignError
        self._heard += 1
        return said


class ForkServer:
    """Forks workers. Starts by itself when first used, and anew when it has died.

    Args:
        hello: what every process is told at its start, see ``worker.py``.
        most_bytes: the longest frame that a worker may send.
        container: what it runs in; None for none.
    """

    def __init__(self, hello: Mapping[str, Any], most_bytes: int, container: Container | None = None) -> None:
        self._hello = hello
        self._most_bytes = most_bytes
        self._container = container
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._lock = threading.Lock()  # one conversation at a time; the pool's threads share the forkserver

    def fork(self, deadline: float) -> Child:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._kill()
            control = self._control or self._start(deadline)
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    control.send({"fork": True}, deadline, descriptors=[theirs.fileno()])
                    pid = control.receive(deadline)["pid"]
                child = Child(pid, Channel(ours, self._most_bytes))
                child.greet(deadline)
            except BaseException:
                ours.close()
                self._kill()
                raise
            return child

    def end(self, pid: int, deadline: float) -> int | None:
        """Kill a child with all it started; its exit status, negative for a signal, or None when nobody knows it."""
        with self._lock:
            if self._control is None:
                return None
            try:
                self._control.send({"end": pid}, deadline)
                status: int | None = self._control.receive(deadline)["status"]
                return status
            except BaseException as error:
                self._kill()
                if isinstance(error, DeadError):
                    return None
                raise

    def kill(self) -> None:
        with self._lock:
            self._kill()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _start(self, deadline: float) -> Channel:
        # By path, and without the folder of the script on sys.path (-P): the process then takes over our
        # sys.path, so that it sees the modules that we see, however we came by them.
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if self._container is not None:
            if refusal := self._container.refusal():
                raise GraderError(refusal)
            command, environment = self._container.command(command), self._container.environment(environment)
        ours, theirs = socket.socketpair()
        self._control = control = Channel(ours, self._most_bytes)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # also keeps the user's Ctrl-C from it
                env=environment,
            )
        try:
            control.send(self._hello, deadline)
            reply = control.receive(deadline)
        except BaseException:
            self._kill()
            raise
        if "error" in reply:
            self._kill()
            raise GraderError(f"graders cannot be loaded: {reply['error']}")
        return control

    def _kill(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()  # it kills its children when it sees this
        if process is None:
            return
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
