"""The base classes ``Task``, with a default for everything optional, and ``Benchmark``.

A task is one class in one file: its problems, its grader, and a nested ``Config`` with the keys that the team file may
give. ``@task("name")`` (``teamtr.tasks.registry``) registers it. Answers known to be right or wrong are its self-test
(``teamtr.session.checks``): a grader that accepts a wrong answer or rejects the gold one stops a run before it starts.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from teamtr.errors import UserError
from teamtr.grading.printed import Printed
from teamtr.ports import Environment, Tools
from teamtr.tasks.config import BenchmarkConfig, TaskConfig, TaskContext
from teamtr.tasks.data.rows import DataError, Row, read_rows
from teamtr.tasks.data.split import hold_out, with_own_ids
from teamtr.tasks.players import Player
from teamtr.text import shown
from teamtr.types import Event, Problem, Verdict

Source = str | Path
Data = Source | Mapping[str, Source] | None
"""One file or hub id, one per split, or none."""

RESPONSE = "response"
ID_KEYS = ("id", "instance_id", "unique_id", "problem_id", "idx", "index")
"""Columns that may hold a problem's id; the first one that a row has is used."""

FormatExample = tuple[str, Problem, list[tuple[str, str]], str]
"""(agent, problem, earlier messages as (author, text), the message whose form is to be imitated)."""


@dataclass(frozen=True)
class WrongAnswer:
    """A reply that must not be graded right; ``kind`` says in a word or two what is wrong with it."""

    kind: str
    reply: str


class StoredReply(NamedTuple):
    """The content of a row of stored replies: the problem's name, if the row gives one, and the reply."""

    name: str | None
    reply: str


class Task(ABC):
    """Problems and their grader. Required are ``grade``, and either ``problems`` or splits given to the constructor.

    Attributes:
        Config: the keys of its section in the team file.
        name: its name in team files; set by ``@task``.
        agents: the names of the agents that the task needs; empty for any team.
        samples: episodes per problem in an evaluation.
        reward_range: largest minus smallest reward, which certificates need; None if unknown. A discount moves rewards
            towards 0, so for plans with gamma < 1 the range must include 0.
        alphabet: the characters that messages consist of, which tabular agents favor initially; empty for all.
        player: plays the other roles of an interactive task.
        warnings: oddities of the data that do not prevent its use.
        grades_conversation: whether a verdict depends on all agents' messages rather than on the answer.
        silence: the text that replaces an agent's messages for the counterfactual of ``plan.credit: difference``.
        grades_early: whether each verdict depends on its own episode alone, and ``grade`` may be called from another
            thread. If so, episodes are graded while others are still played. Useful if other processes do the grading.
        failures: how often each grader failure (crash, timeout) occurred.
        printed: output of the grader that has not been shown yet.
        environment: the environment of an interactive task; None for other tasks.
        tools: the tools that the task itself gives to agents; None if it has none.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    name: str = "this task"
    agents: tuple[str, ...] = ()
    samples: int = 4
    reward_range: float | None = None
    alphabet: str = ""
    player: Player | None = None
    warnings: tuple[str, ...] = ()
    grades_conversation: bool = False
    grades_early: bool = False
    silence: str = ""
    _splits: Mapping[str, tuple[Problem, ...]] = MappingProxyType({})

    def __init__(self, splits: Mapping[str, Iterable[Problem]] | None = None) -> None:
        self._splits = {split: with_own_ids(problems) for split, problems in (splits or {}).items()}

    @classmethod
    def from_config(cls, config: TaskConfig, context: TaskContext) -> Task:
        """The task that a section of the team file describes."""
        return cls(**config.arguments(context))

    @property
    def own_code(self) -> object:
        """The user-written code of this task and the plain values that it was made with. A run is not resumed with
        others."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, bool | int | float | str)}
        plain.pop("grades_early", None)  # it changes when answers are graded, not how
        return type(self), plain

    @cached_property
    def failures(self) -> Counter[str]:
        return Counter()

    @cached_property
    def printed(self) -> Printed:
        return Printed()

    @cached_property
    def environment(self) -> Environment | None:
        return None

    @cached_property
    def tools(self) -> Tools | None:
        return None

    def problems(self, split: str) -> Sequence[Problem]:
        """The problems of the split ``train`` or ``test``."""
        if split not in self._splits:
            remedy = "; give task.test, or set eval.every: 0 where nothing is to be held out" if split == "test" else ""
            raise UserError(f"{self.name} has no split {split!r}: use one of {sorted(self._splits)}{remedy}")
        return self._splits[split]

    @abstractmethod
    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        """One verdict per (problem, the team's answer, all messages' texts). The texts of a played episode are a
        ``teamtr.types.Transcript``, which also holds their authors."""

    def outcome(self, problem: Problem, events: Sequence[Event]) -> str | None:
        """For an interactive task: the text to grade as the answer, if more than the team's answer counts, such as the
        effect of its calls. None: the team's answer is graded."""
        return None

    def extract(self, text: str) -> str | None:
        """The answer in a message, in a form in which votes can be counted; None if it states none."""
        return text

    def gold(self, problem: Problem) -> str | None:
        """A reply that must be graded right; None if none is known."""
        return None

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        """Replies that must not be graded right."""
        return []

    def labels(self, problem: Problem) -> dict[str, str]:
        """The labels by which results are broken down, such as {"size": "3*4"}."""
        return {}

    def measures(self, problem: Problem, reply: str) -> dict[str, float]:
        """Metrics of a reply besides its verdict, each from 0 to 1, such as {"cell_accuracy": 0.75}."""
        return {}

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        """``count`` messages that teach the tiny model the form of this task's messages; empty if it has none."""
        return []

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Stop worker processes now rather than at exit."""


class Benchmark(Task):
    """A task whose problems are rows and whose replies can be graded one by one, also by ``teamtr grade``.

    Its rows come from a local file or the hub; no data is shipped with TeamTR.
    """

    Config = BenchmarkConfig
    samples = 1
    reward_range: float | None = 1.0
    held_out: ClassVar[float] = 0.2
    """Share of a single file that becomes the test split, unless the team file says otherwise."""
    needs_data_to_grade: ClassVar[bool] = False
    """Whether grading stored replies needs the data too, because their rows name problems of that data."""

    @classmethod
    def from_config(cls, config: TaskConfig, context: TaskContext) -> Task:
        data = config.data if isinstance(config, BenchmarkConfig) else None
        return cls.from_data(config.name, data, **config.arguments(context))

    @classmethod
    def from_data(cls, name: str, data: Data, **options: Any) -> Benchmark:
        """The benchmark on one file that is split, on a file per split, or, without data, as a grader alone.

        ``name`` is the name by which it was requested; the options are the keyword arguments of the class.
        """
        with to_be_had():
            if data is not None and not isinstance(data, Mapping):
                return called(name, cls.from_rows, cls.rows(data), **options)
            if "held_out" in options:
                why = "there is no data" if data is None else "train and test are given apart"
                raise UserError(f"{name}: held_out is a share of one file, but {why}: leave it out")
            reader: Self = called(name, cls, **options)
            if data is None:
                return reader
            splits = {split: reader.problems_of(cls.rows(source)) for split, source in sources(name, data).items()}
            return cls(splits, **options)

    @classmethod
    def from_rows(cls, rows: Iterable[Row], *, held_out: float | None = None, **options: Any) -> Self:
        """Splits ``train`` and ``test``, for a class whose constructor takes splits. A problem's split depends on a
        hash of ``side`` alone; with ``held_out`` 1, all problems are in the test split."""
        reader: Self = called(cls.name, cls, **options)
        share = cls.held_out if held_out is None else held_out
        return cls(hold_out(reader.problems_of(rows), share, reader.side), **options)

    @classmethod
    def rows(cls, source: Source) -> Iterator[Row]:
        """The rows of one of its files."""
        return read_rows(source)

    def problems_of(self, rows: Iterable[Row]) -> Sequence[Problem]:
        return tuple(self.problem(row.cells, row.where) for row in rows)

    def side(self, problem: Problem) -> str:
        """The key whose hash decides whether a problem is held out; problems with the same key stay together."""
        return problem.id

    @abstractmethod
    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """The problem that one row states; ``where`` begins the error message if it states none."""

    def stored(self, row: Row) -> StoredReply:
        """The reply in a row of ``teamtr grade``. Raises DataError if it has none."""
        reply = row.cells.get(RESPONSE)
        if not isinstance(reply, str):
            raise DataError(f"{row.where}: {RESPONSE!r} must be the reply as text, found {shown(reply)}")
        return StoredReply(name_in(row), reply)

    @abstractmethod
    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per (problem, reply). Never raises on any text."""

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        return self.grade_replies([(problem, answer) for problem, answer, _ in episodes])

    @abstractmethod
    def extract(self, text: str) -> str | None:
        """The answer that a reply states, in a form in which votes can be counted; None if it states none."""

    @abstractmethod
    def gold(self, problem: Problem) -> str | None:
        """A reply that must be graded right; None if only a user's function can tell."""

    @abstractmethod
    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        """At least five replies of different kinds that must not be graded right; empty if none are known."""


def name_in(row: Row) -> str | None:
    """The name that a row gives its problem, if any."""
    return next((str(row.cells[key]) for key in ID_KEYS if row.cells.get(key) is not None), None)


@contextmanager
def to_be_had() -> Iterator[None]:
    """Report a missing file or package as a DataError, because the user can fix it."""
    try:
        yield
    except (FileNotFoundError, ImportError) as error:
        raise DataError(str(error)) from None


def sources(name: str, data: Mapping[str, Source]) -> dict[str, Source]:
    """The source of each split, validated."""
    other = sorted(data.keys() - {"train", "test"})
    if other or not data:
        raise UserError(f"{name}: the splits are train and test, got {', '.join(other) or 'none'}")
    return dict(data)


def called(name: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call ``make``. Raises UserError for an unknown option, with a list of the known ones."""
    parameters = inspect.signature(make).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(options.keys() - set(known))
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(f"{name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return make(*arguments, **options)
