"""A lease with heartbeats in the lock file itself, for file systems whose locks do not reach other machines.

The holder writes its process and host into the file and touches it regularly. A process that finds another host there
waits for the next touch: if it comes, the holder is alive; if none comes for ``LEASE_S``, the lease has expired.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import orjson

LEASE_S = 60.0
"""Seconds without a touch after which the lease expires."""
BEAT_S = 10.0
"""Seconds between two touches."""
LOOK_S = 0.5
"""Seconds between two checks of another host's lease."""


class Lease:
    """Marks the file as held by this process until ``end``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ended = threading.Event()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, orjson.dumps({"pid": os.getpid(), "host": socket.gethostname()}), 0)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                os.utime(self._descriptor)
            except OSError:  # the file system is unavailable: if that lasts, the run's own writes fail
                continue

    def end(self) -> None:
        """Call this before the file is closed, since the descriptor's number may be reused."""
        self._ended.set()
        self._thread.join()
        os.ftruncate(self._descriptor, 0)


def holder_of(descriptor: int) -> str | None:
    """The holder named in the file, as "process 12 on host"; None if there is none."""
    found = _named(descriptor)
    return None if found is None else f"process {found[0]} on {found[1]}"


def seems_held(file: Path) -> bool:
    """Whether a process seems to hold the file. For readers: takes no lock, does not wait, writes nothing.

    A lease expires a minute after its last touch, if the clocks agree; one of this machine also ends with its process.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        named, touched = _named(descriptor), os.fstat(descriptor).st_mtime
    except OSError:
        return False
    finally:
        os.close(descriptor)
    if named is None or abs(time.time() - touched) >= LEASE_S:
        return False
    return named[1] != socket.gethostname() or _lives(named[0])


def held_elsewhere(descriptor: int, folder: Path) -> bool:
    """Whether a process of another machine holds the file. Waits for its next touch, at most until ``LEASE_S`` after
    the last one."""
    named = _named(descriptor)
    if named is None or named[1] == socket.gethostname():
        return False
    touched = os.fstat(descriptor).st_mtime
    while _now(folder) - touched < LEASE_S:
        time.sleep(LOOK_S)
        if _named(descriptor) != named:
            return _named(descriptor) is not None
        if os.fstat(descriptor).st_mtime != touched:
            return True
    return False


def _named(descriptor: int) -> tuple[int, str] | None:
    try:
        found = orjson.loads(os.pread(descriptor, 4096, 0))
        return int(found["pid"]), str(found["host"])
    except (ValueError, KeyError, TypeError):
        return None


def _lives(pid: int) -> bool:
    if pid <= 0:  # ``kill`` would take it for a process group
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _now(folder: Path) -> float:
    """The time by the file system's clock, which dates the touches and may be another machine's."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
