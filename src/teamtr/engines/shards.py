"""A batch in a fixed number of shards, each computed by itself, in this process or in another.

What comes of them is put together in the order of the shards. So with as many shards, one process and many give the
same bits: no sum depends on who computed what. The rows of one problem are in one shard, because what they begin with
in common is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teamtr.batches import AgentBatch

Rows = NDArray[np.int64]
Part = tuple[int, int]
"""A micro-batch: its shard, and its number there."""


class Shards:
    """All shards are computed in this process. ``cluster.ranks`` has those of several."""

    lockstep = False
    """Whether all processes pass through the model together, because each holds a part of it only."""

    carries_sums = False
    """Whether the gradient of a spread weight, as a backward pass leaves it, has those of the passes before in it."""

    writes = True
    """Whether this process is the one that writes files."""

    processes, process = 1, 0
    """How many share the shards, the first of which has shard 0 and the second shard 1; and which of them this is."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    @property
    def own(self) -> Sequence[int]:
        """Those that this process computes."""
        return range(self.count)

    def split(self, batch: AgentBatch, rows: Rows) -> list[tuple[int, Rows]]:
        """The rows of every shard that has any."""
        if self.count == 1:
            return [(0, rows)] if len(rows) else []
        shard_R = batch.problem_M[rows] % self.count
        return [(shard, rows[shard_R == shard]) for shard in range(self.count) if (shard_R == shard).any()]

    def split_own(self, batch: AgentBatch, rows: Rows) -> list[tuple[int, Rows]]:
        """Of these, the shards of this process."""
        return [(shard, part) for shard, part in self.split(batch, rows) if shard in self.own]

    def complete(
        self, own: Mapping[int, Tensor], batch: AgentBatch, rows: Rows, sizes_R: NDArray[np.int64]
    ) -> list[Tensor]:
        """One tensor for each of the rows, from whoever computed it; ``sizes_R`` are their lengths."""
        return [own[int(row)] for row in rows]

    def added(self, own: Mapping[int, Sequence[Tensor]], of: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """The sum over the shards ``of``, in their order, of tensors that are shaped like these."""
        return reduce(lambda total, part: list(map(torch.add, total, part)), [list(own[shard]) for shard in of])

    def least(self, value: float) -> float:
        """The least of what all processes give."""
        return value

    def each(self, value: float) -> list[float]:
        """What every process gives, in their order."""
        return [value]

    def turns(self, todo: Collection[Part], scale: float = 1.0) -> Iterator[Mapping[int, Part]]:
        """In lockstep: the passes that go over these micro-batches, with a loss of this scale; which of them each
        process passes. Who has none in a pass passes idly, for others' sake."""
        for part in sorted(todo, key=lambda part: (part[1], part[0])):
            yield {0: part}

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Within, the gradients of spread weights add up from pass to pass."""
        yield

    def before_pass(self) -> Callable[[Sequence[int]], None]:
        """What is returned forgets what the pass added to the sums of spread weights, and has it made again, by these
        processes alone."""
        return lambda processes: None

    def overflowed(self) -> bool:
        """Whether the gradient of a spread weight, as this process computed it in the present pass, is not finite."""
        return False

    def rounds(self, own: int) -> int:
        """How many passes this process takes part in, when so many are its own."""
        return own


def spread(rows: int, parts: int) -> list[slice]:
    """So many neighbouring rows for each of the parts; the first ones get one more where it does not come out even."""
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(rows), parts)]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
