"""Cluster members as Ray actors. Ray places them, on this machine or on others, and reports when one is gone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.engines import card
from teamtr.engines.cluster.seat import Answer, Call, Seat
from teamtr.engines.local import LocalEngine
from teamtr.engines.shards import Shards
from teamtr.errors import TeamTRError, UserError, first_line
from teamtr.ports import EngineLost

MakeEngine = Callable[[Shards], LocalEngine]

TRIES = 3
"""Attempts to start Ray on this machine: on a busy one it may miss its own limit of half a minute."""
STORE_BYTES = 256 << 20
"""Size of Ray's object store if Ray is started here. Token ids and numbers pass between processes, never weights."""
GRACE_S = 10.0
"""How long to wait for the other members' results after one member has failed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """What the members need, and where they run.

    Attributes:
        shards: number of shards of every batch.
        address: of a running cluster; None: RAY_ADDRESS if it is set, otherwise one on this machine.
        patience_s: timeout of a call, after which a member counts as hung.
        on_cards: each member has a card, or a part of one if there are fewer cards than members.
        may_be_fewer: start as many members as there is room for, instead of raising an error.
        lockstep: all members pass through the model together, because each holds a part of it.
    """

    shards: int
    address: str | None = None
    patience_s: float = 1800.0
    on_cards: bool = False
    may_be_fewer: bool = False
    lockstep: bool = False


@dataclass(frozen=True)
class Group:
    """Members that hold the same models. ``number`` and ``agents`` identify the group in error messages, if there are
    several."""

    make: MakeEngine
    workers: int
    number: int | None = None
    agents: tuple[str, ...] = ()

    def worker(self, member: int, process: str = "") -> str:
        """The name of a member in messages."""
        group = "" if self.number is None else f" of group {self.number}"
        inside = "; ".join(filter(None, (", ".join(self.agents), process)))
        return f"worker {member}{group}" + (f" ({inside})" if inside else "")


def start_members(groups: Sequence[Group], room: Room) -> list[RayMembers]:
    """Starts the members of every group. Groups load their models in parallel."""
    _connect(room, sum(group.workers for group in groups))
    placed = _place([group.workers for group in groups], room)
    started = [RayMembers(group, room, own) for group, own in zip(groups, placed, strict=True)]
    try:
        joining = [members.join() for members in started]
        for members, joined in zip(started, joining, strict=True):
            members.wait_for(joined)
    except BaseException:
        for members in started:
            members.close()
        raise
    return started


class RayMembers:
    """The members of a group, one actor each, as ``start_members`` creates them."""

    def __init__(self, group: Group, room: Room, placed: Placed) -> None:
        self.group = group
        self.room = room
        self._placed = placed
        self.count = len(placed.actors)
        self._lost: EngineLost | None = None
        self.processes: dict[int, tuple[str, int]] = {}

    def join(self) -> dict[int, Any]:
        """Make all members rendezvous and load their models; returns the pending results."""
        place = self._first()
        return {
            rank: actor.join.remote(self.group, rank, self.count, self.room, place)
            for rank, actor in enumerate(self._placed.actors)
        }

    def wait_for(self, joined: Mapping[int, Any]) -> None:
        """Wait until all members can take calls."""
        self.processes = self._wait(joined)

    def _first(self) -> tuple[str, int]:
        """Where the members rendezvous: a port of the first member's machine."""
        found: tuple[str, int] = self._wait({0: self._placed.actors[0].open.remote()})[0]
        return found

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        if self._lost is not None:
            raise EngineLost(str(self._lost))  # later calls, such as cleanup, get the same reason
        return self._wait({member: self._placed.actors[member].answer.remote(call) for member, call in calls.items()})

    def _wait(self, asked: Mapping[int, Any]) -> dict[int, Any]:
        """The results of all members. Once one has failed, the others get ``GRACE_S`` seconds to fail too, so that the
        cause is raised and not an error of a member that only lost contact with the others."""
        import ray

        who = {ref: member for member, ref in asked.items()}
        found: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        waiting, end = list(who), time.monotonic() + self.room.patience_s
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not done:
                break
            member = who[done[0]]
            answer = _answer(done[0], self._name(member))
            if answer.error is None:
                found[member] = answer.result
            else:
                failed[member] = answer.error
                end = min(end, time.monotonic() + GRACE_S)
        silent = [who[ref] for ref in waiting]
        if failed or silent:
            self._raise(failed, silent)
        return found

    def _name(self, member: int) -> str:
        host, process = self.processes.get(member, ("", 0))
        return self.group.worker(member, f"process {process} on {host}" if process else "")

    def _raise(self, failed: Mapping[int, Exception], silent: list[int]) -> None:
        from teamtr.engines.cluster.ranks import Apart

        own = [error for error in failed.values() if not isinstance(error, EngineLost | Apart)]
        lost = [error for error in failed.values() if isinstance(error, EngineLost)]
        if own and not silent and not lost:
            raise own[0]  # all members have answered, and can take another call
        if lost:
            why = lost[0]
        elif failed:
            member, error = next(iter(failed.items()))
            why = EngineLost(f"{self._name(member)} lost touch with the others ({first_line(error)})")
        else:
            why = EngineLost(f"{self._name(silent[0])} has not answered for {self.room.patience_s:.0f} s")
        self.close(why)
        raise own[0] if own and not lost else why  # other members' errors follow from the lost one

    def close(self, why: EngineLost | None = None) -> None:
        import ray

        self._lost = self._lost or why or EngineLost("the workers of this engine have ended")
        if ray.is_initialized():
            for actor in self._placed.actors:
                ray.kill(actor, no_restart=True)
            _give_back(self._placed.bundles)


def _answer(ref: Any, member: str) -> Answer:
    import ray

    try:
        answer = ray.get(ref)
    except ray.exceptions.RayActorError as error:
        return Answer(error=EngineLost(f"{member} is gone ({first_line(error)})"))
    except ray.exceptions.RayTaskError as error:
        return Answer(error=RuntimeError(f"{member}: {error}"))
    except ray.exceptions.RayError as error:
        return Answer(error=EngineLost(f"{member} cannot be reached ({first_line(error)})"))
    return answer if isinstance(answer, Answer) else Answer(answer)


# -- placement ------------------------------------------------------------------------------------------------


def require_room(wanted: Sequence[int], room: Room) -> None:
    """Raises a UserError if Ray is not installed, or if a running cluster cannot be reached or has no room for this
    many members of each group. A cluster that is started here has room."""
    ray = _ray()
    if not _runs_elsewhere(room):
        return
    connected = ray.is_initialized()
    _connect(room, sum(wanted))
    try:
        _counts(wanted, room)
    finally:
        if not connected:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("cluster.engine: ray needs Ray, which is not installed: pip install 'teamtr[ray]'") from None
    return ray


def _runs_elsewhere(room: Room) -> bool:
    return room.address is not None or "RAY_ADDRESS" in os.environ


def _connect(room: Room, workers: int) -> None:
    """Connect to the cluster that the room names, or start one here for this many workers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's default, 15, workers starve beside other processes
    ray = _ray()
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if _runs_elsewhere(room):
        address = room.address or os.environ["RAY_ADDRESS"]
        try:
            ray.init(address=address, **quiet)
        except Exception as error:
            raise UserError(
                f"cluster.address: no Ray cluster answers at {address!r} ({first_line(error)}); start one there, or "
                "leave the address out to start one here"
            ) from error
        return
    for attempt in range(1, TRIES + 1):
        try:
            ray.init(
                address="local",
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                **quiet,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == TRIES:
                raise TeamTRError(
                    f"Ray did not start on this machine in {TRIES} tries ({first_line(error)}): free memory or cores, "
                    "or give the address of a cluster that runs in cluster.address"
                ) from error
            log.warning("Ray did not start (%s); once more", first_line(error))


@dataclass(frozen=True)
class Placed:
    """The actors of one group, and the resources that Ray reserves for them."""

    actors: list[Any]
    bundles: Any


def _counts(wanted: Sequence[int], room: Room) -> list[int]:
    """Number of members of each group. Raises a UserError if there is no room for them."""
    there = _ray().cluster_resources()
    cores, cards = int(there.get("CPU", 0)), there.get("GPU", 0.0)
    counts = share_out(wanted, cores) if room.may_be_fewer else list(wanted)
    workers = sum(counts)
    if workers > cores:
        most = f"; {len(wanted)} groups need one each at least" if cores < len(wanted) else ""
        raise UserError(
            f"cluster.workers is {sum(wanted)}, and the cluster has {cores} cores, one for each{most}: lower it, or "
            "add machines"
        )
    if room.on_cards and not cards:
        raise UserError("the device of this team is a card, and Ray's cluster has none: use device: cpu, or add cards")
    return counts


def _place(wanted: Sequence[int], room: Room) -> list[Placed]:
    """Start this many actors for each group, all at once or none."""
    import ray
    from ray.util.placement_group import placement_group

    counts, cards = _counts(wanted, room), ray.cluster_resources().get("GPU", 0.0)
    workers = sum(counts)
    share = min(1.0, cards / workers) if room.on_cards else 0.0
    each = {"CPU": 1.0, **({"GPU": share} if share else {})}
    groups = [placement_group([each] * count) for count in counts]
    ready = [group.ready() for group in groups]
    if len(ray.wait(ready, num_returns=len(ready), timeout=room.patience_s)[0]) < len(ready):
        for group in groups:
            _give_back(group)
        raise TeamTRError(
            f"Ray found no room for {workers} workers in {room.patience_s:.0f} s: others may use the cluster; wait for "
            "them, or lower cluster.workers"
        )
    return [Placed(_actors(group, count, share), group) for group, count in zip(groups, counts, strict=True)]


def share_out(wanted: Sequence[int], cores: int) -> list[int]:
    """As many members as there are cores, if fewer than wanted. The largest group loses members first, and each group
    keeps at least one."""
    counts = list(wanted)
    while sum(counts) > max(cores, len(counts)):
        counts[counts.index(max(counts))] -= 1
    return counts


def _actors(bundles: Any, count: int, share: float) -> list[Any]:
    """``share``: fraction of a card for each actor."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind = ray.remote(_Actor)
    sharing = max(1, round(1 / share)) if share else 1
    return [
        kind.options(
            num_cpus=1,
            num_gpus=share,
            scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=member),
        ).remote(sharing)
        for member in range(count)
    ]


def _give_back(bundles: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(bundles)


class _Actor:
    """Runs in a member's process."""

    def __init__(self, sharing: int) -> None:
        self.sharing = sharing
        self.store: Any = None
        self.seat: Seat | None = None

    def open(self) -> tuple[str, int]:
        import ray

        from teamtr.engines.cluster.ranks import meeting_point

        host = ray.util.get_node_ip_address()
        self.store = meeting_point(host)
        return host, self.store.port

    def join(self, group: Group, rank: int, world: int, room: Room, place: tuple[str, int]) -> Answer:
        import ray

        from teamtr.engines.cluster import ranks

        card.take_share(self.sharing)
        try:
            ranks.join(rank, world, place if self.store is None else self.store, room.patience_s)
            engine = group.make(ranks.Ranks(room.shards, lockstep=room.lockstep))
            self.seat = Seat(engine, group.worker(rank))
        except Exception as error:
            return Answer(error=error)
        return Answer((ray.util.get_node_ip_address(), os.getpid()))

    def answer(self, call: Call) -> Answer:
        assert self.seat is not None, "join comes first"
        return self.seat.answer(call)
