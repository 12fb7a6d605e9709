"""Seconds between processes: summing gradients, gathering partitioned layers, calls to workers, checkpoints."""

from __future__ import annotations

import math

from teamtr.planning import rates
from teamtr.planning.learning import PassCount
from teamtr.planning.seconds import Spent
from teamtr.planning.setup import Member, Setup


def gradient_bytes(setup: Setup, member: Member) -> int:
    """Bytes of one shard's gradient in float32, without that of partitioned layers."""
    spread = setup.cluster.shard_base and not member.adapted
    return 4 * (member.trained - (member.shape.blocks if spread else 0))


def exchange_seconds(setup: Setup, member: Member) -> Spent:
    """Seconds of exchanging gradients in one update. A worker sends slices of its shards' gradients to the workers that
    sum them, sums its own slice over all shards in their order, and receives the other sums
    (``engines.cluster.ranks``)."""
    cluster = setup.cluster
    if cluster.workers == 1 or cluster.shards == 1:
        return Spent()
    shards = min(cluster.shards, setup.plan.problems)
    steps = setup.learning.epochs * setup.learning.minibatches
    size, most = gradient_bytes(setup, member), math.ceil(shards / cluster.workers)
    carried = min(rates.GLOO, cluster.network) if cluster.machines > 1 else rates.GLOO
    sent = (most + 1) * (cluster.workers - 1) / cluster.workers
    return Spent.on(network=steps * size * (sent / carried + shards / cluster.workers / rates.HOST_ADD))


def gather_seconds(setup: Setup, member: Member, passes: PassCount) -> Spent:
    """Seconds of gathering partitioned layers, in every forward pass and again in every backward pass, and of sending
    the gradients of trained ones in every backward pass."""
    cluster = setup.cluster
    if not cluster.shard_base or cluster.workers == 1:
        return Spent()
    size = 4 * member.shape.blocks * (cluster.workers - 1) / cluster.workers
    times = passes.forward + passes.backward * (1 if member.adapted else 2)
    return Spent.on(network=times * size / (rates.GATHER * cluster.between_cards))


def call_seconds(setup: Setup, *, local: bool) -> Spent:
    """Seconds of a stage's calls to workers."""
    if local:
        return Spent()
    turns = setup.batches * len(setup.turns) * rates.CALLS_OF_TURN
    steps = setup.learning.epochs * setup.learning.minibatches
    updates = len(setup.updated) * (rates.CALLS_OF_UPDATE + steps)
    return Spent.on(calls=rates.CALL_S * (turns + updates))


def checkpoint_seconds(member: Member) -> Spent:
    """Seconds of one commit, which writes the weights and moments of the updated agent."""
    return Spent.on(disk=3 * 4 * member.trained / rates.DISK)
