"""Parallel work in several processes, each with one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, overload

from teamtr.errors import TeamTRError

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE_S = 10.0
"""How many seconds a process may take to end before it is killed."""


@dataclass(frozen=True)
class Died:
    """In place of a result: the process that computed it ended by itself."""

    exit_code: int | None


@overload
def beside(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[tuple[Item, Result]]: ...
@overload
def beside(
    work: Callable[[Item], Result], items: Sequence[Item], workers: int, *, bear_deaths: bool, anew: bool = False
) -> Iterator[tuple[Item, Result | Died]]: ...
def beside(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    *,
    bear_deaths: bool = False,
    anew: bool = False,
) -> Iterator[tuple[Item, Result | Died]]:
    """Yield the result of ``work`` for each item, in order of completion; items are started in order.

    ``work`` must be a function of a module, and items and results must be picklable. Exceptions of ``work`` are raised
    here, and so is the death of a process, unless ``bear_deaths``: then another process takes its place. With ``anew``,
    every item has its own process, which frees GPU memory when it ends. However the iteration ends, also by Ctrl-C, the
    processes end with it.
    """
    waiting = deque(items)
    crew = [_Worker(work) for _ in range(min(workers, len(items)))]
    busy: dict[Connection, tuple[_Worker, Item]] = {}

    def give(worker: _Worker) -> None:
        if waiting:
            item = waiting.popleft()
            worker.pipe.send(item)
            busy[worker.pipe] = (worker, item)

    try:
        for worker in crew:
            give(worker)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, item = busy.pop(pipe)
                result = worker.answer()
                if isinstance(result, Died) and not bear_deaths:
                    raise TeamTRError(
                        f"a worker process ended by itself (exit code {result.exit_code}; -9 is often a lack of "
                        "memory): fewer workers need less"
                    )
                if waiting and (anew or isinstance(result, Died)):
                    worker.end()
                    crew[crew.index(worker)] = worker = _Worker(work)
                give(worker)
                yield item, result
    finally:
        for worker in crew:
            worker.process.terminate()
        for worker in crew:
            worker.end()


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """A process that waits for items, and the pipe to it."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()  # otherwise the death of the process is not noticed here

    def answer(self) -> Any:
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return Died(self.process.exitcode)
        if not isinstance(answer, _Failure):
            return answer
        if answer.foreseen:
            raise TeamTRError(answer.message)
        raise RuntimeError(f"in a worker process:\n{answer.message}")

    def end(self) -> None:
        self.pipe.close()  # a process that waits for an item ends by that
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@dataclass(frozen=True)
class _Failure:
    """An exception of the work: its message if it is a known error, otherwise its traceback."""

    message: str
    foreseen: bool


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    """Process items until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that temporary folders are removed
    os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that the work imports, and for its own processes
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        answer: Any
        try:
            answer = work(item)
        except TeamTRError as error:
            answer = _Failure(str(error), foreseen=True)
        except Exception:
            answer = _Failure(traceback.format_exc(), foreseen=False)
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return
