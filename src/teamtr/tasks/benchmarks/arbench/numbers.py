"""AR-Bench, guessing numbers: a secret of four different digits, and exact feedback on every guess."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from teamtr.grading.thinking import after_thinking
from teamtr.tasks.base import WrongAnswer
from teamtr.tasks.benchmarks.arbench.task import ENVIRONMENT, ArBench, budget, row_id, unusable
from teamtr.tasks.benchmarks.arbench.texts import Texts, fill
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.types import Message, Problem, Reply, Situation, Verdict

NUMBER_KEYS = ("answer", "number", "secret", "true_number")
DIGITS = "0123456789"


class Feedback(NamedTuple):
    """How many digits of a guess are in the right place, and how many occur in the secret but in another place."""

    right_place: int
    wrong_place: int


def feedback(secret: str, guess: str) -> Feedback:
    """The feedback on a guess; a digit of the guess is counted at most as often as it occurs in the secret."""
    right = sum(s == g for s, g in zip(secret, guess, strict=True))
    common = sum((Counter(secret) & Counter(guess)).values())
    return Feedback(right, common - right)


def guess_in(text: str) -> str | None:
    """The last four consecutive digits, matched from the left, as the benchmark's evaluator finds them: in "83621" they
    are 8362. None if there are none."""
    found = re.findall(r"\d{4}", after_thinking(text))
    return "".join(str(int(digit)) for digit in found[-1]) if found else None


@task("arbench:gn")
class GuessingNumbers(ArBench):
    """``arbench:gn``. The right answer is the secret number; nothing else earns a reward."""

    kind: ClassVar[str] = "gn"
    alphabet = DIGITS

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """A row is ``{"answer": "0123"}``; the key may also be ``number``, ``secret`` or ``true_number``."""
        value = next((row[key] for key in NUMBER_KEYS if key in row), None)
        number = str(value).zfill(4) if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if not re.fullmatch(r"[0-9]{4}", number) or len(set(number)) < 4:
            raise unusable(where, f"'answer' must be a number of four different digits, found {shown(value)}")
        return Problem(id=row_id(row, number), prompt=self.texts["statement"], answer=number)

    @property
    def environment(self) -> NumberKeeper:
        return NumberKeeper(self.texts)

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        return [_verdict(problem.answer, guess_in(text)) for problem, text in replies]

    def extract(self, text: str) -> str | None:
        return guess_in(text)

    def gold(self, problem: Problem) -> str:
        return f"Guess: {problem.answer}"

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        secret = str(problem.answer)
        unused = [digit for digit in DIGITS if digit not in secret]
        place, digit = int(rng.integers(4)), str(rng.choice(unused))
        one_off = secret[:place] + digit + secret[place + 1 :]
        return [
            WrongAnswer("one digit off", f"Guess: {one_off}"),
            WrongAnswer("another order", f"Guess: {secret[1:]}{secret[0]}"),
            WrongAnswer("no digit right", f"Guess: {''.join(rng.permutation(unused)[:4])}"),
            WrongAnswer("right, then taken back", f"It is {secret}. No, it is {one_off}."),
            WrongAnswer("three digits", f"Guess: {secret[:3]}"),
            WrongAnswer("not in a row", f"Guess: {' '.join(secret)}"),
            WrongAnswer("no digits", "I cannot tell."),
            WrongAnswer("empty", ""),
        ]


@dataclass(frozen=True)
class NumberKeeper:
    """The environment: gives feedback on guesses; a right one wins and ends the episode."""

    texts: Texts

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        return [self._reply(situation) for situation in situations]

    def speakers(self, problem: Problem) -> tuple[str, ...]:
        return (ENVIRONMENT,)

    def _reply(self, situation: Situation) -> Reply:
        if not situation.acts:
            return _says(budget(self.texts, situation))
        secret, guess = str(situation.problem.answer), guess_in(situation.acts[-1])
        if guess == secret:
            return Reply((Message(ENVIRONMENT, fill(self.texts["won"], guess=guess)),), ends=True)
        if guess is None:
            heard = self.texts["lost"]
        else:
            right, wrong = feedback(secret, guess)
            heard = fill(self.texts["feedback"], right=right, wrong=wrong)
        return _says(f"{heard}\n{budget(self.texts, situation)}")


def _says(text: str) -> Reply:
    return Reply((Message(ENVIRONMENT, text),))


def _verdict(secret: str, guess: str | None) -> Verdict:
    if guess is None:
        return Verdict("unparsed", 0.0)
    return Verdict("right", 1.0, guess) if guess == secret else Verdict("wrong", 0.0, guess)
