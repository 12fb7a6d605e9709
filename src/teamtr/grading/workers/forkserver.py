"""The process that workers are forked from.

Starting Python and importing sympy takes half a second; a fork of a process that has both takes milliseconds. So
replacing a killed worker costs next to nothing. The forkserver itself never sees untrusted text. It reaps its children
only on request: until then, the pid of a dead one cannot belong to another process.

With a container, the forkserver and its workers run in it. Their pids then mean nothing outside, so the forkserver
kills them.
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
    """A grader that cannot be used at all: its settings are at fault, not an item."""


class ForeignError(Exception):
    """The data received is no answer to the request: bytes written by the grader itself, a repeated answer, or one to
    another request."""


@dataclass
class Child:
    """A forked worker: its pid as the forkserver sees it, our end of its channel, and the id of its last request."""

    pid: int
    channel: Channel
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _asked: str = ""
    _heard: int = 0

    def greet(self, deadline: float) -> None:
        """Send the worker its key, before any other code runs in it."""
        self.channel.send({"key": self._key.hex()}, deadline)

    def ask(self, content: Mapping[str, Any], deadline: float) -> None:
        self._asked, self._heard = secrets.token_hex(16), 0
        self.channel.send({**content, "id": self._asked}, deadline)

    def hear(self, deadline: float) -> dict[str, Any]:
        """The next frame of the answer to the last request. Raises ForeignError if it is something else."""
        try:
            frame = self.channel.receive_bytes(deadline)
        except LateError:
            if self.channel.has_more():  # an incomplete frame: real answers arrive whole
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
    """Forks workers. Started automatically when first used, and again after it has died.

    Args:
        hello: the settings that every process gets at its start, see ``worker.py``.
        most_bytes: the longest frame that a worker may send.
        container: the container that it runs in; None for none.
    """

    def __init__(self, hello: Mapping[str, Any], most_bytes: int, container: Container | None = None) -> None:
        self._hello = hello
        self._most_bytes = most_bytes
        self._container = container
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._lock = threading.Lock()  # one exchange at a time; the pool's threads share the forkserver

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
        """Kill a child and all that it started; returns its exit status, negative for a signal, or None if unknown."""
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
        # Started by path, without the script's folder on sys.path (-P). The process then copies our sys.path, so
        # that it finds the same modules as we do.
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
                start_new_session=True,  # also shields it from the user's Ctrl-C
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
            control.close()  # on which the forkserver kills its children
        if process is None:
            return
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
