"""The gradient of one step, gathered from micro-batches.

float16 flushes small gradients to zero and cannot hold large ones, so the loss is lifted by a scale. Every
micro-batch's gradient is looked at before it is added: one that overflowed is computed again at half the scale, it
alone. The look comes when the next micro-batch is already under way, so that the device never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from teamtr.engines.shards import Rows, Shards
from teamtr.engines.slices import is_spread, square_sum


@dataclass(frozen=True)
class LossPart:
    """One micro-batch after its forward pass; ``sums`` are added up over micro-batches for the report: [K], float64."""

    loss: Tensor
    sums: Tensor


@dataclass(frozen=True)
class Gathered:
    """Sums over all parts. The gradient itself stands in the parameters, without its scale; where it is not finite,
    what stands there is of no use."""

    sums: list[float]
    norm: float
    scale: float
    """That nothing overflowed at."""
    flat: Tensor | None = None
    """The gradient, end to end, where it is one of several."""

    @property
    def finite(self) -> bool:
        return bool(np.isfinite([self.norm, *self.sums]).all())


@dataclass(frozen=True)
class _Fresh:
    """A gradient that nobody has looked at yet."""

    rows: Rows
    gradients: list[Tensor | None]
    found: Tensor
    """The part's sums, then the norm of the scaled gradient: one transfer for all."""


def gather(
    parts: Sequence[Rows],
    forward: Callable[[Rows], LossPart],
    parameters: Sequence[nn.Parameter],
    scale: float,
    computing: Callable[[], AbstractContextManager[None]],
) -> Gathered:
    """Forward and backward over all parts, each ``computing``. Not finite where a loss is not, or a gradient at any
    scale."""
    for parameter in parameters:
        parameter.grad = None
    gathering = _Scaled(parameters, scale) if scale > 1.0 else _Plain(parameters)
    waiting = deque(parts)
    while waiting:
        rows = waiting.popleft()
        with computing():
            part = forward(rows)
            waiting.extend(gathering.look())
            if gathering.broken:
                break
            gathering.backward(rows, part)
        if not waiting:
            waiting.extend(gathering.look())
    return gathering.done()


def gather_shards(
    own: Sequence[tuple[int, Sequence[Rows]]],
    shards: Shards,
    forward: Callable[[Rows], LossPart],
    parameters: Sequence[nn.Parameter],
    scale: float,
    computing: Callable[[], AbstractContextManager[None]],
) -> dict[int, Gathered]:
    """``gather`` for each shard of this process. Every shard begins at the same scale, whatever another came to."""
    found = {}
    for shard, parts in own:
        one = gather(parts, forward, parameters, scale, computing)
        found[shard] = one if shards.count == 1 else replace(one, flat=_flat(parameters))
    return found


def gather_in_lockstep(
    own: Sequence[tuple[int, Sequence[Rows]]],
    counts: Mapping[int, int],
    shards: Shards,
    forward: Callable[[Rows], LossPart],
    pass_idly: Callable[[], None],
    parameters: Sequence[nn.Parameter],
    computing: Callable[[], AbstractContextManager[None]],
) -> dict[int, Gathered]:
    """``gather_shards`` where all processes pass through the model together; ``counts``: how many micro-batches each
    shard has, wherever it is computed. Spread weights end up with the gradient of the whole step: it adds up as passes
    follow each other, whichever shards they are of. The others have one for each shard."""
    spread = [p for p in parameters if is_spread(p)]
    here = [p for p in parameters if not is_spread(p)]
    parts = dict(own)
    held: dict[int, list[Tensor | None]] = {}
    sums: dict[int, Tensor] = {}
    for turn in shards.turns(counts):
        for parameter in spread if shards.carries_sums else ():
            parameter.grad = None
        if turn is None:
            pass_idly()
            continue
        shard, number = turn
        for parameter, gradient in zip(here, held.get(shard, [None] * len(here)), strict=True):
            parameter.grad = gradient
        with computing():
            part = forward(parts[shard][number])
            part.loss.backward()
        held[shard] = [p.grad for p in here]
        sums[shard] = sums[shard] + part.sums.detach() if shard in sums else part.sums.detach()
    found = {}
    for shard, gradients in held.items():
        for parameter, gradient in zip(here, gradients, strict=True):
            parameter.grad = gradient
        norm = float(_norm(gradients, sums[shard]))
        found[shard] = Gathered(sums[shard].tolist(), norm, 1.0, flat=_flat(here))
    return found


def added(
    own: Mapping[int, Gathered], shards: Shards, of: Sequence[int], parameters: Sequence[nn.Parameter], sums: int
) -> Gathered:
    """The gradient of the whole step, from the shards ``of`` wherever they were computed: it stands in the parameters.
    ``sums``: how many numbers a part reports."""
    if shards.count == 1 and not shards.lockstep:
        return own[0]
    here = [p for p in parameters if not is_spread(p)]
    like = [here[0].new_zeros(sum(p.numel() for p in here)), here[0].new_zeros(sums + 1, dtype=torch.float64)]
    parts = {s: [g.flat, like[1].new_tensor([*g.sums, g.norm])] for s, g in own.items() if g.flat is not None}
    flat, counted = shards.added(parts, of, like)
    *total, norms = counted.tolist()
    for parameter, gradient in zip(here, flat.split([p.numel() for p in here]), strict=True):
        parameter.grad = gradient.view_as(parameter)
    scale = shards.least(min((g.scale for g in own.values()), default=float("inf")))
    norm = float(torch.nn.utils.get_total_norm([flat])) if np.isfinite(norms) else float("nan")
    if len(here) < len(parameters):
        squares = square_sum([p.grad for p in parameters if is_spread(p) and p.grad is not None])
        norm = float(np.float32(np.sqrt(norm**2 + squares)))
    return Gathered(total, norm, scale)


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Their gradients end to end; what has none gets zeros."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])


class _Plain:
    """Nothing to look at before the end: gradients add up where they arise."""

    broken = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sums: Tensor | None = None

    def look(self) -> list[Rows]:
        return []

    def backward(self, rows: Rows, part: LossPart) -> None:
        part.loss.backward()
        own = part.sums.detach()
        self.sums = own if self.sums is None else self.sums + own

    def done(self) -> Gathered:
        assert self.sums is not None, "a step needs at least one message"
        return Gathered(self.sums.tolist(), float(_norm([p.grad for p in self.parameters], self.sums)), 1.0)


class _Scaled:
    """A lifted loss; every gradient is looked at on its own."""

    def __init__(self, parameters: Sequence[nn.Parameter], scale: float) -> None:
        self.parameters = parameters
        self.scale = scale
        self.broken = False
        self.sums: list[float] = []
        self.total: list[Tensor | None] = [None] * len(parameters)
        self.fresh: _Fresh | None = None

    def look(self) -> list[Rows]:
        """At the gradient of the part before; returns what is to be computed again."""
        fresh, self.fresh = self.fresh, None
        if fresh is None:
            return []
        *sums, norm = fresh.found.tolist()
        if np.isfinite(norm) and np.isfinite(sums).all():
            self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)] if self.sums else sums
            self._add(fresh.gradients)
            return []
        if not np.isfinite(sums).all() or self.scale <= 1.0:
            self.broken = True  # it was not the scale
            self.sums = sums
            return []
        self.scale /= 2
        return [fresh.rows]

    def backward(self, rows: Rows, part: LossPart) -> None:
        (part.loss * self.scale).backward()
        gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        sums = part.sums.detach()
        self.fresh = _Fresh(rows, gradients, torch.cat([sums, _norm(gradients, sums)[None]]))

    def _add(self, gradients: list[Tensor | None]) -> None:
        """Freed of the scale, which is a power of two: nothing is rounded."""
        torch._foreach_mul_([g for g in gradients if g is not None], 1.0 / self.scale)
        pairs = list(zip(self.total, gradients, strict=True))
        both = [(t, g) for t, g in pairs if t is not None and g is not None]
        if both:
            torch._foreach_add_([t for t, _ in both], [g for _, g in both])
        self.total = [g if t is None else t for t, g in pairs]

    def done(self) -> Gathered:
        for parameter, gradient in zip(self.parameters, self.total, strict=True):
            parameter.grad = gradient
        norm = float("nan") if self.broken else float(_norm(self.total, torch.zeros(0)))
        return Gathered(self.sums, norm, self.scale)


def _norm(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """In the dtype and on the device of ``like``."""
    found = [g for g in gradients if g is not None]
    return torch.nn.utils.get_total_norm(found).to(like) if found else like.new_zeros(())
