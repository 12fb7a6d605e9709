"""What a method is, and how it is played: one graded answer for every attempt at a problem.

A method is a frozen value. It says what is asked of whom, and which answer follows from what was said; everything that
was sampled on the way is a turn of its episodes, so that tokens can be counted and answers found again.
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
    """A setting of a method. ``tries``: how many independent answers it draws, which a budget of tokens decides.
    ``agent``: the name of one, or nothing."""
    return field(default=default, metadata={"help": help, "tries": tries, "agent": agent})


@dataclass(frozen=True)
class Method(ABC):
    """A way to ask models for an answer. Whole numbers among its settings are at least 1.

    Attributes:
        name: as ``teamtr eval --method`` calls it; ``@method`` sets it.
        interactive: whether it can be played where an environment replies between rounds.
        calls: whether it can be played where agents call tools, so that a turn may be several messages.
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
        """What its answers depend on, as plain data."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"name": self.name, **{key: v.settings if isinstance(v, Method) else v for key, v in values.items()}}

    @property
    def tries(self) -> int:
        """How many independent answers it draws in an attempt."""
        return next((getattr(self, each.name) for each in fields(self) if each.metadata.get("tries")), 1)

    @property
    def width(self) -> int:
        """How many conversations of an attempt are played at once, at most."""
        return self.tries

    def require(self, cast: Cast, temperature: float | None) -> None:
        """Raises UserError where it cannot be played by this cast, or not to any purpose."""
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
        """How many rounds an attempt may take: every turn has a round below it."""

    @abstractmethod
    def attempts(self, cast: Cast, problems: Sequence[Problem], draws: Draws) -> list[EpisodeState]:
        """One attempt at each of these problems, a problem standing there as often as it is tried: all turns of it."""

    @abstractmethod
    def answer(self, cast: Cast, turns: Sequence[Turn]) -> str:
        """What an attempt came to, from its turns alone."""

    def graded(self, cast: Cast, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]) -> str:
        """What is graded of an attempt: its answer, unless a task grades the whole dialogue."""
        return self.answer(cast, turns)


class Conversation(Method):
    """A method that is one conversation. ``rule`` says whose word is the answer, as ``team.answer`` of a team file."""

    rule: ClassVar[str] = "last"

    @abstractmethod
    def scene(self, cast: Cast) -> Scene:
        """Who speaks, in which order, and who sees what."""

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
    """So many attempts at each problem, graded."""
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
    """Several tries as one attempt: the rounds of each follow those of the one before, ``rounds`` a try."""
    turns = [replace(turn, round=k * rounds + turn.round) for k, each in enumerate(tries) for turn in each.turns]
    return EpisodeState(tries[0].problem, turns=turns)


def parted(turns: Sequence[Turn], rounds: int) -> list[list[Turn]]:
    """The turns of each try again, as they were before they were joined."""
    tries: dict[int, list[Turn]] = {}
    for turn in turns:
        tries.setdefault(turn.round // rounds, []).append(replace(turn, round=turn.round % rounds))
    return list(tries.values())
