"""Processes that end with their owner: when it is closed, when it is garbage collected, and at exit."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Self


class Owner:
    """The owner of started processes. ``end`` ends them all; it must not hold a reference to the owner."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _in_this_process, end, os.getpid())  # runs at exit too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process and everything it started. The owner cannot be used afterwards."""
        with self._lock:
            self._end()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Admit one caller at a time; raises RuntimeError after ``close``."""
        with self._lock:
            if not self._end.alive:
                raise RuntimeError(f"this {type(self).__name__} is closed: make a new one")
            yield


def _in_this_process(end: Callable[[], None], owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # else this is a forked child, which does not own the processes
        end()
