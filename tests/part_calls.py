"""One rank of a team whose models are sharded over several ranks: the memory of loading them, and their results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from teamtr.batches import AgentBatch
from teamtr.config import TeamFile, load_team_file
from teamtr.engines.local import LocalEngine
from teamtr.engines.shards import Shards
from teamtr.randomness import uniforms
from teamtr.session.models import local_engine
from teamtr.session.task import build_task
from teamtr.theory.objective import Objective

ROWS = 4


class Alive(TorchDispatchMode):
    """Counts the live bytes of tensors created within this mode, and their peak. Memory mapped from a file counts when
    it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.at_most = 0  # at_most: bytes if nothing was freed since the last exact count, which is slow
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen[storage._cdata] = storage._weak_ref()
                    self.at_most += storage.nbytes()
        if self.at_most > self.most:
            self.at_most = self.bytes()
            self.most = max(self.most, self.at_most)
        return found

    def bytes(self) -> int:
        total = 0
        for key, weak in list(self.seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                del self.seen[key]
            elif storage.filename is None:
                total += storage.nbytes()
        return total


def engine_of(team_file: TeamFile, shards: Shards) -> LocalEngine:
    task, plan = build_task(team_file), team_file.sized_plan()
    engine = local_engine(team_file, task, plan, None, shards=shards).engine
    assert isinstance(engine, LocalEngine)
    return engine


def computed(engine: LocalEngine, folder: Path, wait=lambda: None) -> dict[str, np.ndarray]:
    """The results of sampling, training, saving and loading with every agent's model."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(6, 60, size=3 + k % 3).astype(np.int32) for k in range(ROWS)]
    rows, found = np.arange(ROWS), {}

    def version(agent: str, when: str) -> None:
        found[f"{agent} {when}"] = np.frombuffer(engine.learner(agent).fingerprint().encode(), dtype=np.uint8)

    for agent in engine.agents:
        learner = engine.learner(agent)
        info = engine.info(agent)
        told = f"{learner.version()} {info.base_version} {info.config_version} {sorted(info.end_ids)} {info.sampling}"
        found[f"{agent} info"] = np.frombuffer(told.encode(), dtype=np.uint8)
        samples = learner.policy.sample(prompts, uniforms(3, ROWS, 2))
        found[f"{agent} sampled"] = np.concatenate([s.logprobs for s in samples])
        batch = AgentBatch(
            agent,
            tuple(prompts),
            tuple(s.token_ids for s in samples),
            tuple(s.logprobs for s in samples),
            rows,
            rows,
            np.zeros(ROWS, dtype=np.int64),
        )
        found[f"{agent} begin"] = learner.begin(batch)
        assert learner.step(rows, np.where(rows % 2, 1.0, -1.0), Objective(), beta=0.1, learning_rate=1e-2).applied
        version(agent, "stepped")
        learner.save(folder / agent)
        wait()
        learner.perturb(1e-2, seed=1)
        learner.load(folder / agent)
        version(agent, "read again")
        np.testing.assert_array_equal(found[f"{agent} read again"], found[f"{agent} stepped"])
        learner.end()
    return found


def one_rank(rank: int, world: int, port: int, how: str, team: Path, out: Path) -> None:
    """Runs one rank in its own process. ``how``: "parts", or "whole" as if no model could be read in parts."""
    from teamtr.engines import hashing
    from teamtr.engines.cluster import ranks
    from teamtr.engines.torch.outline import NotInParts
    from teamtr.session import models

    torch.set_num_threads(1)
    ranks.join(rank, world, ("127.0.0.1", port), 600.0)
    team_file = load_team_file(team)
    if how == "whole":

        def refuse(*_: object) -> None:
            raise NotInParts("a test says so")

        models.load_outline = refuse
    shards, saved = ranks.Ranks(team_file.cluster.parts, lockstep=True), out / "saved"
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # tensors of other threads are not counted
    hashing.CPU_CHUNK = 1 << 10  # hashing works in blocks, and these models are far smaller than the usual block
    hashing.KEPT_LENGTH = 0  # cached factors are not part of a model
    with Alive() as loading:
        engine = engine_of(team_file, shards)
    kept = loading.bytes()
    found = computed(engine, saved, torch.distributed.barrier)
    for agent in engine.agents:
        engine.learner(agent).optimizer.moments.clear()
    with Alive() as resuming:
        for agent in engine.agents:
            engine.learner(agent).load(saved / agent)
    np.savez(out / f"{rank}.npz", **found, loading=loading.most, kept=kept, resuming=resuming.most)

    torch.distributed.barrier()
