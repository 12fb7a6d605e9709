"""Seconds by what they are spent on, and the work of a stage that falls to the busiest worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from teamtr.planning.setup import PlannedTurn, Setup

BOUNDS = {
    "compute": "matrix products",
    "bandwidth": "reading weights, keys and values",
    "KV memory": "too little memory for all rows at once: they are sampled in waves",
    "launches": "Python and small kernels, however little they compute",
    "network": "gradients and parts of the base between workers",
    "calls": "calls to workers",
    "disk": "checkpoints",
    "waiting": "workers with less to do wait for the one with most",
}
"""What seconds are spent on, with descriptions."""


@dataclass(frozen=True)
class Spent:
    """Seconds by what they are spent on (``BOUNDS``)."""

    by: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def on(**seconds: float) -> Spent:
        return Spent(seconds)

    def __add__(self, other: Spent) -> Spent:
        return Spent({key: self.by.get(key, 0.0) + other.by.get(key, 0.0) for key in {**self.by, **other.by}})

    def __mul__(self, times: float) -> Spent:
        return Spent({key: times * value for key, value in self.by.items()})

    @property
    def seconds(self) -> float:
        return sum(self.by.values())

    @property
    def bound(self) -> str:
        """What most of the time is spent on."""
        return max(self.by, key=lambda key: self.by[key], default="compute")

    def waiting(self, busy: float) -> Spent:
        """The same total, where workers are busy for this share on average and wait for the rest."""
        return self * busy + Spent({"waiting": self.seconds * (1.0 - busy)})


@dataclass(frozen=True)
class Load:
    """Problems and rows of one call in a batch; ``parts``: calls of the busiest worker.

    ``busy``: the mean load of the workers, as a share of the busiest worker's.
    """

    problems: int
    rows: int
    parts: int
    busy: float

    @staticmethod
    def sampled(setup: Setup, episodes: int) -> Load:
        """The load of sampling: a shard consists of neighboring episodes."""
        cluster, group = setup.cluster, setup.plan.group_size
        rows = -(-episodes // min(cluster.shards, episodes))
        parts = -(-min(cluster.shards, episodes) // cluster.workers)
        return Load(-(-rows // group), rows, parts, episodes / (rows * parts * cluster.workers))

    @staticmethod
    def learned(setup: Setup) -> Load:
        """The load of an update: all episodes of a problem are in one shard."""
        cluster, plan = setup.cluster, setup.plan
        shards = min(cluster.shards, plan.problems)
        problems, parts = -(-plan.problems // shards), -(-shards // cluster.workers)
        busy = plan.problems / (problems * parts * cluster.workers)
        return Load(problems, problems * plan.group_size, parts, busy)


def distinct(turn: PlannedTurn, problems: float, rows: float) -> float:
    """Tokens to compute for these rows: the common prefix of a problem's rows once, and nothing that was read in an
    earlier turn."""
    read = max(turn.alike, turn.known)
    return problems * max(0, turn.alike - turn.known) + rows * (turn.whole - read)
