"""Where a team's models are: in this process, or in several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from teamtr.settings.refusals import Refusal
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, Count, Flag, Positive


class ClusterConfig(Section):
    """Where a team's models are; see docs/cluster.md."""

    engine: Literal["local", "ray"] = key(
        "local", "local: in this process; ray: in workers, on this machine or many (needs teamtr[ray])."
    )
    workers: Positive = key(1, "Worker processes with ray; each holds the whole team and computes its part of a batch.")
    shards: Positive | None = unset(
        "Parts of every batch, each computed by itself. As many shards give the same bits with any number of workers; "
        "default: as many as workers with ray, else 1."
    )
    shard_base: Flag = key(
        False, "Each worker holds a part of every model's layers (FSDP2), for models that do not fit into a card."
    )
    address: str | None = unset("Of a Ray cluster that runs; default: RAY_ADDRESS, else one is started here.")
    max_restarts: Count = key(3, "How often workers that died or hang are made anew in one command.")
    patience_s: Above0 = key(1800.0, "How many seconds a call to a worker may take before it counts as hanging.")

    def _settle(self) -> None:
        """Write out the number of shards: it decides the bits, and what goes on with a run must have as many."""
        if self.shards is None:
            object.__setattr__(self, "shards", self.workers if self.engine == "ray" else 1)

    @property
    def parts(self) -> int:
        """How many shards there are."""
        assert self.shards is not None, "settled above"
        return self.shards

    def _refusals(self) -> Iterator[Refusal]:
        if self.engine == "local" and self.workers > 1:
            message = "cluster.workers needs cluster.engine: ray; without it there is this process alone"
            yield Refusal(("cluster", "workers"), message)
        if self.engine == "local" and self.shard_base:
            message = "cluster.shard_base needs cluster.engine: ray; without it there is nobody to share the base with"
            yield Refusal(("cluster", "shard_base"), message)
        if self.parts < self.workers:
            message = f"cluster.shards is {self.shards}, and {self.workers} workers need as many at least, or some idle"
            yield Refusal(("cluster", "shards"), message)
