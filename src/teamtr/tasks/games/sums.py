"""Sums: whole numbers to add, made by code, for teams of models that can already write.

A small instruct model gets some of them right and not most, which is where a team has something to learn; nothing
has to be downloaded, and the answer to any sum is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from teamtr.errors import UserError
from teamtr.grading import last_number
from teamtr.randomness import generator
from teamtr.tasks.base import WrongAnswer
from teamtr.tasks.games.code_exchange import FormatExample
from teamtr.types import Problem, Verdict

TEST_PROBLEMS = 256


@dataclass
class Sums:
    """``terms`` numbers of ``digits`` digits each; the last number of the team's answer counts.

    Training draws from at most ``problems`` different sums; the test split holds others.
    """

    terms: int = 2
    digits: int = 2
    problems_in_all: int = 4096
    seed: int = 0

    agents: tuple[str, ...] = ()
    reward_range: float | None = 1.0
    warnings: tuple[str, ...] = ()
    _splits: dict[str, tuple[Problem, ...]] = field(init=False)

    def __post_init__(self) -> None:
        smallest, largest = (0 if self.digits == 1 else 10 ** (self.digits - 1)), 10**self.digits - 1
        possible = float(largest - smallest + 1) ** self.terms
        count = int(min(self.problems_in_all, possible))
        if count < 2:
            raise ValueError("sums needs at least two different problems: use more terms or digits")
        rng = generator(self.seed, "sums", self.terms, self.digits)
        drawn: dict[tuple[int, ...], None] = {}
        while len(drawn) < count:
            for row in rng.integers(smallest, largest + 1, size=(count, self.terms)):
                drawn.setdefault(tuple(int(x) for x in row))
        every = tuple(_problem(numbers) for numbers in list(drawn)[:count])
        held_out = min(TEST_PROBLEMS, count // 4 or 1)
        self._splits = {"test": every[:held_out], "train": every[held_out:]}

    def problems(self, split: str) -> Sequence[Problem]:
        if split not in self._splits:
            raise UserError(f"sums has no split {split!r}: use one of {sorted(self._splits)}")
        return self._splits[split]

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        return [_verdict(int(problem.answer), answer) for problem, answer, _ in episodes]

    def extract(self, text: str) -> str | None:
        said = last_number(text)
        return None if said is None else str(said)

    def gold(self, problem: Problem) -> str:
        """A reply that must be graded right."""
        return str(problem.answer)

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        """Replies that must not be graded right."""
        right = int(problem.answer)
        other = right + int(rng.integers(1, 9))
        return [
            WrongAnswer("another number", str(other)),
            WrongAnswer("taken back", f"{right}. No, it is {other}."),
            WrongAnswer("a digit more", f"{right}1"),
            WrongAnswer("a share of it", f"{right} %"),
            WrongAnswer("no number", "I do not know."),
        ]

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        """None: the models that play this can already write."""
        return []


def _problem(numbers: tuple[int, ...]) -> Problem:
    text = " + ".join(map(str, numbers))
    return Problem(id=text.replace(" ", ""), prompt=f"What is {text}?", answer=sum(numbers))


def _verdict(right: int, text: str) -> Verdict:
    said = last_number(text)
    if said is None:
        return Verdict("unparsed", 0.0)
    is_right = not said.percent and said.value == right
    return Verdict("right" if is_right else "wrong", float(is_right), str(said))
