"""Lookup: a question names a key, and only a tool can return its value.

There are many tables, and those of the test split are not used in training, so values cannot be memorized. One agent
calls the tool, the other reads the result and says the value: the smallest task that needs a tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from teamtr.calls import TOOL
from teamtr.ports import Tools
from teamtr.randomness import generator
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import key
from teamtr.settings.values import Positive, UpTo1
from teamtr.tasks.base import FormatExample, Task, WrongAnswer
from teamtr.tasks.config import TaskConfig, TaskContext, TeamSection
from teamtr.tasks.games.code_exchange import Symbols
from teamtr.tasks.registry import task
from teamtr.tools.kinds import TEXT, ToolError
from teamtr.tools.toolbox import Outcome, Toolbox, ToolboxTools
from teamtr.types import Problem, Verdict

Table = Mapping[str, str]
ASKER, ANSWERER = "asker", "answerer"
TOOLS: Toolbox[Table] = Toolbox()


@TOOLS.tool(key=TEXT)
def look_up(state: Table, key: str) -> Outcome[Table]:
    """The value of a key."""
    if key not in state:
        raise ToolError("no such key")
    return Outcome(state[key], state)


def call_of(key: str) -> str:
    """A message that looks the key up."""
    return f'look_up(key="{key}")'


@task("lookup")
class Lookup(Task):
    """The task over tables from each key to any value; the question is one of the keys.

    Args:
        keys: one character each.
        values: one character each; case is ignored.
        tables: number of tables; a quarter of them is held out, with all their questions.
        seed: of the tables.
        skill: share of the asker's examples for the tiny model's warm-up that look up the right key. The others look up
            the next key: a model trained on them reads the question, and has to learn which key to look up.
        reading_skill: share of the answerer's examples that repeat the tool's result.
    """

    class Config(TaskConfig):
        """A generated game: say the value of a key, which only a tool can look up."""

        keys: Symbols = key("12345678", "What can be looked up, each one character.")
        values: Symbols = key("ABCDEFGH", "What stands there, each one character.")
        tables: Positive = key(64, "Tables of values; a quarter of them is held out.")
        skill: UpTo1 = key(
            0.15,
            "Share of the examples for the tiny model's warm-up that ask for the right key; others ask for the next.",
        )
        reading_skill: UpTo1 = key(1.0, "Share of those examples in which the answerer says what the tool said.")

        def arguments(self, context: TaskContext) -> dict[str, Any]:
            return {**super().arguments(context), "seed": context.seed}

        def _refusals(self) -> Iterator[Refusal]:
            most = len(self.values) ** len(self.keys)
            if not 4 <= self.tables <= most:
                message = f"task.tables must be from 4 to {most}, all that there are, got {self.tables}"
                rests_on = tuple(("task", name) for name in ("tables", "keys", "values"))
                yield Refusal(("task", "tables"), message, rests_on)

        def refusals_of(self, team: TeamSection) -> Iterator[Refusal]:
            if set(team.names) != {ASKER, ANSWERER}:
                message = f"task lookup needs the agents {ASKER} and {ANSWERER}, got {', '.join(team.names)}"
                yield Refusal(("team", "agents"), message, at_key=True)

    agents = (ASKER, ANSWERER)
    reward_range = 1.0

    def __init__(
        self,
        keys: str = "12345678",
        values: str = "ABCDEFGH",
        tables: int = 64,
        seed: int = 0,
        skill: float = 0.15,
        reading_skill: float = 1.0,
    ) -> None:
        self.keys = keys
        self.values = values
        self.skill = skill
        self.reading_skill = reading_skill
        rng, drawn = generator(seed, "lookup", keys, values, tables), dict[str, None]()
        while len(drawn) < tables:
            drawn.setdefault("".join(_random(rng, values) for _ in keys))
        every = [tuple(self._problem(row, asked) for asked in keys) for row in drawn]
        held_out = max(tables // 4, 1)
        super().__init__({"test": sum(every[:held_out], ()), "train": sum(every[held_out:], ())})

    @cached_property
    def tools(self) -> Tools:
        return ToolboxTools(TOOLS, lambda problem: dict(problem.columns["table"]))

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        return [self._verdict(problem, self.extract(answer)) for problem, answer, _ in episodes]

    def extract(self, text: str) -> str | None:
        said = text.strip()
        return next((value for value in self.values if value.upper() == said.upper()), None)

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        others = [value for value in self.values if value != problem.answer]
        return [
            WrongAnswer("another value", others[rng.integers(len(others))]),
            WrongAnswer("the call", call_of(problem.prompt)),
            WrongAnswer("empty", ""),
        ]

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        """``count`` messages to imitate, from the agents in turn: some are right, the others in form only."""
        train, examples = self._splits["train"], list[FormatExample]()
        for i in range(count):
            problem = train[rng.integers(len(train))]
            asked, value, said = _random(rng, self.keys), _random(rng, self.values), _random(rng, self.values)
            if i % 2 == 0:
                place = self.keys.index(problem.prompt) + (rng.random() >= self.skill)
                examples.append((ASKER, problem, [], call_of(self.keys[place % len(self.keys)])))
            else:
                before = [(ASKER, call_of(asked)), (TOOL, value)]
                examples.append((ANSWERER, problem, before, value if rng.random() < self.reading_skill else said))
        return examples

    def _verdict(self, problem: Problem, said: str | None) -> Verdict:
        if said is None:
            return Verdict("unparsed", 0.0)
        return Verdict("right", 1.0, said) if said == problem.answer else Verdict("wrong", 0.0, said)

    def _problem(self, row: str, asked: str) -> Problem:
        table = dict(zip(self.keys, row, strict=True))
        return Problem(id=f"{asked}-{row}", prompt=asked, answer=table[asked], columns={"table": table})


def _random(rng: np.random.Generator, symbols: str) -> str:
    return symbols[int(rng.integers(len(symbols)))]
