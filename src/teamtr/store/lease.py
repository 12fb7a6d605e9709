"""Who holds a file, told by the file itself: for file systems whose locks do not reach other machines.

The holder writes its name into the file and touches it as long as it lives. Whoever finds the name of another machine
waits for the next touch: if it comes, the holder lives; if none comes for ``LEASE_S``, it is gone.
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
"""After so long without a touch its holder is gone."""
BEAT_S = 10.0
"""Between two touches."""
LOOK_S = 0.5
"""Between two looks at somebody else's."""


class Lease:
    """The file is ours, and says so until ``end``."""

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
            except OSError:  # a file system that is away for a moment, or for good: the run itself will say so
                continue

    def end(self) -> None:
        """Before the file is closed: the number of a closed one is soon another's."""
        self._ended.set()
        self._thread.join()
        os.ftruncate(self._descriptor, 0)


def holder_of(descriptor: int) -> str | None:
    """Who has written its name into the file: "process 12 on there"; None where nobody has."""
    found = _named(descriptor)
    return None if found is None else f"process {found[0]} on {found[1]}"


def seems_held(file: Path) -> bool:
    """Whether somebody seems to hold the file, for whoever only looks: takes no lock, waits for nobody, writes nothing.

    A holder of this machine whose process is gone is gone; one of another machine is gone a minute after its last
    touch, if both clocks agree.
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
    """Whether a process of another machine holds the file. Waits until it shows that it lives, or ``LEASE_S`` since it
    last did."""
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
    if pid <= 0:  # groups of processes, to ``kill``
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _now(folder: Path) -> float:
    """By the clock that touches are dated with, which may be another machine's."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
