"""Processes that end with their owner: when it is closed, when nobody holds it any more, and at exit."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Self


class Owner:
    """Whoever has started processes. ``end`` ends them all; it must not hold the owner itself."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _in_this_process, end, os.getpid())  # runs at exit too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process and whatever it started. The owner cannot be used afterwards."""
        with self._lock:
            self._end()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """One caller at a time, and none once it is closed."""
        with self._lock:
            if not self._end.alive:
                raise RuntimeError(f"this {type(self).__name__} is closed: make a new one")
            yield


def _in_this_process(end: Callable[[], None], owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # else a fork of us is leaving, and the processes are not its own
        end()
