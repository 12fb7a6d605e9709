"""All calls to a learner, in one process or as one rank of several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conftest import FEW, make_batch, make_policy
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.policy import Policy
from teamtr.engines.shards import Shards
from teamtr.theory.objective import Objective

PROBLEMS, GROUP = 5, 3
OVERFLOWING = 2.0**19


def policy_of(kind: str, spread: Callable[[Any], None] | None = None) -> Policy:
    """A policy of this kind; ``few`` is an adapter on few layers."""
    return make_policy("lora", lora=FEW, spread=spread) if kind == "few" else make_policy(kind, spread=spread)


def learner_of(policy: Policy, shards: Shards, micro_batch: int = 2, precision: str = "fp32") -> PolicyLearner:
    """A learner. In float16, its initial loss scale makes some micro-batches overflow."""
    learner = PolicyLearner("agent", policy, micro_batch=micro_batch, keep_initial=True, critic=True, shards=shards)
    if precision != "fp32":
        policy.precision = precision
    if precision == "fp16":
        learner.optimizer.loss_scale = OVERFLOWING
    return learner


def everything(learner: PolicyLearner, folder: Path, wait: Callable[[], None] = lambda: None) -> dict[str, np.ndarray]:
    """The result of each call, and the version after each call that changes weights. ``save`` writes to ``folder``;
    ``wait`` is called until it is written."""
    batch = make_batch(learner, problems=PROBLEMS, group=GROUP)
    rows = np.arange(len(batch))
    advantages = np.where(rows % 2, 1.0, -1.0)
    found: dict[str, np.ndarray] = {}

    def keep(name: str, *values) -> None:
        found[name] = np.concatenate([np.ravel(np.asarray(value, dtype=np.float64)) for value in values])

    def version(name: str) -> None:
        found[name] = np.frombuffer(learner.fingerprint().encode(), dtype=np.uint8)

    version("at first")
    keep("begin", learner.begin(batch, reference=True))
    keep("token_logprobs", *learner.token_logprobs())
    keep("values", *learner.values())
    before = learner.snapshot()
    stats = learner.step(rows, advantages, Objective(reference_kl=0.1), beta=0.1, learning_rate=1e-2)
    assert stats.applied
    keep("step", stats.surrogate, stats.kl_full, stats.grad_norm, stats.ratio_clip_rate, stats.kl_reference)
    some = rows[batch.problem_M == 1]  # rows of one shard only: ranks without rows take part in the step too
    stats = learner.step(some, advantages[some], Objective(), beta=0.1, learning_rate=1e-2)
    keep("scale", learner.optimizer.loss_scale)
    keep("step of one shard", stats.surrogate, stats.kl_full, stats.grad_norm)
    version("after steps")
    targets = [np.full(n, 0.5) for n in batch.lengths_M]
    fit = learner.fit_values(rows, targets, clip=0.2, learning_rate=1e-2)
    keep("fit_values", fit.loss, fit.clip_rate)
    version("after fit_values")
    for name, chosen in (("measure", None), ("measure of some", rows[::-2]), ("measure of one", rows[4:5])):
        one = learner.measure(chosen)
        keep(name, one.full_M, one.k1_M, one.k3_M, one.log_ratio_M, one.reference_M)
    keep("token_kls", *learner.token_kls())
    rng = np.random.default_rng(0)
    verified = learner.verify(rng.random(int(batch.lengths_M.sum())), rng.random(len(batch)))
    keep("verify", verified.kept_M, verified.next_M)
    shift = learner.token_shift()
    keep("token_shift", shift.before_R, shift.after_R, shift.moved_R, shift.flipped, shift.positions)
    after = learner.snapshot()
    learner.move(before, after, 0.5)
    version("moved")
    learner.save(folder)
    wait()
    learner.perturb(1e-3, seed=4)
    version("perturbed")
    learner.load(folder)
    version("read")
    np.testing.assert_array_equal(found["read"], found["moved"])
    assert (found["perturbed"] != found["moved"]).any()
    learner.restore(before)
    version("restored")
    learner.end()
    return found


def one_rank(
    rank: int, world: int, port: int, shards: int, kind: str, sharded: bool, precision: str, out: Path
) -> None:
    """Runs one rank in its own process, and writes its results to a file named by its rank."""
    import torch
    from torch.distributed.tensor import DTensor

    from teamtr.engines.cluster import ranks
    from teamtr.engines.cluster.sharded_models import LayerSpread

    torch.set_num_threads(1)
    ranks.join(rank, world, ("127.0.0.1", port), 600.0)
    own = ranks.Ranks(shards, lockstep=sharded)
    policy = policy_of(kind, LayerSpread(own, torch.device("cpu")).spread if sharded else None)
    if sharded:
        spread = [p for name, p in policy.causal_lm.get_decoder().layers.named_parameters() if "lora_" not in name]
        assert all(isinstance(p, DTensor) and (p.to_local().numel() < p.numel() or world == 1) for p in spread)
    learner = learner_of(policy, own, precision=precision)
    found = everything(learner, out / "saved", torch.distributed.barrier)
    np.savez(out / f"{rank}.npz", **found, tokens=np.array(list(learner.tokens.values())))
    torch.distributed.barrier()


def one_rehearsing(rank: int, world: int, port: int, team: str, settings: list[dict[str, int]], out: Path) -> None:
    """One rank of a team that rehearses its memory. ``settings`` of each rank: ``fits``, the most messages of the
    speaker that fit into a pass; ``micro_batch``, the speaker's initial micro-batch. Writes the rehearsed agents, the
    resulting micro-batches, and the most messages of the speaker in one pass with gradients."""
    import torch

    from part_calls import engine_of
    from teamtr.config import loads
    from teamtr.engines.cluster import ranks
    from teamtr.session.build import build
    from teamtr.session.memory import demand_of

    torch.set_num_threads(1)
    team_file, own = loads(team, "plan.yaml"), settings[rank]
    demand = demand_of(build(team_file)).of_worker(world, world)
    ranks.join(rank, world, ("127.0.0.1", port), 120.0)
    engine, tried = engine_of(team_file, ranks.Ranks(world)), []
    speaker = engine.learner("speaker")
    speaker.passes.micro_batch = own.get("micro_batch", speaker.passes.micro_batch)
    enough, begin, most = speaker.policy.features, PolicyLearner.begin, {False: 0, True: 0}

    def limited(prompts, messages):
        if len(messages) > own.get("fits", len(messages)):
            raise torch.OutOfMemoryError("injected")
        most[torch.is_grad_enabled()] = max(most[torch.is_grad_enabled()], len(messages))
        return enough(prompts, messages)

    def look(self, batch, **options):
        tried.append(self.agent)
        return begin(self, batch, **options)

    speaker.policy.features, PolicyLearner.begin = limited, look
    found = engine.rehearse(demand)
    (out / f"{rank}.json").write_text(json.dumps([tried, found.micro_batch, most[True]]))
    torch.distributed.barrier()
