"""Combines the values of several reward functions into one reward of the team, of agents or of turns, with weights.

For each episode, a function returns a number, earned by the whole team; a mapping from agents to numbers; or a list
with one number per message of an agent. The team's reward is the sum of all of these over all functions, each times its
weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.types import Breakdown, Transcript

Value = float | Sequence[float] | Mapping[str, float]
"""What one function returns for one episode."""


class BadReward(ValueError):
    """A reward that does not fit the episode; the message says how."""


@dataclass(frozen=True)
class Part:
    """What the function ``name`` returned for an episode."""

    name: str
    value: Value
    weight: float = 1.0

    @property
    def total(self) -> float:
        """The sum of the value, without the weight."""
        match self.value:
            case Mapping():
                return sum(self.value.values())
            case Sequence():
                return sum(self.value)
        return float(self.value)


def breakdown_of(parts: Sequence[Part], texts: Sequence[str]) -> Breakdown:
    """The reward that these parts make. Raises BadReward if one does not fit the messages (a ``Transcript``)."""
    shared = 0.0
    by_agent: dict[str, float] = {}
    by_turn: list[float] = []
    for part in parts:
        match part.value:
            case Mapping():
                _check_agents(part.name, part.value, texts)
                for agent, earned in part.value.items():
                    by_agent[agent] = by_agent.get(agent, 0.0) + part.weight * earned
            case Sequence():
                _check_turns(part.name, part.value, texts)
                before = by_turn or [0.0] * len(part.value)
                by_turn = [old + part.weight * earned for old, earned in zip(before, part.value, strict=True)]
            case number:
                shared += part.weight * float(number)
    return Breakdown(shared, by_agent, tuple(by_turn), {part.name: part.weight * part.total for part in parts})


def messages_of(texts: Sequence[str]) -> list[dict[str, str]] | None:
    """The conversation as reward functions get it: ``{"role": ..., "name": ..., "content": ...}`` for each message.
    None if the texts are not a ``Transcript``, so that their speakers are unknown."""
    return [each._asdict() for each in texts.spoken] if isinstance(texts, Transcript) else None


def _check_agents(name: str, value: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Require a reward for every agent that spoke: one left out or misspelled would silently get 0."""
    speakers = dict.fromkeys(texts.speakers) if isinstance(texts, Transcript) else {}
    missing = [agent for agent in speakers if agent not in value]
    if missing:
        raise BadReward(
            f"{name} gives no reward to {', '.join(missing)}; it names {', '.join(value) or 'nobody'}: give one to "
            "every agent that spoke"
        )


def _check_turns(name: str, value: Sequence[float], texts: Sequence[str]) -> None:
    if len(value) != len(texts):
        raise BadReward(
            f"{name} gives {len(value)} rewards to an episode with {len(texts)} messages of agents: give one to each"
        )
