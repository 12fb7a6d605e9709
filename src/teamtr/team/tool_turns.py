"""Tool turns: an agent that calls a tool speaks again in the same round, before the next speaker.

After a message with tool results, the same agent speaks again, until a message calls no tool or the agent has written
``steps`` messages in a row. The last message of such a chain is the agent's settled turn. The team's own router sees
settled turns only, so it need not handle tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teamtr.errors import UserError
from teamtr.team.router import Router, Upcoming
from teamtr.types import Turn


@dataclass(frozen=True)
class ToolTurns:
    """A router for a team with tools. Its bounds are those of ``inner``, with up to ``steps`` messages for every turn
    of an agent in ``agents``, which are those that have tools."""

    inner: Router
    steps: int
    agents: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"tools.steps must be 1 or more, got {self.steps}")

    @property
    def rounds(self) -> int:
        return self.inner.rounds

    @property
    def horizon(self) -> int:
        """Counts ``steps`` messages for as many turns of ``inner`` as the agents with tools can have."""
        theirs = min(self.inner.horizon, sum(map(self.inner.turns_of, self.agents)))
        return self.inner.horizon + theirs * (self.steps - 1)

    @property
    def speakers(self) -> tuple[str, ...] | None:
        return getattr(self.inner, "speakers", None)

    @property
    def closers(self) -> tuple[str, ...] | None:
        return getattr(self.inner, "closers", None)

    def turns_of(self, agent: str) -> int:
        return self.inner.turns_of(agent) * (self.steps if agent in self.agents else 1)

    def next(self, turns: Sequence[Turn]) -> tuple[int, str] | None:
        settled = self.settled(turns)
        if turns and (not settled or settled[-1] is not turns[-1]):
            return Upcoming(turns[-1].round, turns[-1].agent)
        return self.inner.next(settled)

    def settled(self, turns: Sequence[Turn]) -> list[Turn]:
        """The last turn of every finished chain."""
        found: list[Turn] = []
        chain = 0
        for turn in turns:
            chain += 1
            if not turn.results or chain >= self.steps:
                found.append(turn)
                chain = 0
        return found
