"""The Engine port over several engines that each hold some of the agents. Calls about an agent go to its engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from teamtr.answers import AS_TRAINED, AgentInfo, Decoding, Sample
from teamtr.ports import Demand, Engine, Follow, Heard, Learner, MemoryPlan, Rehearsal, unfollowed, unheard
from teamtr.streams import InTurns
from teamtr.types import Floats, Ids


class GroupedEngine(InTurns):
    """A team whose agents are divided into groups. ``names``: the name of each group in messages."""

    def __init__(self, groups: Sequence[Engine], names: Sequence[str], agents: Sequence[str]) -> None:
        self.groups = tuple(groups)
        self.names = tuple(names)
        self.agents = tuple(agents)
        self._of = {agent: group for group in groups for agent in group.agents}
        assert sorted(self._of) == sorted(agents), "every agent is in one group"

    # -- per agent --------------------------------------------------------------------------------------------

    def version(self, agent: str) -> str:
        return self._of[agent].version(agent)

    def publish(self, agent: str, version: str) -> None:
        self._of[agent].publish(agent, version)

    def keep_scores(self, agent: str | None) -> None:
        for group in self.groups:
            group.keep_scores(agent if agent in group.agents else None)

    def sample(
        self,
        agent: str,
        prompts: Sequence[Ids],
        noise_BT: Floats,
        *,
        decoding: Decoding = AS_TRAINED,
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        return self._of[agent].sample(agent, prompts, noise_BT, decoding=decoding, heard=heard, follow=follow)

    def learner(self, agent: str) -> Learner:
        return self._of[agent].learner(agent)

    def info(self, agent: str) -> AgentInfo:
        return replace(self._of[agent].info(agent), batch="")

    def set_precision(self, agent: str, precision: str) -> None:
        self._of[agent].set_precision(agent, precision)

    # -- over all groups --------------------------------------------------------------------------------------

    def memory_plan(self, demand: Demand) -> MemoryPlan:
        """Plan of the group with the least memory left; if memory is not counted, of the one that takes the most."""
        plans = [
            replace(group.memory_plan(demand.of(group.agents)), where=name)
            for group, name in zip(self.groups, self.names, strict=True)
        ]
        return max(plans, key=lambda plan: plan.missing)

    def rehearse(self, demand: Demand) -> Rehearsal:
        """Micro-batches of all agents, and the highest peak of all groups."""
        found = [group.rehearse(demand.of(group.agents)) for group in self.groups]
        sizes = {agent: size for one in found for agent, size in one.micro_batch.items()}
        recomputed = tuple(agent for one in found for agent in one.recomputed)
        return Rehearsal(sizes, highest([one.peak_bytes for one in found]), recomputed)

    def peak_bytes(self) -> int | None:
        return highest([group.peak_bytes() for group in self.groups])

    def close(self) -> None:
        with ExitStack() as all_of_them:
            for group in self.groups:
                all_of_them.callback(group.close)


def highest(peaks: Sequence[int | None]) -> int | None:
    """The highest peak of those that are counted; None if none is."""
    return max((peak for peak in peaks if peak is not None), default=None)
