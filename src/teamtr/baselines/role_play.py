"""Role-play: one conversation of named roles, the last of which answers (arXiv 2303.17760)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teamtr.baselines.cast import Cast, Scene, Speaker
from teamtr.baselines.method import Conversation, setting
from teamtr.baselines.registry import method
from teamtr.chat.transcript import is_label
from teamtr.errors import UserError
from teamtr.team import Schedule

TOLD = "You are the {role}. In this team speak, in order: {roles}. Do the part of the {role}, building on the others."
ANSWERS = " You speak last: state the answer."


@method("role_play")
@dataclass(frozen=True)
class RolePlay(Conversation):
    """``roles`` speak in order in each of ``rounds`` rounds and see all messages; the agents of the team play them in
    turn. An interactive task has as many rounds as the team's router."""

    interactive: ClassVar[bool] = True
    roles: tuple[str, ...] = setting(("planner", "solver", "checker"), "Names of the roles, in order.")
    rounds: int = setting(1, "Rounds in which everyone speaks.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.roles or len(set(self.roles)) < len(self.roles) or not all(map(is_label, self.roles)):
            raise UserError(
                f"{self.name}: roles must be different names on one line without a colon, and not `you`, got "
                f"{', '.join(map(repr, self.roles)) or 'none'}"
            )

    def scene(self, cast: Cast) -> Scene:
        speakers = [
            Speaker(role, agent, self._told(role))
            for role, agent in zip(self.roles, cast.share(len(self.roles)), strict=True)
        ]
        return cast.scene(speakers, Schedule.repeated(self.roles, cast.rounds(self.rounds)))

    def _told(self, role: str) -> str:
        told = TOLD.format(role=role, roles=", ".join(self.roles))
        return told + ANSWERS if role == self.roles[-1] else told
