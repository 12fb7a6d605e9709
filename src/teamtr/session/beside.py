"""Runs work in a thread while the caller does something else: a checkpoint is written while a batch is sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from teamtr.progress import working

Found = TypeVar("Found")
LOOK_S = 0.2
"""Polling interval of the wait: an interrupt right before an unbounded wait would only be handled at its end."""


@dataclass(frozen=True)
class Done(Generic[Found]):
    """The result of the work. ``raised`` is what was raised meanwhile, including Ctrl-C; the caller raises it once it
    has handled the result."""

    found: Found
    raised: BaseException | None


def work_beside(work: Callable[[], Found], meanwhile: Callable[[], None], name: str) -> Done[Found]:
    """Run ``work`` in a thread of this name and ``meanwhile`` in this one; both have ended when this returns or raises.
    Raises what ``work`` raised and nothing else: an interrupt neither ends the work nor leaves it running."""
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
    while not both_over:  # no call outside the try block: an interrupt can be raised at any call
        try:
            with working(name):
                if not started:
                    job.run()  # here a further interrupt would end it; the first one came before the thread could start
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
    """Work that runs once, in whichever thread claims it first."""

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
