"""The Engine port with messages sampled by vLLM; everything else is delegated to the engine that trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import add
from pathlib import Path

from teamtr.answers import AS_TRAINED, AgentInfo, Decoding, Sample
from teamtr.engines.vllm.client import Drawing, seeds_of
from teamtr.engines.vllm.hosts import Host, name_of
from teamtr.engines.vllm.memory import Servers
from teamtr.errors import UserError
from teamtr.ports import Demand, Engine, Follow, Heard, Learner, MemoryPlan, Rehearsal, unfollowed, unheard
from teamtr.randomness import lengths_of
from teamtr.streams import InTurns
from teamtr.types import Floats, Ids


class VllmEngine(InTurns):
    """Samples the agents in ``hosts`` with vLLM, from copies of the weights that ``inner`` trains. All other agents,
    and everything else, are delegated to ``inner``.

    A row's seed is derived from its noise, so a row depends on the other rows in a batch only as far as vLLM's
    arithmetic does. ``temperature``: the training temperature. ``precision``: of the servers, as text. ``servers``: the
    memory they take on a card with ``card_bytes`` of memory (None: not counted), which ``sharing`` workers train on.
    """

    def __init__(
        self,
        inner: Engine,
        hosts: Mapping[str, Host],
        temperature: float,
        precision: str,
        *,
        servers: Servers | None = None,
        card_bytes: int | None = None,
        sharing: int = 1,
    ) -> None:
        self.inner = inner
        self.servers = Servers() if servers is None else servers
        self.card_bytes = card_bytes
        self.sharing = sharing
        self.hosts = dict(hosts)
        self.temperature = temperature
        self.precision = precision
        self.agents = inner.agents
        self._end_ids = {agent: inner.info(agent).end_ids for agent in hosts}

    # -- sampling ---------------------------------------------------------------------------------------------

    def version(self, agent: str) -> str:
        return self.inner.version(agent)

    def publish(self, agent: str, version: str) -> None:
        self.inner.publish(agent, version)
        if agent in self.hosts:
            self._serve(agent, version)

    def keep_scores(self, agent: str | None) -> None:
        if agent in self.hosts:
            raise UserError(f"learner.score: sampler: vLLM samples agent {agent!r} and keeps no features: set own")
        self.inner.keep_scores(agent)

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
        """Samples with the current weights. Weights that were loaded or restored without being published are served
        first."""
        if agent not in self.hosts:
            return self.inner.sample(agent, prompts, noise_BT, decoding=decoding, heard=heard, follow=follow)
        if not prompts:
            return []
        version, tokens = self.version(agent), lengths_of(noise_BT)
        drawing = Drawing(
            model=self._serve(agent, version),
            salt=name_of(agent, version),
            end_ids=self._end_ids[agent],
            temperature=self.temperature if decoding.temperature is None else decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
        )
        self._require_room(agent, max(map(add, map(len, prompts), tokens)))

        def told(row: int, sample: Sample) -> None:
            follow(row, 0, sample.token_ids)
            heard(row, replace(sample, version=version))

        samples = self.hosts[agent].client.sample(prompts, tokens, seeds_of(noise_BT), drawing, told)
        return [replace(sample, version=version) for sample in samples]

    def _serve(self, agent: str, version: str) -> str:
        learner = self.inner.learner(agent)

        def write(folder: Path) -> None:
            learner.save(folder)
            if (written := learner.version()) != version:
                raise RuntimeError(f"agent {agent!r} holds weights {written[:8]}; {version[:8]} cannot be published")

        return self.hosts[agent].serve(agent, version, write)

    def _require_room(self, agent: str, tokens: int) -> None:
        context = self.hosts[agent].context
        if context is not None and tokens > context:
            raise UserError(
                f"a prompt of agent {agent!r} and its message need {tokens} tokens, but its vLLM server takes "
                f"{context}; raise sampling.vllm.context_tokens, or shorten max_tokens, the rounds or the problems"
            )

    def info(self, agent: str) -> AgentInfo:
        found = self.inner.info(agent)
        if agent not in self.hosts:
            return replace(found, batch="")
        told = f"{self.hosts[agent].told} {self.precision}".strip()
        return replace(found, sampling=told, samples_from_a_copy=True, batch="")

    # -- everything else --------------------------------------------------------------------------------------

    def learner(self, agent: str) -> Learner:
        return self.inner.learner(agent)

    def set_precision(self, agent: str, precision: str) -> None:
        self.inner.set_precision(agent, precision)

    def memory_plan(self, demand: Demand) -> MemoryPlan:
        """Plan of the busiest worker, next to the servers. It needs no memory for sampling the agents that they
        serve."""
        found = self.inner.memory_plan(replace(demand, sampled_elsewhere=frozenset(self.hosts)))
        running = [agent for agent, host in self.hosts.items() if host.runs_here]
        return self.servers.beside(found, self.card_bytes, self.sharing, running)

    def rehearse(self, demand: Demand) -> Rehearsal:
        return self.inner.rehearse(demand)

    def peak_bytes(self) -> int | None:
        return self.inner.peak_bytes()

    def close(self) -> None:
        try:
            for host in {id(host): host for host in self.hosts.values()}.values():
                host.close()
        finally:
            self.inner.close()
