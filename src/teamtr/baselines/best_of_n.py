"""Best of N: of several chains of thought, the one that a verifier rates highest (arXiv 2110.14168)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from teamtr.baselines import chain_of_thought
from teamtr.baselines.cast import Cast, Draws, Speaker
from teamtr.baselines.method import Method, joined, parted, setting
from teamtr.baselines.rating import SCALE, rating
from teamtr.baselines.registry import method
from teamtr.rollout import EpisodeState
from teamtr.team import Schedule
from teamtr.types import Problem, Turn

TOLD = f"Check the solver's answer step by step. How sure are you that it is right? {SCALE}"


@method("best_of_n")
@dataclass(frozen=True)
class BestOfN(Method):
    """``candidates`` answers of one model, each rated once by the agent ``verifier``; the best is taken (of equals, the
    first)."""

    calls: ClassVar[bool] = False
    ROUNDS: ClassVar[int] = 2  # the candidate, then its rating
    candidates: int = setting(4, "Answers to choose from.", tries=True)
    verifier: str = setting("", "The agent that rates them. [default: the one that answers]", agent=True)

    def span(self, cast: Cast) -> int:
        return self.candidates * self.ROUNDS

    def attempts(self, cast: Cast, problems: Sequence[Problem], draws: Draws) -> list[EpisodeState]:
        solver = Speaker("solver", cast.answering, chain_of_thought.TOLD)
        verifier = Speaker("verifier", cast.named(self.verifier), TOLD)
        scene = cast.scene([solver, verifier], Schedule(((solver.name,), (verifier.name,))))
        tries = [scene.begin(problem) for problem in problems for _ in range(self.candidates)]
        scene.play(tries, draws)
        return [joined(tries[k : k + self.candidates], self.ROUNDS) for k in range(0, len(tries), self.candidates)]

    def answer(self, cast: Cast, turns: Sequence[Turn]) -> str:
        candidate, _ = max(parted(turns, self.ROUNDS), key=lambda said: rating(said[1].text))
        return candidate.text
