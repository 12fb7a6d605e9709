"""A piece of work in a thread of its own while its caller does another: a checkpoint is written while a batch is
sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from teamtr.progress import working

Found = TypeVar("Found")
LOOK_S = 0.2
"""An interrupt that comes right before a wait without end is heard at its end, so the wait looks up so often."""


@dataclass(frozen=True)
class Done(Generic[Found]):
    """What the work came to. ``raised``: by what was done meanwhile, Ctrl-C among it; whoever has dealt with the result
    raises it."""

    found: Found
    raised: BaseException | None


def work_beside(work: Callable[[], Found], meanwhile: Callable[[], None], name: str) -> Done[Found]:
    """Do ``work`` in a thread of this name and ``meanwhile`` in this one; both are over when this returns or raises. It
    raises what ``work`` raised and nothing else: an interrupt neither ends the work nor leaves it behind."""
    job = _Job(work)
    thread = threading.Thread(target=job.run, name=name)
    raised: BaseException | None = None
    started = False
    try:
        thread.start()
        started = True
        meanwhile()
    except BaseException as error:
        raised = error
    both_over = False
    while not both_over:  # nothing is called outside of the block: an interrupt is heard where something is
        try:
            with working(name):
                if not started:
                    job.run()  # here, where an interrupt would end it: one came before the thread could begin
                while not job.over.wait(LOOK_S):
                    pass
                if thread.is_alive():
                    thread.join()
            both_over = True
        except KeyboardInterrupt as error:
            raised = error if raised is None else raised
    if job.error is not None:
        raise job.error
    return Done(job.found[0], raised)


class _Job(Generic[Found]):
    """Done once, by whoever comes first."""

    def __init__(self, work: Callable[[], Found]) -> None:
        self.over = threading.Event()
        self.found: list[Found] = []
        self.error: BaseException | None = None
        self._work = work
        self._claimed = threading.Lock()

    def run(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        try:
            self.found.append(self._work())
        except BaseException as error:  # the caller raises it
            self.error = error
        finally:
            self.over.set()
