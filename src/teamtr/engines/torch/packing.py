"""Packs rows of token ids end to end with every common prefix kept once: the episodes of a group share their problem.

Linear layers, norms and embeddings then see each token once. Attention sees whole rows: tokens are spread to them, and
their gradients are gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teamtr.engines.transfer import send
from teamtr.types import Ids

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """The tokens that are kept, and which of them make up each row.

    ``leaves`` are the rows that are not a prefix of another row: attention over them is attention over all.
    """

    ids_N: Ids
    position_N: Places
    rows: tuple[Places, ...]
    leaves: tuple[Places, ...]


def pack(rows: Sequence[Ids]) -> Packing:
    """Packs rows by sorting them: rows with a common prefix are then neighbors, and each reuses what it shares with the
    one before."""
    keys = _keys(rows)
    last = {key: b for b, key in enumerate(keys)}  # many rows of a group are identical
    ordered = sorted(last)
    distinct = [rows[last[key]] for key in ordered]
    lengths = np.array([len(row) for row in distinct], dtype=np.int64)
    ids, ends = np.concatenate(distinct), np.cumsum(lengths)
    position = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
    shared = _shared(ids, lengths, ends)
    kept = np.flatnonzero(position >= np.repeat(shared, lengths))
    place = np.empty(len(ids), dtype=np.int64)
    place[kept] = np.arange(len(kept))
    places: list[Places] = []
    for end, length, common in zip(ends.tolist(), lengths.tolist(), shared.tolist(), strict=True):
        own = place[end - length : end]
        if common:
            own[:common] = places[-1][:common]
        places.append(own)
    place_of = dict(zip(ordered, places, strict=True))
    ends_here = np.append(shared[1:], 0) < lengths
    leaves = sorted(last[key] for key, is_leaf in zip(ordered, ends_here.tolist(), strict=True) if is_leaf)
    return Packing(
        ids[kept], position[kept], tuple(place_of[key] for key in keys), tuple(place_of[keys[b]] for b in leaves)
    )


def _keys(rows: Sequence[Ids]) -> list[bytes]:
    """Sort keys of the rows: the big-endian bytes of their ids, which sort as the ids do."""
    ids = np.concatenate(rows).astype(">i4").tobytes()
    ends = np.cumsum([4 * len(row) for row in rows]).tolist()
    return [ids[start:end] for start, end in pairwise([0, *ends])]


def _shared(ids: Ids, lengths: Places, ends: Places) -> Places:
    """Length of the prefix that each row shares with the one before, for rows that are end to end in ``ids``. All in
    one comparison, and in as much memory as the rows themselves take."""
    if len(lengths) == 1:
        return np.zeros(1, dtype=np.int64)
    pairs = np.minimum(lengths[:-1], lengths[1:])
    before_ends = np.cumsum(pairs)
    within = np.arange(before_ends[-1]) - np.repeat(before_ends - pairs, pairs)
    starts = ends - lengths
    differs = ids[within + np.repeat(starts[:-1], pairs)] != ids[within + np.repeat(starts[1:], pairs)]
    places = np.append(np.flatnonzero(differs), before_ends[-1])
    first = places[np.searchsorted(places, before_ends - pairs)]  # at or after the beginning of each pair
    return np.append(0, np.minimum(first, before_ends) - (before_ends - pairs))


class Further(NamedTuple):
    """Rows of a source that have copies beyond the first (``several``), and the places of those copies (``further``).
    To be added up, each copy is written to its ``slot`` among ``most`` per row; unused slots stay zero."""

    several: Tensor
    further: Tensor
    slot: Tensor
    most: int

    @staticmethod
    def of(by_source: Places, starts: Places, copies: Places, device: torch.device) -> Further:
        """``by_source``: places of copies, source row by source row; ``starts`` and ``copies``: where those of each row
        begin there, and how many there are."""
        several = np.flatnonzero(copies > 1)
        more = copies[several] - 1
        most = int(more.max())
        which = np.arange(more.sum()) - np.repeat(np.cumsum(more) - more, more)
        further = by_source[np.repeat(starts[several], more) + 1 + which]
        slot = np.repeat(np.arange(len(several)) * most, more) + which
        return Further(send(several, device), send(further, device), send(slot, device), most)


class Runs(NamedTuple):
    """Places of copies, source row by source row, and where those of each row begin, with the number of all at the
    end."""

    places: Tensor
    starts: Tensor

    @staticmethod
    def of(by_source: Places, starts: Places, device: torch.device) -> Runs:
        return Runs(send(by_source, device), send(np.append(starts, len(by_source)), device))


@dataclass(frozen=True)
class Spread:
    """``source[taken]`` with a gradient that adds up copies in a fixed order, as one sum, without contention.

    ``own`` are the rows of the source that are taken at all (None: every one, in order). ``first`` is the place of each
    one's first copy, and ``origin`` is the inverse: which of them has its first copy at a place, -1 for none.
    """

    taken: Tensor
    first: Tensor
    origin: Tensor
    own: Tensor | None
    copies: Further | Runs | None
    """None: only the first copy counts."""

    @staticmethod
    def of(taken: Places, count: int, device: torch.device, *, in_runs: bool = False) -> Spread:
        """``count``: rows in the source. A place below zero is padding, which has no gradient. ``in_runs``: a kernel
        adds up copies."""
        real_places = np.flatnonzero(taken >= 0)
        by_source = real_places[np.argsort(taken[real_places], kind="stable")]
        own, starts, copies = np.unique(taken[by_source], return_index=True, return_counts=True)
        first = by_source[starts]
        origin = np.full(len(taken), -1)
        origin[first] = np.arange(len(first))
        found: Further | Runs | None = None
        if copies.max(initial=0) > 1:
            found = Runs.of(by_source, starts, device) if in_runs else Further.of(by_source, starts, copies, device)
        return Spread(
            taken=send(np.maximum(taken, 0), device),
            first=send(first, device),
            origin=send(origin, device),
            own=None if len(own) == count else send(own, device),
            copies=found,
        )

    @cached_property
    def first_only(self) -> Spread:
        """For results of which only first copies are read: the gradients of the others are zero and need not be
        added."""
        return replace(self, copies=None)

    def __call__(self, source: Tensor) -> Tensor:
        spread: Tensor = _Spread.apply(source, self)
        return spread

    def gather(self, spread: Tensor) -> Tensor:
        """The first copy of every row of the source; all rows must be taken."""
        gathered: Tensor = _Gather.apply(spread, self.first, self.origin)
        return gathered

    def sum_of(self, grad: Tensor, count: int) -> Tensor:
        shape = grad.shape[1:]
        if isinstance(self.copies, Runs):
            from teamtr.engines.torch.fused_layers import summed

            total = summed(grad, *self.copies)
        else:
            total = grad[self.first]
            if self.copies is not None:
                several, further, slot, most = self.copies
                slots = grad.new_zeros(len(several) * most, *shape).index_copy_(0, slot, grad[further])
                total[several] += slots.view(-1, most, *shape).sum(1)
        if self.own is None:
            return total
        return grad.new_zeros(count, *shape).index_copy_(0, self.own, total)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, spread: Spread) -> Tensor:
        ctx.spread, ctx.count = spread, len(source)
        return source[spread.taken]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.spread.sum_of(grad, ctx.count), None


class _Gather(torch.autograd.Function):
    """``source[places]`` for distinct places. autograd cannot assume that they are distinct and would add them up one
    by one, at several times the cost of attention itself."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, places: Tensor, origin: Tensor) -> Tensor:
        ctx.places, ctx.origin = places, origin
        return source[places]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if grad.is_cuda:
            from teamtr.engines.torch.fused_layers import placed

            return placed(grad, ctx.origin), None, None
        return grad.new_zeros(len(ctx.origin), *grad.shape[1:]).index_copy_(0, ctx.places, grad), None, None
