"""What takes long, told to whoever wants to show it: nobody by default.

    with working("teaching", total=150, unit="steps") as work:
        for _ in range(150):
            ...
            work.advance()

Whoever shows it (``cli.works``) is told when a piece of work begins and ends, and looks at the count when it likes, so
that counting costs next to nothing. It is set for a block (``listening``), and not passed through every signature
between a command and the loop over micro-batches; threads that do not belong to the block are silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(eq=False)
class Work:
    """``total`` is the most that there is to do, in ``unit``; None where nobody knows. Without a unit nothing is
    counted."""

    what: str
    total: int | None = None
    unit: str = ""
    done: int = 0
    broken_off: bool = False

    def advance(self, count: int = 1) -> None:
        self.done += count

    def expect(self, count: int) -> None:
        """There is so much more to do than was known."""
        self.total = (self.total or 0) + count


class Progress(Protocol):
    """Shows work. Pieces of work are nested: the one that began last ends first."""

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
    """Work within is told to this one."""
    token = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def working(what: str, total: int | None = None, unit: str = "") -> Iterator[Work]:
    """A piece of work."""
    work, listener = Work(what, total, unit), _listener.get()
    listener.begin(work)
    try:
        yield work
    except BaseException:
        work.broken_off = True
        raise
    finally:
        listener.end(work)
