"""Seconds between processes: gradients, parts of a sharded base, calls to workers, checkpoints."""

from __future__ import annotations

import math

from teamtr.planning import rates
from teamtr.planning.learning import PassCount
from teamtr.planning.seconds import Spent
from teamtr.planning.setup import Member, Setup


def gradient_bytes(member: Member) -> int:
    """Of one shard's gradient, in float32."""
    return 4 * member.trained


def exchange_seconds(setup: Setup, member: Member) -> Spent:
    """Of one update. Each shard's gradient is sent to all workers and added by each, shard after shard, so that all
    have the same bits (``engines.cluster.ranks``): it takes as many rounds as there are shards."""
    cluster = setup.cluster
    if cluster.workers == 1 or cluster.shards == 1:
        return Spent()
    shards = min(cluster.shards, setup.plan.problems)
    steps = setup.learning.epochs * setup.learning.minibatches
    hops = math.ceil(math.log2(cluster.workers))
    size = gradient_bytes(member)
    carried = min(rates.GLOO, cluster.network) if cluster.machines > 1 else rates.GLOO
    return Spent.on(network=steps * shards * size * (hops / carried + 1.0 / rates.HOST_ADD))


def gather_seconds(setup: Setup, member: Member, passes: PassCount) -> Spent:
    """Of putting the layers of a sharded base together, in every pass forward and once more in every pass back."""
    cluster = setup.cluster
    if not cluster.shard_base or cluster.workers == 1:
        return Spent()
    size = 4 * member.shape.blocks * (cluster.workers - 1) / cluster.workers
    return Spent.on(network=(passes.forward + passes.backward) * size / (rates.GATHER * cluster.between_cards))


def call_seconds(setup: Setup, *, local: bool) -> Spent:
    """Of a stage's calls to workers."""
    if local:
        return Spent()
    turns = setup.batches * len(setup.turns) * rates.CALLS_OF_TURN
    steps = setup.learning.epochs * setup.learning.minibatches
    updates = len(setup.updated) * (rates.CALLS_OF_UPDATE + steps)
    return Spent.on(calls=rates.CALL_S * (turns + updates))


def checkpoint_seconds(member: Member) -> Spent:
    """Of one commit: the updated agent's weights and moments."""
    return Spent.on(disk=3 * 4 * member.trained / rates.DISK)
