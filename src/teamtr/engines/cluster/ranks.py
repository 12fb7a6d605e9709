"""Shards over several processes, which exchange results through ``torch.distributed``.

Shard s is computed by rank s modulo the number of ranks. Every rank makes the same calls in the same order. Results
pass directly between ranks, never through the driver. Sums are taken in the order of the shards, and every rank
receives the same sum, so all ranks hold the same bits, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from teamtr.batches import AgentBatch
from teamtr.engines.shards import Part, Rows, Shards

KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
"""Dtypes that float64 represents exactly (integers below 2^53)."""


class Apart(RuntimeError):
    """The ranks lost contact: one of them ended, hangs, or cannot be reached."""


def meeting_point(host: str) -> dist.TCPStore:
    """The store through which ranks rendezvous, at a free port of this machine (``.port``); it lives in the first
    rank."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def join(rank: int, world: int, store: dist.TCPStore | tuple[str, int], patience_s: float) -> None:
    """Initialize this process's default group as one of the ranks. Results are exchanged on CPUs, because adapters are
    small and several ranks may share a card; parts of a model on cards are sent directly between cards."""
    patience = timedelta(seconds=patience_s)
    with _in_touch():
        if not isinstance(store, dist.TCPStore):
            store = dist.TCPStore(*store, is_master=False, timeout=patience)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)


@dataclass
class Turn:
    """The current pass of a step in lockstep: the ranks with rows in it, its loss scale, whether this rank's own
    gradient is finite, per layer, and the sums of each layer's gradients so far."""

    ranks: Sequence[int] = ()
    scale: float = 1.0
    looked_at: list[Tensor] = field(default_factory=list)
    sums: dict[Any, Tensor] = field(default_factory=dict)


class Ranks(Shards):
    """The shards of one rank. Constructed after ``join``."""

    def __init__(self, count: int, *, lockstep: bool = False) -> None:
        super().__init__(count)
        self.lockstep = lockstep
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.processes, self.process = self.world, self.rank
        self.writes = self.rank == 0
        self.carries_sums = self.world > 1  # with one rank, FSDP2 does not call OrderedSum
        self.turn = Turn()

    @property
    def own(self) -> Sequence[int]:
        return range(self.rank, self.count, self.world)

    def complete(
        self, own: Mapping[int, Tensor], batch: AgentBatch, rows: Rows, sizes_R: NDArray[np.int64]
    ) -> list[Tensor]:
        rank_R = (batch.problem_M[rows] % self.count) % self.world
        mine = [own[int(row)] for row in rows[rank_R == self.rank]]
        most = max(int(sizes_R[rank_R == rank].sum()) for rank in range(self.world))
        sent = torch.zeros(1 + most, dtype=torch.float64)
        sent[0] = KINDS.index(mine[0].dtype) if mine else -1
        if mine:
            packed = torch.cat(mine)
            sent[1 : 1 + len(packed)] = packed.double().cpu()
        got = [torch.empty_like(sent) for _ in range(self.world)]
        with _in_touch():
            dist.all_gather(got, sent)
        kind = KINDS[int(max(part[0] for part in got))]
        device = mine[0].device if mine else torch.device("cpu")
        by_row: dict[int, Tensor] = {}
        for rank, part in enumerate(got):
            places = np.flatnonzero(rank_R == rank)
            pieces = part[1 : 1 + int(sizes_R[places].sum())].to(kind).to(device).split(sizes_R[places].tolist())
            by_row.update(zip(places.tolist(), pieces, strict=True))
        return [by_row[place] for place in range(len(rows))]

    def added(self, own: Mapping[int, Sequence[Tensor]], of: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """Each rank sums one slice of all shards and sends it to the others. With one shard per rank, two gradients
        pass through a rank, however many ranks there are."""
        assert of, "a step needs at least one message"
        mine = [shard for shard in of if shard in self.own]
        return [
            self._added([own[shard][k].cpu() for shard in mine], of, example).to(example.device)
            for k, example in enumerate(like)
        ]

    def _added(self, mine: Sequence[Tensor], of: Sequence[int], like: Tensor) -> Tensor:
        each = -(-like.numel() // self.world)
        sizes = [max(0, min(each, like.numel() - rank * each)) for rank in range(self.world)]
        slices = [tensor.split(sizes) for tensor in mine]
        sent = torch.cat([part[rank] for rank in range(self.world) for part in slices] or [torch.empty(0).to(like)])
        ranks = [shard % self.world for shard in of]
        counts = [ranks.count(rank) for rank in range(self.world)]
        size = sizes[self.rank]
        got = torch.empty(len(of) * size, dtype=like.dtype)
        total = torch.zeros(each, dtype=like.dtype)
        every = torch.empty(self.world * each, dtype=like.dtype)
        with _in_touch():
            dist.all_to_all_single(got, sent.cpu(), [n * size for n in counts], [len(mine) * n for n in sizes])
            by_rank = [iter(part.view(-1, size)) for part in got.split([n * size for n in counts])] if size else []
            if size:
                total[:size] = reduce(torch.add, [next(by_rank[rank]) for rank in ranks])
            dist.all_gather_into_tensor(every, total)
        return every[: like.numel()]

    def least(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        with _in_touch():
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return float(found)

    def each(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        with _in_touch():
            dist.all_gather(found, mine)
        return [float(one) for one in found]

    def turns(self, todo: Collection[Part], scale: float = 1.0) -> Iterator[Mapping[int, Part]]:
        """In the order of micro-batch numbers, and for each number in the order of shards, as many shards at once as
        there are ranks."""
        waiting = set(todo)
        for number in range(1 + max((number for _, number in todo), default=-1)):
            for first in range(0, self.count, self.world):
                parts = {rank: (first + rank, number) for rank in range(self.world)}
                if here := {rank: part for rank, part in parts.items() if part in waiting}:
                    self.turn.ranks, self.turn.scale = list(here), scale
                    self.turn.looked_at.clear()
                    yield here

    @contextmanager
    def one_step(self) -> Iterator[None]:
        self.turn.sums.clear()
        yield
        self.turn.sums.clear()

    def before_pass(self) -> Callable[[Sequence[int]], None]:
        before = dict(self.turn.sums)

        def undo(ranks: Sequence[int]) -> None:
            self.turn.sums.clear()
            self.turn.sums.update(before)
            self.turn.ranks = ranks
            self.turn.looked_at.clear()

        return undo

    def overflowed(self) -> bool:
        return not all(map(bool, self.turn.looked_at))

    def rounds(self, own: int) -> int:
        return int(-self.least(-float(own))) if self.lockstep else own


@contextmanager
def _in_touch() -> Iterator[None]:
    """Raises ``Apart`` for any error of a collective: it means that another rank did not take part."""
    try:
        yield
    except (RuntimeError, TimeoutError, ConnectionError, OSError) as error:
        raise Apart(f"a rank lost touch with the others: {error}") from error
