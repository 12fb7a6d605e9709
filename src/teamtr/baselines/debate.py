"""Debate: several models answer alone, then see each other's answers and may change theirs (arXiv 2305.14325)."""

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
    """``debaters`` speak in each of ``rounds``: blind in the first, later seeing all that was said. The answer is what
    most of them say last; of equals, what the first of them says. In an interactive task there are as many rounds as
    the team has, and the environment replies to what most of them say in each."""

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
