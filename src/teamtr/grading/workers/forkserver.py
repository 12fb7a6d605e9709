"""The process that workers are forked from.

Starting Python and importing sympy takes half a second, a fork of a process that has both takes milliseconds: so a
worker that had to be killed is replaced at next to no cost. The forkserver itself never sees untrusted text. It waits
for its children only when told to: until then the number of a dead one cannot belong to another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr.errors import UserError
from teamtr.grading.workers.channel import Channel, DeadError


class GraderError(UserError):
    """A grader that cannot be used at all: no item is to blame, the settings are."""


@dataclass(frozen=True)
class Child:
    """A forked worker: its process and group number, and our end of its channel."""

    pid: int
    channel: Channel


class ForkServer:
    """Forks workers. Starts by itself when first used, and anew when it has died.

    Args:
        hello: what every process is told at its start, see ``worker.py``.
        most_bytes: the longest frame that a worker may send.
    """

    def __init__(self, hello: Mapping[str, Any], most_bytes: int) -> None:
        self._hello = hello
        self._most_bytes = most_bytes
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
            except BaseException:
                ours.close()
                self._kill()
                raise
            return Child(pid, Channel(ours, self._most_bytes))

    def reap(self, pid: int, deadline: float) -> int | None:
        """The exit status of a child that is dead or dying, negative for a signal; None when nobody knows it."""
        with self._lock:
            if self._control is None:
                return None
            try:
                self._control.send({"reap": pid}, deadline)
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
        ours, theirs = socket.socketpair()
        self._control = control = Channel(ours, self._most_bytes)
        with theirs:
            # By path, and without the folder of the script on sys.path (-P): the process then takes over our
            # sys.path, so that it sees the modules that we see, however we came by them.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # also keeps the user's Ctrl-C from it
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
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
