"""A batch divided into a fixed number of shards, each computed by itself, in this process or in another.

Results are combined in the order of the shards. For a fixed number of shards, one process and many therefore give the
same bits: no sum depends on which process computed what. The rows of one problem are in one shard, because their common
prefix is computed once.
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
"""A micro-batch: its shard, and its number within the shard."""


class Shards:
    """All shards in this process. ``cluster.ranks`` has the version for several processes."""

    lockstep = False
    """Whether all processes pass through the model together, because each holds only a part of it."""

    carries_sums = False
    """Whether the gradient that a backward pass leaves in a partitioned weight includes those of earlier passes."""

    writes = True
    """Whether this process is the one that writes files."""

    processes, process = 1, 0
    """How many processes share the shards (the first one has shard 0, the second one shard 1), and which of them this
    is."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    @property
    def own(self) -> Sequence[int]:
        """The shards that this process computes."""
        return range(self.count)

    def split(self, batch: AgentBatch, rows: Rows) -> list[tuple[int, Rows]]:
        """The rows of every non-empty shard."""
        if self.count == 1:
            return [(0, rows)] if len(rows) else []
        shard_R = batch.problem_M[rows] % self.count
        return [(shard, rows[shard_R == shard]) for shard in range(self.count) if (shard_R == shard).any()]

    def split_own(self, batch: AgentBatch, rows: Rows) -> list[tuple[int, Rows]]:
        """``split``, for the shards of this process only."""
        return [(shard, part) for shard, part in self.split(batch, rows) if shard in self.own]

    def complete(
        self, own: Mapping[int, Tensor], batch: AgentBatch, rows: Rows, sizes_R: NDArray[np.int64]
    ) -> list[Tensor]:
        """One tensor for each of the rows, from the process that computed it; ``sizes_R`` are their lengths."""
        return [own[int(row)] for row in rows]

    def added(self, own: Mapping[int, Sequence[Tensor]], of: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the shards ``of``, in their order, of tensors shaped like ``like``."""
        return reduce(lambda total, part: list(map(torch.add, total, part)), [list(own[shard]) for shard in of])

    def least(self, value: float) -> float:
        """The minimum of the values of all processes."""
        return value

    def each(self, value: float) -> list[float]:
        """The values of all processes, in their order."""
        return [value]

    def turns(self, todo: Collection[Part], scale: float = 1.0) -> Iterator[Mapping[int, Part]]:
        """In lockstep: the passes over these micro-batches, with a loss of this scale, as a map from processes to
        micro-batches. A process without one makes an idle pass, because the others need it to take part."""
        for part in sorted(todo, key=lambda part: (part[1], part[0])):
            yield {0: part}

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Context in which the gradients of partitioned weights accumulate from pass to pass."""
        yield

    def before_pass(self) -> Callable[[Sequence[int]], None]:
        """Returns a function that removes what the coming pass adds to the sums of partitioned weights, so that it can
        be repeated by the given processes alone."""
        return lambda processes: None

    def overflowed(self) -> bool:
        """Whether the gradient of a partitioned weight, as this process computed it in the current pass, is not
        finite."""
        return False

    def rounds(self, own: int) -> int:
        """How many passes this process takes part in when it has this many of its own."""
        return own


def spread(rows: int, parts: int) -> list[slice]:
    """Divides rows into contiguous parts; the first ones get one more if it does not come out even."""
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(rows), parts)]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
