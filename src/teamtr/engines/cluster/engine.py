"""The Engine port over several worker processes.

Calls that change a model go to all of them, so that all hold the same state.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from teamtr.answers import AS_TRAINED, AgentInfo, Decoding, Divergence, Sample, StepStats, TokenShift, ValueStats
from teamtr.batches import AgentBatch, Verified
from teamtr.engines.cluster.groups import highest
from teamtr.engines.cluster.seat import Call, Handle
from teamtr.engines.shards import spread
from teamtr.ports import Demand, Follow, Heard, MemoryPlan, Rehearsal, Snapshot, unfollowed, unheard
from teamtr.streams import InTurns
from teamtr.theory.objective import Objective
from teamtr.types import Floats, Ids


class Members(Protocol):
    """The worker processes that hold the team, numbered from 0."""

    count: int

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Sends each member its call, all at once, and returns their results. Raises what one of them raised, and
        ``EngineLost`` when one is gone."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class ClusterEngine(InTurns):
    """A team whose models live in other processes. ``shards``: number of parts that rows are split into, each sampled
    separately. ``lockstep``: a member holds only a part of each model, so all members must run every pass together."""

    def __init__(self, members: Members, shards: int, *, lockstep: bool = False) -> None:
        self.members = members
        self.shards = shards
        self.lockstep = lockstep
        self._numbers = count()
        self._dropped: list[int] = []
        self.agents: tuple[str, ...] = tuple(self.one("agents"))

    # -- calls ------------------------------------------------------------------------------------------------

    def one(self, name: str, *arguments: Any, agent: str | None = None, **options: Any) -> Any:
        """The first member's result, for what is the same on all members."""
        return self.members.ask({0: Call(name, agent, arguments, options)})[0]

    def known(self, name: str, *arguments: Any, agent: str | None = None) -> Any:
        """The first member's result, for what is computed from weights. In lockstep all members are called, because
        each may hold only a part."""
        return self.all(name, *arguments, agent=agent)[0] if self.lockstep else self.one(name, *arguments, agent=agent)

    def all(self, name: str, *arguments: Any, agent: str | None = None, **options: Any) -> list[Any]:
        """The results of all members, in order."""
        return self._everyone(Call(name, agent, arguments, options, dropped=self._taken()))

    def kept(self, name: str, *, agent: str) -> Handle:
        """A handle to results that stay with the members, one on each."""
        handle = Handle(next(self._numbers))
        self._everyone(Call(name, agent, keep=handle.number, dropped=self._taken()))
        weakref.finalize(handle, self._dropped.append, handle.number)
        return handle

    def _everyone(self, call: Call) -> list[Any]:
        found = self.members.ask(dict.fromkeys(range(self.members.count), call))
        return [found[member] for member in range(self.members.count)]

    def _taken(self) -> tuple[int, ...]:
        dropped, self._dropped[:] = tuple(self._dropped), []
        return dropped

    # -- the port ---------------------------------------------------------------------------------------------

    def learner(self, agent: str) -> ClusterLearner:
        return ClusterLearner(self, agent)

    def version(self, agent: str) -> str:
        return str(self.known("version", agent))

    def publish(self, agent: str, version: str) -> None:
        self.all("publish", agent, version)

    def keep_scores(self, agent: str | None) -> None:
        """Each member keeps the features of the rows that it sampled, and recomputes those of rows that another member
        sampled."""
        self.all("keep_scores", agent)

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
        """Part k is sampled by member k modulo the number of members, which must hold the same weights as the first. In
        lockstep all members take part; if the agent is not sampled from a whole copy, every member samples all parts.
        ``follow`` and ``heard`` are called once all members have answered; these finish at about the same time."""
        if not prompts:
            return []
        parts = spread(len(prompts), min(self.shards, len(prompts)))
        version = self.version(agent)
        together = self.lockstep and not self.info(agent).samples_from_a_copy
        samplers = 1 if together else self.members.count
        calls = {}
        for member in range(self.members.count):
            own = [(list(prompts[part]), noise_BT[part]) for part in parts[member % samplers :: samplers]]
            if own or self.lockstep:
                calls[member] = Call("sample_parts", None, (agent, version, own, decoding))
        found = {member: iter(answer) for member, answer in self.members.ask(calls).items()}
        samples = [sample for k in range(len(parts)) for sample in next(found[k % samplers])]
        for row, sample in enumerate(samples):
            follow(row, 0, sample.token_ids)
            heard(row, sample)
        return samples

    def info(self, agent: str) -> AgentInfo:
        found: AgentInfo = self.one("info", agent)
        return replace(found, batch="")  # a stream is sampled batch by batch

    def set_precision(self, agent: str, precision: str) -> None:
        self.all("set_precision", agent, precision)

    def memory_plan(self, demand: Demand) -> MemoryPlan:
        """Plan of the member with the most rows."""
        found: MemoryPlan = self.all("memory_plan", demand.of_worker(self.shards, self.members.count))[0]
        return found

    def rehearse(self, demand: Demand) -> Rehearsal:
        """The smallest micro-batch and the highest peak of all members."""
        found: list[Rehearsal] = self.all("rehearse", demand.of_worker(self.shards, self.members.count))
        sizes = {agent: min(one.micro_batch[agent] for one in found) for agent in found[0].micro_batch}
        recomputed = tuple(agent for agent in sizes if any(agent in one.recomputed for one in found))
        return Rehearsal(sizes, highest([one.peak_bytes for one in found]), recomputed)

    def peak_bytes(self) -> int | None:
        return highest(self.all("peak_bytes"))

    def close(self) -> None:
        self.members.close()


class ClusterLearner:
    """The Learner port of one agent, whose model every member holds."""

    def __init__(self, engine: ClusterEngine, agent: str) -> None:
        self.engine = engine
        self.agent = agent

    def _one(self, name: str, *arguments: Any, **options: Any) -> Any:
        return self.engine.one(name, *arguments, agent=self.agent, **options)

    def _all(self, name: str, *arguments: Any, **options: Any) -> Any:
        """The first member's result of a call that all members compute together."""
        return self.engine.all(name, *arguments, agent=self.agent, **options)[0]

    @property
    def tokens(self) -> dict[str, int]:
        """Sum over the members: each counts the tokens that pass through its own model."""
        found = self.engine.all("tokens", agent=self.agent)
        return {kind: sum(one[kind] for one in found) for kind in found[0]}

    def version(self) -> str:
        return str(self.engine.known("version", agent=self.agent))

    def fingerprint(self) -> str:
        return str(self.engine.known("fingerprint", agent=self.agent))

    def begin(self, batch: AgentBatch, *, reference: bool = False, from_sampler: bool = False) -> Floats:
        found: Floats = self._all("begin", batch, reference=reference, from_sampler=from_sampler)
        return found

    @property
    def sampler_scored(self) -> int:
        return sum(self.engine.all("sampler_scored", agent=self.agent))

    def token_logprobs(self) -> list[Floats]:
        found: list[Floats] = self._one("token_logprobs")
        return found

    def step(
        self,
        rows: NDArray[np.int64],
        advantages: Floats | Sequence[Floats],
        objective: Objective,
        *,
        beta: float,
        learning_rate: float,
    ) -> StepStats:
        found: StepStats = self._all("step", rows, advantages, objective, beta=beta, learning_rate=learning_rate)
        return found

    def values(self) -> list[Floats]:
        found: list[Floats] = self._one("values")
        return found

    def fit_values(
        self, rows: NDArray[np.int64], targets: Sequence[Floats], *, clip: float, learning_rate: float
    ) -> ValueStats:
        found: ValueStats = self._all("fit_values", rows, targets, clip=clip, learning_rate=learning_rate)
        return found

    def measure(self, rows: NDArray[np.int64] | None = None) -> Divergence:
        found: Divergence = self._all("measure", rows)
        return found

    def verify(self, noise_N: Floats, noise_M: Floats) -> Verified:
        found: Verified = self._all("verify", noise_N, noise_M)
        return found

    def token_kls(self) -> list[Floats]:
        found: list[Floats] = self._all("token_kls")
        return found

    def token_shift(self) -> TokenShift:
        found: TokenShift = self._all("token_shift")
        return found

    def end(self) -> None:
        self._all("end")

    def snapshot(self) -> Snapshot:
        return Snapshot(self.engine.kept("snapshot", agent=self.agent))

    def restore(self, snapshot: Snapshot) -> None:
        self._all("restore", snapshot)

    def move(self, start: Snapshot, end: Snapshot, fraction: float) -> None:
        self._all("move", start, end, fraction)

    def perturb(self, relative: float, seed: int) -> None:
        self._all("perturb", relative, seed)

    def save(self, folder: Path) -> None:
        """The first member writes; in lockstep it gathers the other members' parts. Weights do not pass through this
        process."""
        (self._all if self.engine.lockstep else self._one)("save", folder)

    def set_aside(self) -> None:
        """None: members answer one call at a time, so writing cannot overlap with sampling."""

    def load(self, folder: Path) -> None:
        self._all("load", folder)
