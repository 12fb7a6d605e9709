"""What every benchmark offers: problems from rows, a grader of replies, and answers known to be right or wrong.

A benchmark is one class in one file. Its rows come from a local file or the hub, never from the project. The known
answers are its self-test (``teamtr.session.checks``) and its test suite: a grader that takes a wrong answer, or refuses
the gold one, stops a run before it starts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from teamtr.errors import UserError
from teamtr.tasks.games.code_exchange import FormatExample
from teamtr.types import Problem, Verdict


@dataclass(frozen=True)
class WrongAnswer:
    """A reply that must not be graded right, and what is wrong with it in a word or two."""

    kind: str
    reply: str


class Benchmark(ABC):
    """A task whose problems are rows and whose replies can be graded one by one.

    Attributes:
        name: as the team file and ``teamtr grade`` call it.
        samples: the K that the paper evaluates with.
        reward_range: largest minus smallest reward.
        warnings: what is odd in the data though usable.
        failures: how often each grader failure (crash, timeout) came up.
    """

    name: ClassVar[str]
    samples: ClassVar[int] = 1
    agents: tuple[str, ...] = ()
    reward_range: float | None = 1.0

    def __init__(self, splits: Mapping[str, Sequence[Problem]] | None = None) -> None:
        self.warnings: tuple[str, ...] = ()
        self.failures: Counter[str] = Counter()
        self._splits = {split: tuple(problems) for split, problems in (splits or {}).items()}

    def problems(self, split: str) -> Sequence[Problem]:
        if split not in self._splits:
            raise UserError(f"{self.name} has no split {split!r}: use one of {sorted(self._splits)}")
        return self._splits[split]

    @abstractmethod
    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """The problem that one row states; ``where`` begins the error when it states none."""

    @abstractmethod
    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict per (problem, reply). Never raises on any text."""

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        return self.grade_replies([(problem, answer) for problem, answer, _ in episodes])

    @abstractmethod
    def extract(self, text: str) -> str | None:
        """The answer that a reply states, in a form that votes can be counted in; None when it states none."""

    @abstractmethod
    def gold(self, problem: Problem) -> str:
        """A reply that must be graded right."""

    @abstractmethod
    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        """At least five replies of different kinds that must not be graded right."""

    def labels(self, problem: Problem) -> dict[str, str]:
        """What tables are broken down by, such as {"size": "3*4"}."""
        return {}

    def measures(self, problem: Problem, reply: str) -> dict[str, float]:
        """What is reported of a reply besides its verdict, each from 0 to 1, such as {"cell_accuracy": 0.75}."""
        return {}

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        """None: benchmarks are for models that can already write."""
        return []

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End worker processes now rather than at exit."""
