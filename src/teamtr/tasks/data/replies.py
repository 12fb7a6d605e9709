"""Grades replies that are stored in a file: ``teamtr grade``.

A row has ``response``, the reply, and says which problem it answers: by ``id``, looked up in data files, or by the
problem's own fields. A benchmark that stores its replies in another form parses them itself (``Benchmark.stored``). A
row is written as it was read, with ``verdict``, ``reward`` and ``extracted`` added.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from teamtr.errors import UserError
from teamtr.store.atomic import whole_file
from teamtr.tasks.base import RESPONSE, Benchmark, Source, name_in, to_be_had
from teamtr.tasks.benchmarks.gym import Gym
from teamtr.tasks.data.rows import DataError, Row, read_rows
from teamtr.tasks.registry import benchmark, task_class
from teamtr.types import Problem, Verdict

ADDED = ("verdict", "reward", "extracted")
ROWS_AT_A_TIME = 512


class Trials(NamedTuple):
    """The number of replies to one problem, and how many of them are right."""

    tried: int
    right: int


@dataclass
class Graded:
    """The result of grading a file."""

    rows: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    reward: float = 0.0
    """Sum of the finite rewards."""
    warnings: tuple[str, ...] = ()
    """The task's warnings about its grader and data."""
    trials: dict[tuple[str, str], Trials] = field(default_factory=dict)
    """By the id and prompt of the problem."""
    failures: Counter[str] = field(default_factory=Counter)
    """How often each failure of the grader occurred."""
    printed: str = ""
    """The beginning of the grader's output."""

    @property
    def accuracy(self) -> float:
        return self.verdicts["right"] / self.rows

    @property
    def mean_reward(self) -> float:
        return self.reward / self.rows

    def add(self, problem: Problem, verdict: Verdict) -> None:
        self.rows += 1
        key = problem.id, problem.prompt
        done = self.trials.get(key, Trials(0, 0))
        self.trials[key] = Trials(done.tried + 1, done.right + verdict.right)
        self.verdicts[verdict.kind] += 1
        self.reward += verdict.reward if math.isfinite(verdict.reward) else 0.0


def grade_file(
    name: str,
    responses: Path,
    out: Path,
    *,
    data: Sequence[Source] = (),
    options: Mapping[str, Any] | None = None,
) -> Graded:
    """Grade every row of ``responses`` with this benchmark and write it to ``out``, in the same order. ``options`` are
    those of the task, as in its section of a team file.

    A row that cannot be used raises an error that names its line, and nothing is written.
    """
    task = _task(name, data, options or {})
    try:
        with to_be_had():
            known = Known(task, data) if data and not task.needs_data_to_grade else _brought_along(task)
            rows = read_rows(responses, half_characters=True)  # a server may cut inside a character
        graded = Graded(warnings=task.warnings)
        with whole_file(out) as file:
            for row, problem, verdict in _graded(task, known, rows):
                file.write(json.dumps(_with_verdict(row, verdict)) + "\n")
                graded.add(problem, verdict)
            if not graded.rows:
                raise DataError(f"{responses}: there is no row to grade")
        graded.failures, graded.printed = Counter(task.failures), task.printed.take()
        return graded
    finally:
        task.close()


def _task(name: str, data: Sequence[Source], options: Mapping[str, Any]) -> Benchmark:
    cls = task_class(name)
    if cls is None or not issubclass(cls, Benchmark) or not cls.needs_data_to_grade:
        return benchmark(name, **options)
    if len(data) > 1:
        raise UserError(f"{name} is graded on one set of data: give --data once, got {', '.join(map(str, data))}")
    return benchmark(name, data[0] if data else None, **options)


class _Named(NamedTuple):
    problem: Problem
    where: str


class Known:
    """The problems of data files, by the names that rows of replies use: the id in the data row, or the task's own id.

    Within one file, the second problem of a name is called NAME-2, as tasks do. A name that occurs in two files is
    resolved by the problem's labels, if the row has them (``domain: mystery_blocksworld``), or else refused.
    """

    def __init__(self, task: Benchmark, data: Sequence[Source]) -> None:
        self._task = task
        self._files = ", ".join(map(str, data))
        self._by_name: dict[str, list[_Named]] = {}
        for source in data:
            in_file: dict[str, _Named] = {}
            for row in task.rows(source):
                problem = _stated(task, row.cells, row.where)
                for name in dict.fromkeys((name_in(row) or problem.id, problem.id)):
                    in_file[_free(name, in_file)] = _Named(problem, row.where)
            for name, named in in_file.items():
                self._by_name.setdefault(name, []).append(named)

    def decides(self, name: str) -> bool:
        """Whether a row with this name must be about one of these problems, whatever its other fields are."""
        return bool(self._by_name)

    def find(self, name: str, row: Row) -> Problem:
        found = self._by_name.get(name, [])
        if not found:
            few = ", ".join(islice(self._by_name, 5))
            raise DataError(f"{row.where}: no problem {name!r} in {self._files}, where they are called {few}, ...")
        meant = found if len(found) == 1 else [named for named in found if self._fits(named.problem, row)]
        if len(meant) != 1:
            places = " and ".join(named.where for named in found[:2])
            raise DataError(
                f"{row.where}: {name!r} is the name of several problems ({places}): give one file with --data, or the "
                "problem's own fields in the row"
            )
        return meant[0].problem

    def _fits(self, problem: Problem, row: Row) -> bool:
        labels = self._task.labels(problem)
        return all(str(row.cells[key]) == value for key, value in labels.items() if key in row.cells)


class _Questions(Known):
    """The problems that a family of reasoning-gym generates, generated when the first is looked up by id. A row's own
    fields take precedence: other settings generate other questions of the same name."""

    def __init__(self, task: Benchmark) -> None:
        super().__init__(task, ())
        self._files = f"the problems of {task.name}"

    def decides(self, name: str) -> bool:
        return False

    def find(self, name: str, row: Row) -> Problem:
        self._make()
        return super().find(name, row)

    def _make(self) -> None:
        if not self._by_name:
            for split in ("train", "test"):
                with suppress(UserError):  # it may have only one of them
                    for problem in self._task.problems(split):
                        self._by_name[problem.id] = [_Named(problem, self._files)]


class _OwnProblems(_Questions):
    """The problems that a class provides itself. A known id decides, because the class may accept any row."""

    def any(self) -> bool:
        self._make()
        return bool(self._by_name)

    def decides(self, name: str) -> bool:
        self._make()
        return name in self._by_name


class _ProblemsOfData(_OwnProblems):
    """The problems of a task that was built with its data; there are no others."""

    def decides(self, name: str) -> bool:
        return True


def _brought_along(task: Benchmark) -> Known:
    """The problems that a task has without data files, or was built with."""
    if task.needs_data_to_grade:
        return _ProblemsOfData(task)
    if isinstance(task, Gym):
        return _Questions(task)
    own = _OwnProblems(task)
    return own if own.any() else Known(task, ())


def _stated(task: Benchmark, cells: Mapping[str, Any], where: str) -> Problem:
    """The problem that a row states. Raises DataError, even if a user's class fails with another error."""
    try:
        return task.problem(cells, where)
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            f"{where}: {task.name} cannot make a problem of this row, which has {', '.join(cells) or 'no fields'} "
            f"({type(error).__name__}: {error})"
        ) from error


def _free(name: str, taken: Mapping[str, object]) -> str:
    return next(other for n in count(1) if (other := name if n == 1 else f"{name}-{n}") not in taken)


def _graded(task: Benchmark, known: Known, rows: Iterator[Row]) -> Iterator[tuple[Row, Problem, Verdict]]:
    while chunk := list(islice(rows, ROWS_AT_A_TIME)):
        asked = [_asked(task, known, row) for row in chunk]
        yield from zip(chunk, (problem for problem, _ in asked), task.grade_replies(asked), strict=True)


def _asked(task: Benchmark, known: Known, row: Row) -> tuple[Problem, str]:
    name, reply = task.stored(row)
    if name is not None and known.decides(name):
        return known.find(name, row), reply
    own = {key: value for key, value in row.cells.items() if key not in (RESPONSE, *ADDED)}
    try:
        return _stated(task, own, row.where), reply
    except DataError as error:
        if isinstance(known, _Questions) and name is not None:
            return known.find(name, row), reply
        advice = f"{error}; or give it an id, and the file with the problem as --data"
        raise DataError(advice) from None


def _with_verdict(row: Row, verdict: Verdict) -> dict[str, Any]:
    reward = verdict.reward if math.isfinite(verdict.reward) else None
    return {**row.cells, "verdict": verdict.kind, "reward": reward, "extracted": verdict.extracted}
