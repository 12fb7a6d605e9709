"""The team as an immutable value. Weights live in the engine; a team holds their versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from teamtr.team.visibility import EVERYTHING, Visibility
from teamtr.types import Turn


@dataclass(frozen=True)
class Agent:
    """One policy of the team: its name, what it sees, and the version of its weights. ``tools`` names the tools that it
    may call; None means all."""

    name: str
    version: str
    system_prompt: str = ""
    sees: Visibility = EVERYTHING
    max_tokens: int = 16
    frozen: bool = False
    tools: tuple[str, ...] | None = None


def visible(turns: Sequence[Turn], agent: Agent, round: int) -> tuple[Turn, ...]:
    """The turns that this agent sees when it speaks in this round: those that its visibility shows, and always the tool
    calls that it has just made."""
    calling = 0
    for turn in reversed(turns):
        if not turn.results or (turn.agent, turn.round) != (agent.name, round):
            break
        calling += 1
    first = len(turns) - calling
    return tuple(turn for t, turn in enumerate(turns) if t >= first or agent.sees.shows(turn, agent.name, round))


@dataclass(frozen=True)
class Team:
    """The agents, in the order of the team file. ``replace`` gives the intermediate team after an update."""

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
        """Maximum tokens of a message, by agent."""
        return {a.name: a.max_tokens for a in self.agents}

    @property
    def version(self) -> str:
        """A hash of every agent's version: two teams with the same version sample from the same distribution."""
        text = "\n".join(f"{a.name}={a.version}" for a in sorted(self.agents, key=lambda a: a.name))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def replace(self, name: str, version: str) -> Team:
        """The team with another version of this agent's weights: eq:intermediate_policies."""
        self[name]
        return Team(tuple(replace(a, version=version) if a.name == name else a for a in self.agents))
