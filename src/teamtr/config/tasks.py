"""Tasks that are made by code, and your own data: what a team file may say of them."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le
from pydantic import Field, Strict

from teamtr.config.errors import Refusal, hint, show
from teamtr.config.paths import Anchor
from teamtr.config.section import Section, key, unset
from teamtr.config.team import TeamConfig
from teamtr.config.texts import Grader, OwnTaskName, Pattern, Symbols
from teamtr.config.values import Above0, Flag, NonEmpty, Positive, Share, UpTo1


class Task(Section):
    """What all tasks have in common: a ``name`` that chooses the section."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names that choose this section."""
        return typing.get_args(cls.model_fields["name"].annotation)

    @classmethod
    def is_called(cls, name: str) -> bool:
        return name in cls.names()

    def anchored(self, anchor: Anchor) -> Self:
        """The same with its paths made absolute."""
        return self

    def refusals_of(self, team: TeamConfig) -> Iterable[Refusal]:
        """What is wrong with this team for this task."""
        return ()


class CodeTask(Task):
    """Code exchange: ``left`` and ``right`` each see half of a code, ``speaker`` must say it all."""

    name: Literal["code"]
    symbols: Symbols = key("ABCD", "The letters codes are made of.")
    half_length: Positive = key(1, "Letters in each half of a code.")
    held_out: Share = key(0.25, "Share of all codes kept for evaluation.")
    partial_credit: Flag = key(True, "Reward each right letter, not only the whole code.")
    skill: UpTo1 = key(0.0, "Share of right letters in the examples that warm up the tiny model; 0 starts at chance.")

    def _refusals(self) -> Iterator[Refusal]:
        # The logarithm first: the power itself may be too large to compute.
        if self.half_length * math.log2(len(self.symbols)) > 16:
            message = f"{len(self.symbols)} symbols and task.half_length {self.half_length} make more than 65536 halves"
            both = (("task", "symbols"), ("task", "half_length"))
            yield Refusal(("task", "half_length"), f"{message}; use fewer or shorter", both)

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """The speaker must answer, and every message have room for its letters."""
        if set(team.names) != {"left", "right", "speaker"}:
            message = f"task code needs the agents left, right and speaker, got {', '.join(team.names)}"
            yield Refusal(("team", "agents"), message, at_key=True)
            return
        answering = team.closing if team.answer == "last" else (team.answer,)
        wrong = [word for word in answering if word in ("left", "right", "majority")]
        if wrong:  # a name of nobody is the team's own mistake
            message = f'task code is answered by the speaker, but team.answer gives the word to "{wrong[0]}"'
            yield Refusal(("team", "answer"), message, (("team", "answer"), ("team", "router", "order")))
        for i, agent in enumerate(team.agents):
            letters = self.half_length * (2 if agent.name == "speaker" else 1)
            if agent.model == "tiny" and agent.max_tokens < letters:
                message = f'agent "{agent.name}" must say {letters} letters, but max_tokens is {agent.max_tokens}'
                here = ("team", "agents", i, "max_tokens")
                yield Refusal(here, message, (here, ("team", "max_tokens"), ("task", "half_length")))


class RolesTask(Task):
    """Roles: in a blind round, exactly one of n agents, called a1 to an, must volunteer."""

    name: Literal["roles"]
    tags: Annotated[int, Strict(), Ge(1), Le(26)] = key(
        1, "How many different problems there are, told apart by a tag."
    )

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """Names are a1, a2 and so on, and all must speak."""
        expected = {f"a{i + 1}" for i in range(max(len(team.agents), 2))}
        silent = sorted(expected - set(team.speaking_order))
        if set(team.names) != expected:
            message = f"task roles needs two or more agents called a1, a2 and so on, got {', '.join(team.names)}"
            yield Refusal(("team", "agents"), message, at_key=True)
        elif silent:
            message = f"task roles needs a message of every agent; team.router.order leaves out {', '.join(silent)}"
            yield Refusal(("team", "router", "order"), message)


class SumsTask(Task):
    """Sums of whole numbers, made by code, for models that can already write."""

    name: Literal["sums"]
    terms: Annotated[int, Strict(), Ge(2), Le(16)] = key(2, "Numbers to add.")
    digits: Annotated[int, Strict(), Ge(1), Le(9)] = key(2, "Digits of each.")
    problems: Annotated[int, Strict(), Ge(8)] = key(4096, "Different sums, at most; a quarter, up to 256, is held out.")


class OwnTask(Task):
    """A task of your own: a class in a Python file, see docs/tasks.md."""

    name: OwnTaskName
    options: dict[str, Any] = key({}, "What the class is called with.")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return ("python:FILE:CLASS",)

    @classmethod
    def is_called(cls, name: str) -> bool:
        return name.startswith("python:")

    def anchored(self, anchor: Anchor) -> Self:
        file, _, attribute = self.name.removeprefix("python:").rpartition(":")
        return self.model_copy(update={"name": f"python:{anchor.path(file)}:{attribute}"})


class DataTask(Task):
    """Your own questions and answers."""

    name: Literal["data"]
    path: NonEmpty = Field(description="A .jsonl, .json (a list of rows) or .parquet file, relative to the team file.")
    question: NonEmpty | None = unset("Column of the question; without it, prompt, question or problem.")
    answer: NonEmpty | None = unset("Column of the answer; without it, answer, solution or target.")
    held_out: Share = key(0.1, "Share of the rows kept for evaluation.")
    grader: Grader = key("exact", "exact, number, regex, or python:FILE:FUNCTION (FILE relative to the team file).")
    pattern: Pattern | None = unset(
        "For grader regex: its one group is the answer; its last match in a message counts."
    )
    threshold: Annotated[float, Strict()] = key(1.0, "A reward of at least this counts as right.")
    private: dict[str, NonEmpty] = key({}, "Agent name to the column that this agent alone sees.")
    seconds_per_item: Above0 = key(5.0, "Time limit for grading one answer.")

    def _refusals(self) -> Iterator[Refusal]:
        both = (("task", "grader"), ("task", "pattern"))
        if self.grader == "regex" and self.pattern is None:
            yield Refusal(("task", "grader"), 'task.grader is "regex", which needs task.pattern', both)
        if self.grader != "regex" and self.pattern is not None:
            message = f'task.pattern is used by grader "regex" only, and task.grader is "{self.grader}"'
            yield Refusal(("task", "pattern"), message, both)

    def anchored(self, anchor: Anchor) -> Self:
        update = {"path": anchor.path(self.path)}
        if self.grader.startswith("python:"):
            file, _, function = self.grader.removeprefix("python:").rpartition(":")
            update["grader"] = f"python:{anchor.path(file)}:{function}"
        return self.model_copy(update=update)

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """Private columns must belong to somebody."""
        for name in self.private:
            if name not in team.names:
                message = f"task.private names no agent {show(name)}{hint(name, team.names, 'the agents are')}"
                yield Refusal(("task", "private", name), message, at_key=True)
