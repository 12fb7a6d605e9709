"""Debate: several models answer independently, then see each other's answers and may revise (arXiv 2305.14325)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teamtr.baselines.cast import Cast, Scene, Speaker
from teamtr.baselines.method import Conversation, setting
from teamtr.baselines.registry import method
from teamtr.team import Blind, Schedule

TOLD = "Solve the problem and state your answer. Where others have answered, look for mistakes in theirs and in yours."


@method("debate")
@dataclass(frozen=True)
class Debate(Conversation):
    """``debaters`` speakers in each of ``rounds`` rounds: blind in the first, later seeing all messages. The answer is
    the majority of their last messages; with a tie, the first of the tied answers. An interactive task has as many
    rounds as the team's router, and the environment replies to the majority of each."""

    interactive: ClassVar[bool] = True

    debaters: int = setting(3, "Speakers of a debate: the agents of the team in turn.")
    rounds: int = setting(2, "Rounds in which everyone speaks.")
    rule: ClassVar[str] = "majority"

    def scene(self, cast: Cast) -> Scene:
        speakers = debating(cast, self.debaters)
        router = Schedule.repeated([each.name for each in speakers], cast.rounds(self.rounds))
        return cast.scene(speakers, router, self.rule)


def debating(cast: Cast, debaters: int) -> list[Speaker]:
    """The speakers of a debate with a blind first round."""
    agents = cast.share(debaters)
    return [Speaker(f"debater-{k}", agent, TOLD, Blind((0,))) for k, agent in enumerate(agents, start=1)]
