"""Code exchange: two agents each see half of a code, and the third must say all of it.

No agent can solve it alone, and messages without information leave the team at chance: the smallest task on which a
team has to invent a protocol.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator

from teamtr.settings.refusals import Refusal, show
from teamtr.settings.section import key
from teamtr.settings.values import Flag, Positive, Share, UpTo1
from teamtr.tasks.base import FormatExample, Task
from teamtr.tasks.config import TaskConfig, TaskContext, TeamSection
from teamtr.tasks.registry import task
from teamtr.types import Problem, Verdict

MOST_CODES = 4096
MOST_HALVES = 65536


def _symbols(value: str) -> str:
    distinct = {symbol.upper() for symbol in value if len(symbol.upper()) == 1 and not symbol.isspace()}
    if len(value) < 2 or len(distinct) != len(value):  # answers are compared without regard to case
        raise ValueError(f"must be at least two characters that differ in more than case, no spaces, got {show(value)}")
    return value


Symbols = Annotated[str, AfterValidator(_symbols)]


@task("code")
class CodeExchange(Task):
    """The task over all codes of ``2 * half_length`` symbols.

    The split holds out *combinations*: every left half and every right half occurs in train and in test, but no
    test code was seen whole. ``CodeExchange("ABCD")`` has 16 codes; with ``held_out=0.25`` each half meets three of
    its partners in training and the fourth only in the test.

    Args:
        symbols: the alphabet; case is ignored.
        half_length: symbols that each of ``left`` and ``right`` sees.
        seed: of the split, and of the selection if there are more than 4096 codes.
        held_out: share of codes in the test split, rounded to a whole number of partners per half.
        partial_credit: an answer of the right length earns the share of its positions that are right.
        skill: share of letters in format examples that are right; the rest are drawn at random.
    """

    class Config(TaskConfig):
        """Code exchange: ``left`` and ``right`` each see half of a code, ``speaker`` must say it all."""

        symbols: Symbols = key("ABCD", "Letters that codes are made of.")
        half_length: Positive = key(1, "Letters in each half of a code.")
        held_out: Share = key(0.25, "Share of all codes held out for evaluation.")
        partial_credit: Flag = key(True, "Reward each right letter, not only the whole code.")
        skill: UpTo1 = key(
            0.0, "Share of right letters in the examples that warm up the tiny model; 0 starts at chance."
        )

        def arguments(self, context: TaskContext) -> dict[str, Any]:
            return {**super().arguments(context), "seed": context.seed}

        def _refusals(self) -> Iterator[Refusal]:
            # The logarithm first: the power itself may be too large to compute.
            if self.half_length * math.log2(len(self.symbols)) > math.log2(MOST_HALVES):
                message = (
                    f"{len(self.symbols)} symbols and task.half_length {self.half_length} make more than "
                    f"{MOST_HALVES} halves; use fewer or shorter"
                )
                yield Refusal(("task", "half_length"), message, (("task", "symbols"), ("task", "half_length")))

        def refusals_of(self, team: TeamSection) -> Iterator[Refusal]:
            """The speaker must answer, and every message must have room for its letters."""
            if set(team.names) != {"left", "right", "speaker"}:
                message = f"task code needs the agents left, right and speaker, got {', '.join(team.names)}"
                yield Refusal(("team", "agents"), message, at_key=True)
                return
            answering = team.closing if team.answer == "last" else (team.answer,)
            wrong = [word for word in answering if word in ("left", "right", "majority")]
            if wrong:  # unknown names are reported elsewhere
                message = f'task code is answered by the speaker, but team.answer gives the word to "{wrong[0]}"'
                yield Refusal(("team", "answer"), message, (("team", "answer"), ("team", "router", "order")))
            for i, agent in enumerate(team.agents):
                letters = self.half_length * (2 if agent.name == "speaker" else 1)
                if agent.model == "tiny" and agent.max_tokens < letters:
                    message = f'agent "{agent.name}" must say {letters} letters, but max_tokens is {agent.max_tokens}'
                    here = ("team", "agents", i, "max_tokens")
                    yield Refusal(here, message, (here, ("team", "max_tokens"), ("task", "half_length")))

    agents = ("left", "right", "speaker")
    reward_range = 1.0

    def __init__(
        self,
        symbols: str = "ABCD",
        half_length: int = 1,
        seed: int = 0,
        held_out: float = 0.25,
        partial_credit: bool = True,
        skill: float = 0.0,
    ) -> None:
        _check(symbols, half_length, held_out, skill)
        self.symbols = symbols
        self.half_length = half_length
        self.partial_credit = partial_credit
        self.skill = skill
        self.alphabet = symbols
        super().__init__(self._split(np.random.default_rng([seed, half_length]), held_out))

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        return [self._grade_one(str(problem.answer), answer) for problem, answer, _ in episodes]

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        """``count`` messages to imitate, from the agents in turn.

        With ``skill`` 0 they teach an untrained model the form of a message and nothing of its content: every letter
        is drawn regardless of the problem and of earlier messages. Otherwise, that share of letters is right, and a
        model trained on them starts like a base model that follows an instruction now and then.
        """
        train = self._splits["train"]
        examples: list[FormatExample] = []
        for i in range(count):
            agent, problem = self.agents[i % len(self.agents)], train[rng.integers(len(train))]
            before = [(author, self._random_text(rng, self.half_length)) for author in self.agents[: i % 3]]
            wanted = "".join(text for _, text in before) if agent == "speaker" else problem.private[agent]
            chance = self._random_text(rng, len(wanted))
            letters = [w if rng.random() < self.skill else c for w, c in zip(wanted, chance, strict=True)]
            examples.append((agent, problem, before, "".join(letters)))
        return examples

    def _grade_one(self, code: str, answer: str) -> Verdict:
        said, right = answer.strip().upper(), code.upper()
        if said == right:
            return Verdict("right", 1.0, said)
        if len(said) != len(right) or not set(said) & set(self.symbols.upper()):
            return Verdict("unparsed", 0.0)  # no code at all: a half, say, or nothing
        if not self.partial_credit:
            return Verdict("wrong", 0.0, said)
        return Verdict("wrong", sum(a == b for a, b in zip(said, right, strict=True)) / len(right), said)

    def _random_text(self, rng: np.random.Generator, length: int) -> str:
        return "".join(self.symbols[k] for k in rng.integers(len(self.symbols), size=length))

    def _split(self, rng: np.random.Generator, held_out: float) -> dict[str, tuple[Problem, ...]]:
        halves = len(self.symbols) ** self.half_length
        codes = halves * halves
        if codes <= MOST_CODES:
            chosen = rng.permutation(codes)
        else:
            chosen = rng.choice(codes, size=MOST_CODES, replace=False)
            self.warnings += (f"{MOST_CODES} of the {codes} codes were drawn; not every half need be in both splits",)
        # A Latin square: each half, left or right, has exactly held_partners partners on the held-out diagonals.
        held_partners = min(max(round(held_out * halves), 1), halves - 1)
        left_rank, right_rank = rng.permutation(halves), rng.permutation(halves)
        left, right = chosen // halves, chosen % halves
        is_test = (left_rank[left] + right_rank[right]) % halves < held_partners
        return {
            "train": tuple(self._problem(int(a), int(b)) for a, b in zip(left[~is_test], right[~is_test], strict=True)),
            "test": tuple(self._problem(int(a), int(b)) for a, b in zip(left[is_test], right[is_test], strict=True)),
        }

    def _problem(self, left: int, right: int) -> Problem:
        left_text, right_text = self._half(left), self._half(right)
        code = left_text + right_text
        return Problem(id=f"code-{code}", prompt="", answer=code, private={"left": left_text, "right": right_text})

    def _half(self, number: int) -> str:
        """The half with this number, counted in base ``len(symbols)``."""
        text = ""
        for _ in range(self.half_length):
            number, digit = divmod(number, len(self.symbols))
            text = self.symbols[digit] + text
        return text


def _check(symbols: str, half_length: int, held_out: float, skill: float) -> None:
    distinct = {symbol.upper() for symbol in symbols if len(symbol.upper()) == 1 and not symbol.isspace()}
    if len(symbols) < 2 or len(distinct) != len(symbols):
        raise ValueError(
            f"code exchange needs at least two symbols that differ without regard to case, none blank; got {symbols!r}"
        )
    if half_length < 1:
        raise ValueError(f"half_length must be at least 1, got {half_length}")
    if len(symbols) ** half_length > MOST_HALVES:
        raise ValueError(
            f"{len(symbols)} symbols and half_length {half_length} make {len(symbols) ** half_length} halves, "
            f"more than {MOST_HALVES}: use fewer symbols or shorter halves"
        )
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is a share strictly between 0 and 1, got {held_out}")
    if not 0 <= skill <= 1:
        raise ValueError(f"skill is a share from 0 to 1, got {skill}")
