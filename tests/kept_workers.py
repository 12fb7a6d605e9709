"""Workers of Ray that are kept from run to run: a new process takes five seconds to load torch, and a team asks nothing
of a process but that it is there.

A worker that was killed, its fellows, and those in which a test changed something are gone for good, as they always
are. Runs in processes of their own, and tests that do not ask for kept workers, start theirs as the library does.
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
"""Of the Ray that all tests of one process share: room for the largest team."""
LONG = 600
"""Seconds that no call takes, also not on a busy machine, unless it hangs."""


class KeptActor(ray_members._Actor):
    """A worker that can be asked to forget its team."""

    def leave(self) -> None:
        import gc

        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = self.seat = None
        gc.collect()


class KeptWorkers:
    """Stands in for the placing and the closing of workers while it is ``at_work``."""

    def __init__(self) -> None:
        self.idle: list[Placed] = []
        self.keep = True  # False: workers that end now are not to be used again
        self._lost = False
        self._place, self._close = ray_members._place, RayMembers.close

    def connect(self) -> None:
        """Start Ray, unless it runs. Workers do not find the tests' modules: they are given this one."""
        import ray

        ray_members._connect(Room(shards=1), CORES)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    @contextlib.contextmanager
    def at_work(self) -> Iterator[KeptWorkers]:
        """As long as this lasts, whoever starts a team gets kept workers where there are some."""
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
        """Where a worker was lost, all end, those of other groups too: so it is without kept ones."""
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
        except ray.exceptions.RayError:  # one that died after the last call
            self._end(placed)
            return
        self.idle += [Placed([actor], own) for actor, own in zip(placed.actors, placed.bundles, strict=True)]

    def drop(self) -> None:
        """End those that nobody uses."""
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
