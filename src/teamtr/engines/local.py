"""The Engine port for a team whose models are all in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from teamtr.answers import AS_TRAINED, AgentInfo, Decoding, Sample
from teamtr.engines import memory
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.policy import CHEAPEST_FIRST
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.shards import spread
from teamtr.engines.streaming import Streaming
from teamtr.ports import Demand, Follow, Heard, MemoryPlan, More, Rehearsal, unfollowed, unheard
from teamtr.streams import in_turns
from teamtr.types import Floats, Ids


class LocalEngine:
    """Samples and trains in one process, so publishing an update moves no weights.

    ``shards``: rows are sampled in this many parts, each by itself.
    """

    def __init__(self, learners: Mapping[str, PolicyLearner], shards: int = 1) -> None:
        self.learners = dict(learners)
        self.agents = tuple(learners)
        self.shards = shards

    def learner(self, agent: str) -> PolicyLearner:
        return self.learners[agent]

    def version(self, agent: str) -> str:
        return self.learners[agent].version()

    def publish(self, agent: str, version: str) -> None:
        present = self.version(agent)
        if present != version:
            raise RuntimeError(f"agent {agent!r} holds weights {present[:8]}; {version[:8]} cannot be published")
        self._forget_scores()

    def keep_scores(self, agent: str | None) -> None:
        if agent is not None:
            self._forget_scores()
        for name, learner in self.learners.items():
            learner.keep_scores(name == agent)

    def _forget_scores(self) -> None:
        for learner in self.learners.values():
            learner.kept.clear()

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
        version, policy = self.version(agent), self.learners[agent].policy
        drawing = TokenSampler.of(decoding, policy.temperature)
        samples: list[Sample] = []
        for part in spread(len(prompts), min(self.shards, len(prompts))) if prompts else ():
            samples += policy.sample(
                prompts[part],
                noise_BT[part],
                drawing,
                version=version,
                heard=_told_as(heard, len(samples), version),
                follow=_followed_as(follow, len(samples)),
            )
        return [replace(sample, version=version) for sample in samples]

    def stream(self, more: More, *, heard: Heard = unheard, follow: Follow = unfollowed) -> None:
        """Samples in one running batch where agents share a paged sampler. With several shards, each of which is a
        batch of its own in whatever process, rows are sampled batch by batch instead."""
        if self.shards > 1:
            in_turns(self, more, heard=heard, follow=follow)
        else:
            policies = {name: learner.policy for name, learner in self.learners.items()}
            Streaming(self, policies, more, heard, follow).run()

    def take_up(self, agent: str) -> None:
        """Puts the agent's weights where they are sampled from, before any message is requested."""
        self.learners[agent].policy.take_up(self.version(agent))

    def info(self, agent: str) -> AgentInfo:
        learner = self.learners[agent]
        policy, now = learner.policy, learner.policy.precision
        order: tuple[str, ...] = CHEAPEST_FIRST
        finer = order[order.index(now) :] if now in order else (now,)
        return AgentInfo(
            precision=now,
            precisions=finer,
            sampling=policy.sampling_path,
            samples_from_a_copy=policy.samples_from_a_copy,
            end_ids=policy.end_ids,
            device=str(policy.device),
            reference_version=learner.initial_version,
            config_version=policy.config_version,
            base_version=policy.base_version,
            trained_parameters=sum(parameter.numel() for parameter in policy.parameters().values()),
            positions=policy.positions,
            parameters=policy.model_parameters,
            batch=policy.batch if self.shards == 1 else "",
        )

    def set_precision(self, agent: str, precision: str) -> None:
        self.learners[agent].policy.precision = precision
        memory.drop_halves(self.learners)

    def memory_plan(self, demand: Demand) -> MemoryPlan:
        return memory.plan(self.learners, demand.of_worker(self.shards, 1))

    def rehearse(self, demand: Demand) -> Rehearsal:
        return memory.rehearse(self.learners, demand.of_worker(self.shards, 1))

    def peak_bytes(self) -> int | None:
        return memory.peak_bytes()

    def close(self) -> None:
        """No-op: nothing is held elsewhere."""


def _told_as(heard: Heard, first_row: int, version: str) -> Heard:
    """``heard`` for a part of the rows, whose messages this version wrote."""
    if heard is unheard:
        return heard
    return lambda row, sample: heard(first_row + row, replace(sample, version=version))


def _followed_as(follow: Follow, first_row: int) -> Follow:
    """``follow`` for a part of the rows."""
    if follow is unfollowed or not first_row:
        return follow
    return lambda row, before, token_ids: follow(first_row + row, before, token_ids)
