"""Sums: generated additions of whole numbers, for teams of models that can already write.

A small instruct model gets some of them right but not most, so a team has something to learn. Nothing has to be
downloaded, and every answer is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from pydantic import Strict

from teamtr.grading import last_number
from teamtr.randomness import generator
from teamtr.settings.section import key
from teamtr.tasks.base import Task, WrongAnswer
from teamtr.tasks.config import TaskConfig, TaskContext
from teamtr.tasks.registry import task
from teamtr.types import Problem, Verdict

TEST_PROBLEMS = 256


@task("sums")
class Sums(Task):
    """``terms`` numbers of ``digits`` digits each; the last number of the team's answer counts.

    Training draws from at most ``problems_in_all`` different sums; the test split holds others.
    """

    class Config(TaskConfig):
        """Generated sums of whole numbers, for models that can already write."""

        terms: Annotated[int, Strict(), Ge(2), Le(16)] = key(2, "Numbers to add.")
        digits: Annotated[int, Strict(), Ge(1), Le(9)] = key(2, "Digits of each number.")
        problems: Annotated[int, Strict(), Ge(8)] = key(
            4096, "Most different sums; a quarter of them, up to 256, is held out."
        )

        def arguments(self, context: TaskContext) -> dict[str, Any]:
            sizes = {"terms": self.terms, "digits": self.digits, "problems_in_all": self.problems}
            return {**sizes, "seed": context.seed}

    reward_range = 1.0

    def __init__(self, terms: int = 2, digits: int = 2, problems_in_all: int = 4096, seed: int = 0) -> None:
        smallest, largest = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
        possible = float(largest - smallest + 1) ** terms
        count = int(min(problems_in_all, possible))
        if count < 2:
            raise ValueError("sums needs at least two different problems: use more terms or digits")
        rng = generator(seed, "sums", terms, digits)
        drawn: dict[tuple[int, ...], None] = {}
        while len(drawn) < count:
            for row in rng.integers(smallest, largest + 1, size=(count, terms)):
                drawn.setdefault(tuple(int(x) for x in row))
        every = tuple(_problem(numbers) for numbers in list(drawn)[:count])
        held_out = min(TEST_PROBLEMS, count // 4 or 1)
        super().__init__({"test": every[:held_out], "train": every[held_out:]})

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


def _problem(numbers: tuple[int, ...]) -> Problem:
    text = " + ".join(map(str, numbers))
    return Problem(id=text.replace(" ", ""), prompt=f"What is {text}?", answer=sum(numbers))


def _verdict(right: int, text: str) -> Verdict:
    said = last_number(text)
    if said is None:
        return Verdict("unparsed", 0.0)
    is_right = not said.percent and said.value == right
    return Verdict("right" if is_right else "wrong", float(is_right), str(said))
