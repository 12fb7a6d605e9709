"""Rows of token ids end to end, with every common beginning kept once: the episodes of a group share their problem.

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
    """Tokens that are kept, and which of them make up each row.

    ``leaves`` are the rows that no other row begins with: attention over them is attention over all.
    """

    ids_N: Ids
    position_N: Places
    rows: tuple[Places, ...]
    leaves: tuple[Places, ...]


def pack(rows: Sequence[Ids]) -> Packing:
    """Sorted, rows with a common beginning are neighbours; each takes over what it shares with the one before."""
    keys = [row.astype(">i4").tobytes() for row in rows]
    last = {keys[b]: b for b in sorted(range(len(rows)), key=keys.__getitem__)}  # many rows of a group are the same
    distinct = [rows[b] for b in last.values()]
    shared = _shared(distinct)
    places: list[Places] = []
    kept = 0
    for row, common in zip(distinct, shared, strict=True):
        own = np.arange(kept, kept + len(row) - common)
        places.append(np.concatenate([places[-1][:common], own]) if common else own)
        kept += len(own)
    place_of = dict(zip(last, places, strict=True))
    ends = [common < len(row) for row, common in zip(distinct, [*shared[1:], 0], strict=True)]
    leaves = sorted(b for b, is_leaf in zip(last.values(), ends, strict=True) if is_leaf)
    return Packing(
        np.concatenate([row[common:] for row, common in zip(distinct, shared, strict=True)]),
        np.concatenate([np.arange(common, len(row)) for row, common in zip(distinct, shared, strict=True)]),
        tuple(place_of[key] for key in keys),
        tuple(place_of[keys[b]] for b in leaves),
    )


def _shared(rows: Sequence[Ids]) -> list[int]:
    """How many tokens each has in common with the one before, from the beginning on. All in one comparison, and in as
    much memory as the rows themselves take."""
    pairs = [min(len(a), len(b)) for a, b in pairwise(rows)]
    if not pairs:
        return [0] * len(rows)
    before = np.concatenate([row[:length] for row, length in zip(rows, pairs, strict=False)])
    after = np.concatenate([row[:length] for row, length in zip(rows[1:], pairs, strict=True)])
    ends = np.cumsum(pairs)
    differs = np.append(np.flatnonzero(before != after), ends[-1])
    first = differs[np.searchsorted(differs, ends - pairs)]  # at or behind the beginning of each pair
    return [0, *(np.minimum(first, ends) - (ends - pairs)).tolist()]


class Further(NamedTuple):
    """The ``several`` rows of a source that have copies beyond the first, at ``further``, of which ``real`` exist."""

    several: Tensor
    further: Tensor
    real: Tensor


class Runs(NamedTuple):
    """Where copies stand, source by source, and where each one's begin among these, with the number of all at the
    end."""

    places: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Spread:
    """``source[taken]`` whose gradient adds up copies in a fixed order, as one sum, without contention.

    ``own`` are the rows of the source that are taken at all (None: every one, in order), ``first`` is where each one's
    first copy stands, and ``origin`` the other way round: which of them has its first copy at a place, -1 for none.
    """

    taken: Tensor
    first: Tensor
    origin: Tensor
    own: Tensor | None
    copies: Further | Runs | None
    """None: no more than the first one counts."""

    @staticmethod
    def of(taken: Places, count: int, device: torch.device, *, in_runs: bool = False) -> Spread:
        """``count`` rows in the source; a place below zero is padding: whatever stands there has no gradient.
        ``in_runs``: a kernel adds up copies."""
        real_places = np.flatnonzero(taken >= 0)
        by_source = real_places[np.argsort(taken[real_places], kind="stable")]
        own, starts, copies = np.unique(taken[by_source], return_index=True, return_counts=True)
        first = by_source[starts]
        origin = np.full(len(taken), -1)
        origin[first] = np.arange(len(first))
        found: Further | Runs | None = None
        if in_runs and (copies > 1).any():
            found = Runs(send(by_source, device), send(np.append(starts, len(by_source)), device))
        elif (copies > 1).any():
            several, which = np.flatnonzero(copies > 1), np.arange(1, copies.max())[None]
            real = which < copies[several][:, None]
            further = by_source[np.where(real, starts[several][:, None] + which, 0)]
            found = Further(send(several, device), send(further, device), send(real, device))
        kept = None if len(own) == count else send(own, device)
        return Spread(send(np.maximum(taken, 0), device), send(first, device), send(origin, device), kept, found)

    @cached_property
    def first_only(self) -> Spread:
        """For what is read at first copies alone: the others' gradients are zero and not worth adding."""
        return replace(self, copies=None)

    def __call__(self, source: Tensor) -> Tensor:
        spread: Tensor = _Spread.apply(source, self)
        return spread

    def gather(self, spread: Tensor) -> Tensor:
        """The first copy of every row of the source; all of them must be taken."""
        gathered: Tensor = _Gather.apply(spread, self.first, self.origin)
        return gathered

    def sum_of(self, grad: Tensor, count: int) -> Tensor:
        if isinstance(self.copies, Runs):
            from teamtr.engines.torch.fused_layers import summed

            total = summed(grad, *self.copies)
        else:
            total = grad[self.first]
            if self.copies is not None:
                several, further, real = self.copies
                weights = real.to(grad.dtype).reshape(*real.shape, *(1,) * (grad.ndim - 1))
                total[several] += (grad[further] * weights).sum(1)
        if self.own is None:
            return total
        return grad.new_zeros(count, *grad.shape[1:]).index_copy_(0, self.own, total)


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
    """``source[places]`` for places that are all different: autograd, not knowing that, would add them up one by one,
    at several times the cost of attention itself."""

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
