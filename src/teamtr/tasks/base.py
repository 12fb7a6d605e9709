"""What every task offers, with a default for all that is optional, and what benchmarks have besides.

A task is one class in one file: its problems, its grader, and a nested ``Config`` with the keys that the team file may
give. ``@task("name")`` (``teamtr.tasks.registry``) makes it known. Answers known to be right or wrong are its self-test
(``teamtr.session.checks``): a grader that takes a wrong answer, or refuses the gold one, stops a run before it starts.
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
from teamtr.tasks.data.split import hold_out
from teamtr.tasks.players import Player
from teamtr.text import shown
from teamtr.types import Event, Problem, Verdict

Source = str | Path
Data = Source | Mapping[str, Source] | None
"""One file or hub id, one for each split, or none."""

RESPONSE = "response"
ID_KEYS = ("id", "instance_id", "unique_id", "problem_id", "idx", "index")
"""What a row may call its problem by, the first that is there."""

FormatExample = tuple[str, Problem, list[tuple[str, str]], str]
"""(agent, problem, what was said before as (author, text), the message to imitate in form)."""


@dataclass(frozen=True)
class WrongAnswer:
    """A reply that must not be graded right, and what is wrong with it in a word or two."""

    kind: str
    reply: str


class StoredReply(NamedTuple):
    """What a row of stored replies says: the name of the problem, if it gives one, and the reply."""

    name: str | None
    reply: str


class Task(ABC):
    """Problems and their grader. Only ``grade``, and ``problems`` or the splits given here, are a must.

    Attributes:
        Config: the keys of its section in the team file.
        name: as the team file calls it; ``@task`` sets it.
        agents: whom the task is made for; empty for any team.
        samples: episodes of each problem when it is evaluated.
        reward_range: largest minus smallest reward, None when not known: certificates need it. A discount brings
            rewards nearer to 0, so for plans with gamma < 1 count 0 among them.
        alphabet: the characters that messages are made of, which tabular agents begin with; empty for all.
        player: who plays the other roles of an interactive task.
        warnings: what is odd in the data though usable.
        grades_conversation: whether a verdict depends on what every agent said rather than on the answer.
        silence: what stands for an agent's words where ``plan.credit: difference`` asks what would be without it.
        grades_early: whether each verdict depends on its own episode alone, and ``grade`` may be called from another
            thread: then episodes are graded while others are still played. Worth it where other processes grade.
        failures: how often each grader failure (crash, timeout) came up.
        printed: what its grader printed and nobody has been shown yet.
        environment: the other side of an interactive task; None for the others.
        tools: what agents can call, where the task brings tools of its own.
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
        self._splits = {split: tuple(problems) for split, problems in (splits or {}).items()}

    @classmethod
    def from_config(cls, config: TaskConfig, context: TaskContext) -> Task:
        """The task that a section of the team file describes."""
        return cls(**config.arguments(context))

    @property
    def own_code(self) -> object:
        """What of this task is a person's own code, and the plain values that it was made with: a run that goes on with
        another is refused."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, bool | int | float | str)}
        plain.pop("grades_early", None)  # when something is graded does not change how
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
        """Those of ``train`` or ``test``."""
        if split not in self._splits:
            remedy = "; give task.test, or set eval.every: 0 where nothing is to be held out" if split == "test" else ""
            raise UserError(f"{self.name} has no split {split!r}: use one of {sorted(self._splits)}{remedy}")
        return self._splits[split]

    @abstractmethod
    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        """One verdict per (problem, the team's answer, all messages' texts). The texts of a played episode are a
        ``teamtr.types.Transcript``, which knows who said them."""

    def outcome(self, problem: Problem, events: Sequence[Event]) -> str | None:
        """Of an interactive task: what is graded, as the answer, where more than the team's last word counts, such as
        what its calls did. None where the team's answer is graded."""
        return None

    def extract(self, text: str) -> str | None:
        """The answer in a message, in a form that votes can be counted in; None when it states none."""
        return text

    def gold(self, problem: Problem) -> str | None:
        """A reply that must be graded right; None where none is known."""
        return None

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        """Replies that must not be graded right."""
        return []

    def labels(self, problem: Problem) -> dict[str, str]:
        """What tables are broken down by, such as {"size": "3*4"}."""
        return {}

    def measures(self, problem: Problem, reply: str) -> dict[str, float]:
        """What is reported of a reply besides its verdict, each from 0 to 1, such as {"cell_accuracy": 0.75}."""
        return {}

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        """``count`` messages that teach the tiny model the form of this task's messages; none where it has none."""
        return []

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End worker processes now rather than at exit."""


class Benchmark(Task):
    """A task whose problems are rows and whose replies can be graded one by one, also by ``teamtr grade``.

    Its rows come from a local file or the hub, never from the project.
    """

    Config = BenchmarkConfig
    samples = 1
    reward_range: float | None = 1.0
    held_out: ClassVar[float] = 0.2
    """Share of one file that is the test split, where the team file does not say."""
    needs_data_to_grade: ClassVar[bool] = False
    """Whether it cannot even grade before it has its data: rows then name problems of that data."""

    @classmethod
    def from_config(cls, config: TaskConfig, context: TaskContext) -> Task:
        data = config.data if isinstance(config, BenchmarkConfig) else None
        return cls.from_data(config.name, data, **config.arguments(context))

    @classmethod
    def from_data(cls, name: str, data: Data, **options: Any) -> Benchmark:
        """The benchmark on one file that is shared out, on a file for each split, or, without data, a grader alone.

        ``name`` is what it was asked for by; the options are the keyword arguments of the class.
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
        """Splits ``train`` and ``test``, for a class that is called with splits. A problem's side depends on a hash
        of ``side`` alone; with ``held_out`` 1 all of them are the test."""
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
        """What decides whether a problem is held out: problems of the same text stay together."""
        return problem.id

    @abstractmethod
    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """The problem that one row states; ``where`` begins the error when it states none."""

    def stored(self, row: Row) -> StoredReply:
        """The reply that a row of ``teamtr grade`` holds. Raises DataError where it holds none."""
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
        """The answer that a reply states, in a form that votes can be counted in; None when it states none."""

    @abstractmethod
    def gold(self, problem: Problem) -> str | None:
        """A reply that must be graded right; None where only a person's own function knows."""

    @abstractmethod
    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        """At least five replies of different kinds that must not be graded right; none where none are known."""


def name_in(row: Row) -> str | None:
    """What a row calls its problem."""
    return next((str(row.cells[key]) for key in ID_KEYS if row.cells.get(key) is not None), None)


@contextmanager
def to_be_had() -> Iterator[None]:
    """A file or a package that is missing is a mistake that a person can mend."""
    try:
        yield
    except (FileNotFoundError, ImportError) as error:
        raise DataError(str(error)) from None


def sources(name: str, data: Mapping[str, Source]) -> dict[str, Source]:
    """The source of each split, looked over."""
    other = sorted(data.keys() - {"train", "test"})
    if other or not data:
        raise UserError(f"{name}: the splits are train and test, got {', '.join(other) or 'none'}")
    return dict(data)


def called(name: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """``make`` called; an option that it does not have is named, with those that it has."""
    parameters = inspect.signature(make).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(options.keys() - set(known))
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(f"{name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return make(*arguments, **options)
