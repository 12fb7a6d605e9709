"""The section ``cluster``: a team's models in this process or in several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from teamtr.config.team import TeamConfig
from teamtr.settings.refusals import KeyPath, Refusal, hint, show
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, Count, Flag, Positive
from teamtr.types import PLAYER

_GROUPS: KeyPath = ("cluster", "groups")


class GroupConfig(Section):
    """Agents whose models are on workers of their own."""

    agents: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Names of agents that live on workers of their own. Every agent is in one group; without groups, "
        "all agents live on all workers."
    )
    workers: Positive = key(1, "Worker processes of the group; each holds the models of these agents.")


class ClusterConfig(Section):
    """Where a team's models run; see docs/cluster.md."""

    engine: Literal["local", "ray"] = key(
        "local", "local: in this process; ray: in workers, on this machine or many (needs teamtr[ray])."
    )
    workers: Positive = key(
        1,
        "Worker processes with ray; each holds the whole team and computes its part of a batch. With groups: all of "
        "theirs together, which need not be given.",
    )
    groups: tuple[GroupConfig, ...] = key(
        (),
        "Agents on workers of their own: a worker holds the models of its group only.",
    )
    shards: Positive | None = unset(
        "Parts of every batch, each computed by itself. As many shards give the same bits with any number of workers; "
        "default: as many as workers with ray (of the largest group, where there are groups), else 1."
    )
    shard_base: Flag = key(
        False, "Each worker holds a part of every model's layers (FSDP2), for models that do not fit into a card."
    )
    address: str | None = unset("Of a Ray cluster that runs; default: RAY_ADDRESS, else one is started here.")
    max_restarts: Count = key(3, "How often workers that died or hang are made anew in one command.")
    patience_s: Above0 = key(1800.0, "How many seconds a call to a worker may take before it counts as hanging.")

    def _settle(self) -> None:
        """Fill in the number of shards. It determines results to the bit, and a resumed run must have the same
        number."""
        if self.groups and "workers" not in self.model_fields_set:
            object.__setattr__(self, "workers", sum(group.workers for group in self.groups))
        if self.shards is None:
            object.__setattr__(self, "shards", self._most_together if self.engine == "ray" else 1)

    @property
    def parts(self) -> int:
        """The number of shards."""
        assert self.shards is not None, "settled above"
        return self.shards

    @property
    def _most_together(self) -> int:
        """The largest number of workers that split the rows of one agent."""
        return max((group.workers for group in self.groups), default=self.workers)

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(f"group {number} ({', '.join(group.agents)})" for number, group in enumerate(self.groups))

    def held_by(self, group: int) -> tuple[str, ...]:
        """The agents whose models the workers of this group hold. A player with its own model is in the first group."""
        agents = self.groups[group].agents
        return (*agents, PLAYER) if group == 0 else agents

    def _refusals(self) -> Iterator[Refusal]:
        if self.engine == "local" and self.groups:
            message = "cluster.groups needs cluster.engine: ray; without it all agents are in this process"
            yield Refusal(_GROUPS, message, (("cluster", "engine"),))
        elif self.engine == "local" and self.workers > 1:
            message = "cluster.workers needs cluster.engine: ray; without it there is this process alone"
            yield Refusal(("cluster", "workers"), message)
        if self.engine == "local" and self.shard_base:
            message = "cluster.shard_base needs cluster.engine: ray; without it there is nobody to share the base with"
            yield Refusal(("cluster", "shard_base"), message)
        if self.engine == "local" and self.address is not None:
            message = "cluster.address needs cluster.engine: ray; without it the run is in this process"
            yield Refusal(("cluster", "address"), message, (("cluster", "engine"),), at_key=True, idle=True)
        together = sum(group.workers for group in self.groups)
        if self.groups and self.workers != together:
            message = (
                f"cluster.workers is {self.workers}, and the groups have {together} workers together: leave "
                "cluster.workers out, or change cluster.groups"
            )
            rests_on = tuple((*_GROUPS, number, "workers") for number in range(len(self.groups)))
            yield Refusal(("cluster", "workers"), message, rests_on)
        elif self.engine == "ray" and self.parts < self._most_together:
            of = " of a group" if self.groups else ""
            message = (
                f"cluster.shards is {self.shards}, and {self._most_together} workers{of} need as many at least, or "
                "some idle"
            )
            yield Refusal(("cluster", "shards"), message)

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """Refuses groups that do not name every agent exactly once, or that would load one base twice."""
        group_of: dict[str, int] = {}
        for number, group in enumerate(self.groups):
            for i, name in enumerate(group.agents):
                here = (*_GROUPS, number, "agents", i)
                if name not in team.names:
                    near = hint(name, team.names, "the agents are")
                    yield Refusal(here, f"cluster.groups.{number} names no agent {show(name)}{near}")
                elif name in group_of:
                    other = f"cluster.groups.{group_of[name]}" if group_of[name] != number else "the same group"
                    message = f"cluster.groups.{number} names {show(name)}, which {other} names already"
                    yield Refusal(here, f"{message}; an agent lives in one group")
                group_of.setdefault(name, number)
        left = [name for name in dict.fromkeys(team.names) if name not in group_of]
        if self.groups and left and group_of.keys() <= set(team.names):  # otherwise a name was misspelled
            message = f"cluster.groups has no group for {', '.join(map(show, left))}: every agent needs one"
            yield Refusal(_GROUPS, message, (_GROUPS, ("team", "agents")))
        first: dict[tuple[str, str | None], str] = {}
        for agent in team.agents:
            if agent.train != "lora" or agent.name not in group_of:
                continue
            other = first.setdefault(agent.source, agent.name)
            if group_of[other] != group_of[agent.name]:
                message = (
                    f"cluster.groups has {show(other)} and {show(agent.name)} in different groups, and they train "
                    f"adapters on one base ({agent.model}), which a worker holds once for all of them: put them into "
                    "one group"
                )
                yield Refusal(_GROUPS, message, (_GROUPS, ("team", "agents")))
