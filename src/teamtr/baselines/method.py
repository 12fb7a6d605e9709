"""The base class of inference-time methods, and how they are played: one graded answer per attempt at a problem.

A method is a frozen value. It defines which speakers are sampled and how the answer follows from their messages. Every
message that it samples is a turn of its episodes, so that tokens can be counted and answers recomputed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from teamtr.baselines.cast import Cast, Draws, Scene
from teamtr.batches import RolloutBatch
from teamtr.errors import UserError
from teamtr.rollout import EpisodeState, Ledger
from teamtr.rollout.outcome import outcome_of
from teamtr.team import team_answer
from teamtr.types import Episode, Problem, Reply, Transcript, Turn


def setting(default: Any, help: str, *, tries: bool = False, agent: bool = False) -> Any:
    """A setting of a method. ``tries`` marks the number of independent answers, which a token budget sets. ``agent``
    marks the name of an agent, or ""."""
    return field(default=default, metadata={"help": help, "tries": tries, "agent": agent})


@dataclass(frozen=True)
class Method(ABC):
    """A way to get an answer from models. Its integer settings must be at least 1.

    Attributes:
        name: its name in ``teamtr eval --method``; set by ``@method``.
        interactive: whether it supports tasks whose environment replies between rounds.
        calls: whether it supports agents that call tools, so that a turn may be several messages.
    """

    name: ClassVar[str] = ""
    interactive: ClassVar[bool] = False
    calls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is int and value < 1:
                raise UserError(f"{self.name}: {each.name} must be 1 or more, got {value}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that its answers depend on, as plain data."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"name": self.name, **{key: v.settings if isinstance(v, Method) else v for key, v in values.items()}}

    @property
    def tries(self) -> int:
        """The number of independent answers that it draws per attempt."""
        return next((getattr(self, each.name) for each in fields(self) if each.metadata.get("tries")), 1)

    @property
    def width(self) -> int:
        """The maximum number of conversations of an attempt that are played at once."""
        return self.tries

    def require(self, cast: Cast, temperature: float | None) -> None:
        """Raises UserError if it cannot be played by this cast, or would be pointless."""
        if cast.context.task.environment is not None and not self.interactive:
            raise UserError(
                f"{self.name} cannot be played on an interactive task, whose environment replies every round"
            )
        if cast.context.tools is not None and not self.calls:
            raise UserError(f"{self.name} cannot be played by agents with tools: it counts on one message for a turn")
        if temperature == 0 and self.width > 1:
            raise UserError(
                f"{self.name} draws {self.width} texts to choose from, and at temperature 0 they are all the same: set "
                "--temperature above 0, or leave it out"
            )
        for each in fields(self):
            if each.metadata.get("agent"):
                cast.named(getattr(self, each.name))

    @abstractmethod
    def span(self, cast: Cast) -> int:
        """The maximum number of rounds of an attempt: the round of every turn is below it."""

    @abstractmethod
    def attempts(self, cast: Cast, problems: Sequence[Problem], draws: Draws) -> list[EpisodeState]:
        """Plays one attempt at each of these problems, with all its turns. Repeat a problem for several attempts."""

    @abstractmethod
    def answer(self, cast: Cast, turns: Sequence[Turn]) -> str:
        """The answer of an attempt, from its turns alone."""

    def graded(self, cast: Cast, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]) -> str:
        """The text of an attempt to grade: its answer, unless a task grades the whole dialogue."""
        return self.answer(cast, turns)


class Conversation(Method):
    """A method that is one conversation. ``rule`` selects the message that is the answer, like ``team.answer``."""

    rule: ClassVar[str] = "last"

    @abstractmethod
    def scene(self, cast: Cast) -> Scene:
        """The speakers, their order, and what each of them sees."""

    def span(self, cast: Cast) -> int:
        return self.scene(cast).context.router.rounds

    def attempts(self, cast: Cast, problems: Sequence[Problem], draws: Draws) -> list[EpisodeState]:
        scene = self.scene(cast)
        states = [scene.begin(problem) for problem in problems]
        scene.play(states, draws)
        return states

    def answer(self, cast: Cast, turns: Sequence[Turn]) -> str:
        return team_answer(turns, self.rule, cast.context.task.extract)

    def graded(self, cast: Cast, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]) -> str:
        scene = self.scene(cast)
        told = outcome_of(scene.context, scene.team, problem, turns, replies)
        return self.answer(cast, turns) if told is None else told


def play_method(
    method: Method,
    cast: Cast,
    problems: Sequence[Problem],
    samples: int,
    *,
    seed: int,
    temperature: float | None = None,
    ledger: Ledger | None = None,
) -> RolloutBatch:
    """Plays and grades ``samples`` attempts at each problem."""
    method.require(cast, temperature)
    task, ledger = cast.context.task, ledger or Ledger()
    asked = [problem for problem in problems for _ in range(samples)]
    states = method.attempts(cast, asked, Draws(seed, temperature, ledger))
    answers = [method.graded(cast, state.problem, state.turns, state.replies) for state in states]
    started = time.perf_counter()
    verdicts = task.grade(
        [(p, answer, Transcript(s.turns, s.replies)) for p, s, answer in zip(asked, states, answers, strict=True)]
    )
    ledger.grading_seconds += time.perf_counter() - started
    ledger.episodes += len(asked)
    episodes = [
        Episode(
            problem_id=asked[e].id,
            group_index=e % samples,
            turns=tuple(state.turns),
            answer=answers[e],
            verdict=verdicts[e],
            team_version=cast.team.version,
            replies=tuple(state.replies),
        )
        for e, state in enumerate(states)
    ]
    return RolloutBatch(tuple(problems), tuple(episodes), samples)


def joined(tries: Sequence[EpisodeState], rounds: int) -> EpisodeState:
    """Joins several tries into one attempt, with ``rounds`` rounds per try, numbered consecutively."""
    turns = [replace(turn, round=k * rounds + turn.round) for k, each in enumerate(tries) for turn in each.turns]
    return EpisodeState(tries[0].problem, turns=turns)


def parted(turns: Sequence[Turn], rounds: int) -> list[list[Turn]]:
    """Splits the turns of an attempt into its tries; the inverse of ``joined``."""
    tries: dict[int, list[Turn]] = {}
    for turn in turns:
        tries.setdefault(turn.round // rounds, []).append(replace(turn, round=turn.round % rounds))
    return list(tries.values())
