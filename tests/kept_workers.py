"""Ray workers that are reused from run to run, since a new process takes five seconds to load torch.

Workers of a team in which one was killed, or in which a test changed something, are not reused. Runs in their own
processes, and tests that do not request kept workers, start workers as the library does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from teamtr.engines.cluster import ray_members
from teamtr.engines.cluster.ray_members import Placed, RayMembers, Room
from teamtr.ports import EngineLost

CORES = 3
"""Cores of the Ray cluster that all tests of one process share, enough for the largest team."""
LONG = 600
"""Timeout of a call in seconds, long enough for a busy machine."""


class KeptActor(ray_members._Actor):
    """A worker that can leave its team."""

    def leave(self) -> None:
        import gc

        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = self.seat = None
        gc.collect()


class KeptWorkers:
    """Replaces placing and closing of workers within ``at_work``."""

    def __init__(self) -> None:
        self.idle: list[Placed] = []
        self.keep = True  # False: workers that end from now on are not reused
        self._lost = False
        self._place, self._close = ray_members._place, RayMembers.close

    def connect(self) -> None:
        """Start Ray unless it runs. Workers cannot import the tests' modules, so this one is pickled by value."""
        import ray

        ray_members._connect(Room(shards=1), CORES)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    @contextlib.contextmanager
    def at_work(self) -> Iterator[KeptWorkers]:
        """Within this block, teams get idle workers where there are some."""
        import pytest

        self.connect()
        self.keep, self._lost = True, False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_members, "_Actor", KeptActor)
            patch.setattr(ray_members, "_place", self.place)
            patch.setattr(ray_members, "_give_back", give_back)
            patch.setattr(RayMembers, "close", lambda members, why=None: self.close(members, why))
            yield self

    def place(self, wanted: Sequence[int], room: Room) -> list[Placed]:
        counts = ray_members._counts(wanted, room)
        self._lost = False
        missing = max(0, sum(counts) - len(self.idle))
        if missing:
            self.idle += self._place([1] * missing, room)
        found = []
        for count in counts:
            own, self.idle = self.idle[:count], self.idle[count:]
            found.append(Placed([one.actors[0] for one in own], [one.bundles for one in own]))
        return found

    def close(self, members: RayMembers, why: EngineLost | None) -> None:
        """If a worker was lost, all workers end, those of other groups too, as without kept workers."""
        import ray

        if members._lost is not None:
            return
        if why is not None or self._lost or not self.keep:
            self._lost = self._lost or why is not None
            self._close(members, why)
            return
        members._lost = EngineLost("the workers of this engine have ended")
        placed = members._placed
        try:
            ray.get([actor.leave.remote() for actor in placed.actors], timeout=LONG)
        except ray.exceptions.RayError:  # a worker died after the last call
            self._end(placed)
            return
        self.idle += [Placed([actor], own) for actor, own in zip(placed.actors, placed.bundles, strict=True)]

    def drop(self) -> None:
        """End all idle workers."""
        for one in self.idle:
            self._end(one)
        self.idle = []

    def _end(self, placed: Placed) -> None:
        import ray

        for actor in placed.actors:
            ray.kill(actor, no_restart=True)
        give_back(placed.bundles)


def give_back(bundles: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    for one in bundles if isinstance(bundles, list) else [bundles]:
        remove_placement_group(one)
