"""The team: an immutable value. Weights live in the engine; a team names their versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from teamtr.team.visibility import EVERYTHING, Visibility
from teamtr.types import Turn


@dataclass(frozen=True)
class Agent:
    """One policy of the team: who it is, what it sees, and the version of the weights it speaks with. ``tools`` are
    those that it may call, where there are any; None is all of them."""

    name: str
    version: str
    system_prompt: str = ""
    sees: Visibility = EVERYTHING
    max_tokens: int = 16
    frozen: bool = False
    tools: tuple[str, ...] | None = None


def visible(turns: Sequence[Turn], agent: Agent, round: int) -> tuple[Turn, ...]:
    """The turns that this agent sees when it speaks in this round: those that it is shown, and the calls of tools that
    it has just made, whatever else is hidden from it."""
    calling = 0
    for turn in reversed(turns):
        if not turn.results or (turn.agent, turn.round) != (agent.name, round):
            break
        calling += 1
    first = len(turns) - calling
    return tuple(turn for t, turn in enumerate(turns) if t >= first or agent.sees.shows(turn, agent.name, round))


@dataclass(frozen=True)
class Team:
    """Agents in speaking order of their first mention. ``replace`` gives the intermediate team after a step."""

    agents: tuple[Agent, ...]

    def __post_init__(self) -> None:
        names = [a.name for a in self.agents]
        if len(set(names)) != len(names):
            raise ValueError(f"agents must have different names, got {names}")

    def __iter__(self) -> Iterator[Agent]:
        return iter(self.agents)

    def __getitem__(self, name: str) -> Agent:
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise KeyError(f"no agent {name!r} in the team; it has {', '.join(self.names)}")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.agents)

    @property
    def trainable(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.agents if not a.frozen)

    @property
    def versions(self) -> dict[str, str]:
        return {a.name: a.version for a in self.agents}

    @property
    def limits(self) -> dict[str, int]:
        """Most tokens of a message, by agent."""
        return {a.name: a.max_tokens for a in self.agents}

    @property
    def version(self) -> str:
        """A hash of every agent's version: two teams with the same version write from the same law."""
        text = "\n".join(f"{a.name}={a.version}" for a in sorted(self.agents, key=lambda a: a.name))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def replace(self, name: str, version: str) -> Team:
        """The team in which this agent speaks with other weights: eq:intermediate_policies."""
        self[name]
        return Team(tuple(replace(a, version=version) if a.name == name else a for a in self.agents))
