"""Benchmarks by name: what the team file calls them, and ``teamtr grade``.

    benchmark("math500", "math500.jsonl")                          # a file, or a hub id such as owner/name:test
    benchmark("gsm8k", {"train": "train.jsonl", "test": "test.jsonl"})
    benchmark("zebralogic", "grid.jsonl", held_out=1.0)
    benchmark("gym:chain_sum", sizes={"train": 64, "test": 16})    # made by code, needs no data
    benchmark("planbench")                                         # a grader alone, for rows that come later

Options are those of the benchmark's class; which there are, an error says.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from teamtr.errors import UserError
from teamtr.own_code import PREFIX as OWN
from teamtr.own_code import make_own
from teamtr.ports import Task
from teamtr.tasks.base import Benchmark
from teamtr.tasks.benchmarks.arbench.detective import DetectiveCases
from teamtr.tasks.benchmarks.arbench.numbers import GuessingNumbers
from teamtr.tasks.benchmarks.arbench.puzzles import SituationPuzzles
from teamtr.tasks.benchmarks.arbench.task import ArBench, rows_in
from teamtr.tasks.benchmarks.autologi import AutoLogi
from teamtr.tasks.benchmarks.gym import Gym
from teamtr.tasks.benchmarks.math import Aime24, Aime25, Dapo, DeepScaleR, Gsm8k, Math, Math500
from teamtr.tasks.benchmarks.planbench.task import PlanBench
from teamtr.tasks.benchmarks.zebralogic import ZebraLogic
from teamtr.tasks.data.rows import DataError, Row, read_rows
from teamtr.tasks.data.split import hold_out

Source = str | Path
Data = Source | Mapping[str, Source] | None
"""One file or hub id, one for each split, or none."""

GYM = "gym:"

_FROM_SOURCES: tuple[type[Math], ...] = (Math, Aime24, Aime25, Math500, Gsm8k, DeepScaleR, Dapo)
_FROM_ROWS: tuple[type[ZebraLogic] | type[AutoLogi] | type[PlanBench], ...] = (ZebraLogic, AutoLogi, PlanBench)
_FROM_FILES: tuple[type[ArBench], ...] = (GuessingNumbers, SituationPuzzles, DetectiveCases)

NAMES = tuple(each.name for group in (_FROM_SOURCES, _FROM_ROWS, _FROM_FILES) for each in group)
"""Every benchmark but reasoning-gym's, whose names are ``gym:FAMILY``."""


def benchmark(name: str, data: Data = None, **options: Any) -> Benchmark:
    """The benchmark of this name on this data. Raises UserError, with the nearest name, where there is none.

    ``python:FILE.py:CLASS`` is one of your own, which brings its own data.
    """
    if name.startswith((GYM, OWN)) and data is not None:
        raise UserError(f"{name} has problems of its own and reads no data: leave path, train and test out")
    if name.startswith(GYM):
        return _called(name, Gym, name.removeprefix(GYM), **options)
    if name.startswith(OWN):
        own = own_task(name, **options)
        if not isinstance(own, Benchmark):
            raise UserError(f"{name} is no teamtr.tasks.Benchmark: it can be trained on, but not grade stored replies")
        return own
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, _MAKERS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"there is no benchmark {name!r}; the nearest is {near!r}, of {', '.join(NAMES)} and {GYM}FAMILY"
        )
    with to_be_had():
        return _MAKERS[name](data, options)


@contextmanager
def to_be_had() -> Iterator[None]:
    """A file or a package that is missing is a mistake that a person can mend."""
    try:
        yield
    except (FileNotFoundError, ImportError) as error:
        raise DataError(str(error)) from None


def benchmark_rows(name: str, source: Source) -> Iterable[Row]:
    """The rows of one of its files; those of AR-Bench may be lists of bare answers."""
    return rows_in(Path(source)) if name in {each.name for each in _FROM_FILES} else read_rows(source)


def own_task(name: str, **options: Any) -> Task:
    """The task that a class in a Python file makes: ``python:FILE.py:CLASS``. The file is run, as any import is."""
    task: Task = make_own(name, options)
    missing = [part for part in ("problems", "grade", "reward_range") if not hasattr(task, part)]
    if missing:
        raise UserError(f"{name}: what it makes has no {missing[0]!r}; derive the class from teamtr.tasks.Benchmark")
    return task


def _sources(name: str, data: Mapping[str, Source]) -> dict[str, Source]:
    other = sorted(data.keys() - {"train", "test"})
    if other or not data:
        raise UserError(f"{name}: the splits are train and test, got {', '.join(other) or 'none'}")
    return dict(data)


def _math(cls: type[Math]) -> Callable[[Data, dict[str, Any]], Benchmark]:
    def make(data: Data, options: dict[str, Any]) -> Benchmark:
        if isinstance(data, Mapping):
            return _called(cls.name, cls, **_sources(cls.name, data), **options)
        return _called(cls.name, cls, data, **options)

    return make


def _puzzles(cls: Any) -> Callable[[Data, dict[str, Any]], Benchmark]:
    def make(data: Data, options: dict[str, Any]) -> Benchmark:
        if data is None or isinstance(data, Mapping):
            _refuse_held_out(cls.name, data, options)
            empty: Benchmark = _called(cls.name, cls, **options)
            if data is None:
                return empty
            splits = {
                split: tuple(empty.problem(row.cells, row.where) for row in read_rows(source))
                for split, source in _sources(cls.name, data).items()
            }
            return _called(cls.name, cls, splits, **options)
        return _called(cls.name, cls.from_rows, read_rows(data), **options)

    return make


def _games(cls: type[ArBench]) -> Callable[[Data, dict[str, Any]], Benchmark]:
    def make(data: Data, options: dict[str, Any]) -> Benchmark:
        if data is None or isinstance(data, Mapping):
            _refuse_held_out(cls.name, data, options)
            if data is None:
                return _called(cls.name, cls, **options)
            return _called(cls.name, cls.from_files, _sources(cls.name, data), **options)
        held_out = options.pop("held_out", 1.0)
        whole = _called(cls.name, cls.from_files, {"test": data}, **options)
        return _called(cls.name, cls, hold_out(whole.problems("test"), held_out, lambda p: p.id), **options)

    return make


_MAKERS: dict[str, Callable[[Data, dict[str, Any]], Benchmark]] = {
    **{each.name: _math(each) for each in _FROM_SOURCES},
    **{each.name: _puzzles(each) for each in _FROM_ROWS},
    **{each.name: _games(each) for each in _FROM_FILES},
}


def _refuse_held_out(name: str, data: Data, options: Mapping[str, Any]) -> None:
    if "held_out" in options:
        why = "there is no data" if data is None else "train and test are given apart"
        raise UserError(f"{name}: held_out is a share of one file, but {why}: leave it out")


def _called(name: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """``make`` called; an option that it does not have is named, with those that it has."""
    known = [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise UserError(f"{name} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return make(*arguments, **options)
