"""The team as defined in its file, the reference that methods are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from teamtr.baselines.cast import Cast, Scene
from teamtr.baselines.method import Conversation
from teamtr.baselines.registry import method
from teamtr.team import team_answer
from teamtr.types import Turn


@method("team")
@dataclass(frozen=True)
class AsWritten(Conversation):
    """The team itself: its router, its prompts, what its agents see, and its answer."""

    interactive: ClassVar[bool] = True

    def scene(self, cast: Cast) -> Scene:
        return Scene(cast.context, cast.team, agents={})

    def answer(self, cast: Cast, turns: Sequence[Turn]) -> str:
        return team_answer(turns, cast.context.answer, cast.context.task.extract)
