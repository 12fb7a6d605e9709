"""Chain of thought: one model thinks before it answers (arXiv 2205.11916)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teamtr.baselines.cast import Cast, Scene, Speaker
from teamtr.baselines.method import Conversation
from teamtr.baselines.registry import method
from teamtr.team import Schedule

TOLD = "Think step by step, then state the answer."


@method("chain_of_thought")
@dataclass(frozen=True)
class ChainOfThought(Conversation):
    """One message of one model. In an interactive task it has as many rounds as the team."""

    interactive: ClassVar[bool] = True

    def scene(self, cast: Cast) -> Scene:
        router = Schedule.repeated(("solver",), cast.rounds())
        return cast.scene([Speaker("solver", cast.answering, TOLD)], router)
