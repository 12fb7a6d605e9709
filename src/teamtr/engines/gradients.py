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

from teamtr.engines.shards import Part, Rows, Shards
from teamtr.engines.slices import is_spread, own, square_sum
from teamtr.progress import working


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
    *,
    lockstep: bool = False,
) -> Gathered:
    """Forward and backward over all parts, each ``computing``. Not finite where a loss is not, or a gradient at any
    scale. ``lockstep``: whoever has gone forward with others goes back with them, even if it is of no use."""
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
    """``gather`` for each shard of this process. Every shard begins at the same scale, whatever another came to."""
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
    """``gather_shards`` where all processes pass through the model together; ``counts``: how many micro-batches each
    shard has, wherever it is computed. Spread weights end up with the gradient of the whole step: it adds up as passes
    follow each other, whichever shards they are of. The others have one for each shard."""
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
    """No gradient goes from process to process: each looks at its own and computes again what overflowed, as it would
    alone. How many passes that takes shows as they are made, so everyone says before each whether he has one."""

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
    come again at half the scale when all others are through, so that no sum depends on who passed with whom."""

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
        """Of spread weights."""

    def go_over(self, todo: Sequence[Part], scale: float) -> list[Part]:
        """Returns what overflowed."""
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
        """One pass of all processes; None where this one passed idly."""
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
        """Whether a smaller scale could help."""
        if fresh is None or not bool(torch.isfinite(fresh.sums).all()):
            return False
        spread = [] if self.shards.carries_sums else [p.grad for p in self.spread]
        norm = _norm([*fresh.gradients, *(own(g) for g in spread if g is not None)], fresh.sums)
        return self.shards.overflowed() or not bool(torch.isfinite(norm))

    def _add(self, fresh: _Own | None, scale: float) -> None:
        """Freed of the scale, which is a power of two, so that nothing is rounded."""
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
    """What this process found in a pass: sums for the report, and gradients of weights that are here as a whole."""

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
    """The gradient of the whole step, from the shards ``of`` wherever they were computed: it stands in the parameters.
    ``sums``: how many numbers a part reports."""
    if shards.count == 1:  # of one process, which adds up its norm tensor by tensor, in parts or not
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
