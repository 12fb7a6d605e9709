"""Progress reporting of long operations to a display, by default to none.

    with working("training", total=150, unit="steps") as work:
        for _ in range(150):
            ...
            work.advance()

The display (``cli.works``) is notified when an operation begins and ends, and reads the count when it needs it, so
counting costs next to nothing. It is set for a block (``listening``) instead of being passed through every signature
between a command and the loop over micro-batches. Threads outside the block report nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(eq=False)
class Work:
    """One operation. ``total`` is the maximum amount of work in ``unit``; None if it is not known. Without a unit
    nothing is counted."""

    what: str
    total: int | None = None
    unit: str = ""
    done: int = 0
    broken_off: bool = False

    def advance(self, count: int = 1) -> None:
        self.done += count

    def expect(self, count: int) -> None:
        """Add this amount to the total."""
        self.total = (self.total or 0) + count


class Progress(Protocol):
    """A display of work. Operations are nested: the one that began last ends first."""

    def begin(self, work: Work) -> None: ...

    def end(self, work: Work) -> None: ...


class Silent:
    """Shows nothing."""

    def begin(self, work: Work) -> None:
        pass

    def end(self, work: Work) -> None:
        pass


_listener: ContextVar[Progress] = ContextVar("listener", default=Silent())  # noqa: B039 (it holds no state)


@contextmanager
def listening(progress: Progress) -> Iterator[None]:
    """Reports work inside the block to this display."""
    token = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def working(what: str, total: int | None = None, unit: str = "") -> Iterator[Work]:
    """One operation, reported to the current display."""
    work, listener = Work(what, total, unit), _listener.get()
    listener.begin(work)
    try:
        yield work
    except BaseException:
        work.broken_off = True
        raise
    finally:
        listener.end(work)
