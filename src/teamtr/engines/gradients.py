"""The gradient of one optimizer step, accumulated over micro-batches.

float16 flushes small gradients to zero and overflows on large ones, so the loss is multiplied by a scale. Every
micro-batch's gradient is checked before it is added. One that overflowed is recomputed at half the scale; the others
are not. The check is read only when the next micro-batch is under way, so that the device never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from teamtr.engines.shards import Part, Rows, Shards
from teamtr.engines.slices import is_spread, own, square_sum
from teamtr.progress import working


@dataclass(frozen=True)
class LossPart:
    """One micro-batch after its forward pass. ``sums`` [K], float64, are added over micro-batches for the report."""

    loss: Tensor
    sums: Tensor


@dataclass(frozen=True)
class Gathered:
    """Sums over all parts. The gradient itself is in the parameters, without the scale; it must not be used unless
    ``finite``."""

    sums: list[float]
    norm: float
    scale: float
    """A scale at which nothing overflowed."""
    flat: Tensor | None = None
    """The gradient as one flat tensor, where there are several to add."""

    @property
    def finite(self) -> bool:
        return bool(np.isfinite([self.norm, *self.sums]).all())


@dataclass(frozen=True)
class _Fresh:
    """A gradient that has not been checked yet."""

    rows: Rows
    gradients: list[Tensor | None]
    found: Tensor
    """The part's sums, then the norm of the scaled gradient, in one tensor so that one transfer suffices."""


def gather(
    parts: Sequence[Rows],
    forward: Callable[[Rows], LossPart],
    parameters: Sequence[nn.Parameter],
    scale: float,
    computing: Callable[[], AbstractContextManager[None]],
    *,
    lockstep: bool = False,
) -> Gathered:
    """Runs forward and backward over all parts, each inside ``computing()``. The result is not finite if a loss is not,
    or if a gradient is not at any scale. ``lockstep``: a forward pass is always followed by its backward pass, even if
    that is useless, because other processes take part in both."""
    for parameter in parameters:
        parameter.grad = None
    gathering = _Scaled(parameters, scale) if scale > 1.0 else _Plain(parameters)
    waiting = deque(parts)
    with working("gradients", len(parts), "micro-batches") as work:
        while waiting:
            rows = waiting.popleft()
            with computing():
                part = forward(rows)
                waiting.extend(gathering.look())
                if lockstep or not gathering.broken:
                    gathering.backward(rows, part)
            work.advance()
            if gathering.broken:
                break
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
    """``gather`` for each shard of this process. Every shard starts at the same scale, whatever happened in the
    others."""
    found = {}
    for shard, parts in own:
        one = gather(parts, forward, parameters, scale, computing, lockstep=shards.lockstep)
        found[shard] = one if shards.count == 1 else replace(one, flat=_flat(parameters))
    return found


def gather_in_lockstep(
    own: Sequence[tuple[int, Sequence[Rows]]],
    counts: Mapping[int, int],
    shards: Shards,
    forward: Callable[[Rows], LossPart],
    pass_idly: Callable[[], None],
    parameters: Sequence[nn.Parameter],
    scale: float,
    computing: Callable[[], AbstractContextManager[None]],
) -> dict[int, Gathered]:
    """``gather_shards`` for processes that pass through the model together. ``counts``: the number of micro-batches of
    each shard, wherever it is computed. Partitioned weights end up with the gradient of the whole step, which
    accumulates pass by pass over all shards. The other weights get one gradient per shard."""
    if scale > 1.0 and not any(map(is_spread, parameters)):
        return _beside_each_other(own, shards, forward, pass_idly, parameters, scale, computing)
    gathering = _InLockstep(dict(own), shards, forward, pass_idly, parameters, computing)
    todo: list[Part] = [(shard, number) for shard, count in counts.items() for number in range(count)]
    with shards.one_step():
        while True:
            todo = gathering.go_over(todo, scale)
            if not todo:
                return gathering.done(scale)
            scale /= 2


def _beside_each_other(
    own: Sequence[tuple[int, Sequence[Rows]]],
    shards: Shards,
    forward: Callable[[Rows], LossPart],
    pass_idly: Callable[[], None],
    parameters: Sequence[nn.Parameter],
    scale: float,
    computing: Callable[[], AbstractContextManager[None]],
) -> dict[int, Gathered]:
    """``gather_in_lockstep`` when no gradient crosses processes: each checks its own and recomputes what overflowed, as
    it would alone. The number of passes is not known in advance, so every process announces before each pass whether it
    has one."""

    def somebody(busy: bool) -> bool:
        return shards.least(0.0 if busy else 1.0) < 1.0

    def together(rows: Rows) -> LossPart:
        somebody(True)
        return forward(rows)

    found = gather_shards(own, shards, together, parameters, scale, computing)
    while somebody(False):
        pass_idly()
    return found


class _InLockstep:
    """Passes that all processes make together. In float16, micro-batches that overflowed are left out of the sums and
    repeated at half the scale after all others, so that no sum depends on which micro-batches shared a pass."""

    def __init__(
        self,
        parts: Mapping[int, Sequence[Rows]],
        shards: Shards,
        forward: Callable[[Rows], LossPart],
        pass_idly: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.parts = parts
        self.shards = shards
        self.forward = forward
        self.pass_idly = pass_idly
        self.computing = computing
        self.parameters = parameters
        self.spread = [p for p in parameters if is_spread(p)]
        self.here = [p for p in parameters if not is_spread(p)]
        self.held: dict[int, list[Tensor | None]] = {}
        self.sums: dict[int, Tensor] = {}
        self.totals: list[Tensor | None] = [None] * len(self.spread)
        """Gradients of partitioned weights, summed."""

    def go_over(self, todo: Sequence[Part], scale: float) -> list[Part]:
        """Passes over these micro-batches at this scale; returns those that overflowed."""
        again: list[Part] = []
        for turn in self.shards.turns(todo, scale):
            undo = self.shards.before_pass() if scale > 1.0 else None
            fresh = self._pass(turn, scale)
            if undo is not None:
                states = self.shards.each(float(self._overflowed(fresh)))
                kept = {process: part for process, part in turn.items() if not states[process]}
                again += [part for process, part in turn.items() if process not in kept]
                if len(kept) < len(turn):
                    undo(list(kept))
                    if not kept:
                        continue
                    fresh = self._pass(kept, scale)
            self._add(fresh, scale)
        return again

    def _pass(self, turn: Mapping[int, Part], scale: float) -> _Own | None:
        """One pass of all processes; None if this one had no micro-batch and made an idle pass."""
        for parameter in (*self.spread, *self.here):
            parameter.grad = None
        mine = turn.get(self.shards.process)
        if mine is None:
            self.pass_idly()
            return None
        shard, number = mine
        with self.computing():
            part = self.forward(self.parts[shard][number])
            (part.loss if scale == 1.0 else part.loss * scale).backward()
        return _Own(shard, part.sums.detach(), [p.grad for p in self.here])

    def _overflowed(self, fresh: _Own | None) -> bool:
        """Whether the gradient overflowed although the loss is finite, so that a smaller scale may help."""
        if fresh is None or not bool(torch.isfinite(fresh.sums).all()):
            return False
        spread = [] if self.shards.carries_sums else [p.grad for p in self.spread]
        norm = _norm([*fresh.gradients, *(own(g) for g in spread if g is not None)], fresh.sums)
        return self.shards.overflowed() or not bool(torch.isfinite(norm))

    def _add(self, fresh: _Own | None, scale: float) -> None:
        """Adds the pass's gradients without the scale, which is a power of two, so that nothing is rounded."""
        found = [p.grad for p in self.spread]
        if not self.shards.carries_sums:
            found = [_plus(total, gradient, scale) for total, gradient in zip(self.totals, found, strict=True)]
        self.totals = found
        if fresh is None:
            return
        held = self.held.get(fresh.shard, [None] * len(self.here))
        self.held[fresh.shard] = [_plus(t, g, scale) for t, g in zip(held, fresh.gradients, strict=True)]
        before = self.sums.get(fresh.shard)
        self.sums[fresh.shard] = fresh.sums if before is None else before + fresh.sums

    def done(self, scale: float) -> dict[int, Gathered]:
        for parameter, total in zip(self.spread, self.totals, strict=True):
            parameter.grad = total
        found = {}
        for shard, gradients in self.held.items():
            for parameter, gradient in zip(self.here, gradients, strict=True):
                parameter.grad = gradient
            parts = [None if p.grad is None else own(p.grad) for p in self.parameters]
            norm = float(_norm(parts, self.sums[shard]))
            found[shard] = Gathered(self.sums[shard].tolist(), norm, scale, flat=_flat(self.here))
        return found


@dataclass(frozen=True)
class _Own:
    """Results of a pass in this process: sums for the report, and gradients of the weights that are not partitioned."""

    shard: int
    sums: Tensor
    gradients: list[Tensor | None]


def _plus(total: Tensor | None, gradient: Tensor | None, scale: float) -> Tensor | None:
    if gradient is None:
        return total
    own = gradient if scale == 1.0 else gradient / scale
    return own if total is None else total + own


def added(
    own: Mapping[int, Gathered], shards: Shards, of: Sequence[int], parameters: Sequence[nn.Parameter], sums: int
) -> Gathered:
    """The gradient of the whole step, summed over the shards ``of`` from all processes into the parameters. ``sums``:
    how many numbers a part reports."""
    if shards.count == 1:  # its norm was computed tensor by tensor, partitioned or not
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
    """All gradients as one flat tensor, with zeros where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])


class _Plain:
    """Without a loss scale: gradients accumulate in the parameters and are checked only at the end."""

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
    """With a loss scale: the gradient of every micro-batch is checked by itself."""

    def __init__(self, parameters: Sequence[nn.Parameter], scale: float) -> None:
        self.parameters = parameters
        self.scale = scale
        self.broken = False
        self.sums: list[float] = []
        self.total: list[Tensor | None] = [None] * len(parameters)
        self.fresh: _Fresh | None = None

    def look(self) -> list[Rows]:
        """Checks the gradient of the previous part; returns the rows to recompute."""
        fresh, self.fresh = self.fresh, None
        if fresh is None:
            return []
        *sums, norm = fresh.found.tolist()
        if np.isfinite(norm) and np.isfinite(sums).all():
            self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)] if self.sums else sums
            self._add(fresh.gradients)
            return []
        if not np.isfinite(sums).all() or self.scale <= 1.0:
            self.broken = True  # the scale is not the cause
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
        """Adds the gradients without the scale, which is a power of two, so that nothing is rounded."""
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
    """The total norm, in the dtype and on the device of ``like``."""
    found = [g for g in gradients if g is not None]
    return torch.nn.utils.get_total_norm(found).to(like) if found else like.new_zeros(())
