"""Debate with a judge that sees all messages and speaks once, at the end (arXiv 2305.19118)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teamtr.baselines.cast import Cast, Scene, Speaker
from teamtr.baselines.debate import debating
from teamtr.baselines.method import Conversation, setting
from teamtr.baselines.registry import method
from teamtr.team import Schedule

TOLD = "You are the judge of this debate. Weigh what was said, then state the right answer."


@method("judged_debate")
@dataclass(frozen=True)
class JudgedDebate(Conversation):
    """A debate whose answer is the message of the agent ``judge`` after its last round."""

    debaters: int = setting(2, "Speakers of a debate: the agents of the team in turn.")
    rounds: int = setting(2, "Rounds in which everyone speaks.")
    judge: str = setting("", "The agent that judges. [default: the one that answers]", agent=True)
    rule: ClassVar[str] = "judge"

    def scene(self, cast: Cast) -> Scene:
        speakers = debating(cast, self.debaters)
        judge = Speaker("judge", cast.named(self.judge), TOLD)
        router = Schedule.repeated([each.name for each in speakers], self.rounds, then=(judge.name,))
        return cast.scene([*speakers, judge], router)
