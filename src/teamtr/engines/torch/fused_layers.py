"""Triton kernels for what a half-precision layer computes between its matrix products: sum, norm and gate.

torch launches a kernel for every cast, square and product in between, each of which reads and writes all activations
and saves its share of them for the gradient. Here each operation takes one kernel forward and one backward. These read
their inputs once, compute in float32, round once at the end, and save nothing but their inputs, or the sum of two.
Weights are those of a frozen base and get no gradient. At the end of the file are kernels that place rows or add them
up, for ``packing``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from teamtr.engines.torch.early_launch import await_previous, early

BLOCK = 1024
power_of_2 = cache(triton.next_power_of_2)
"""The next power of two, cached because triton takes microseconds to compute it."""


TILE_ROWS = 64
"""Rows of a tile in products of few rows."""
FEW_ROWS = 128
"""Most rows whose last tile may be partly empty."""


def with_room(rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A new [rows, width] on the device of ``like``. If the rows are few, there is memory for whole tiles of them, so
    that a product can read beyond the last row (``paged.product_kernel``)."""
    room = -(-rows // TILE_ROWS) * TILE_ROWS if rows <= FEW_ROWS else rows
    return torch.empty(room, width, dtype=dtype or like.dtype, device=like.device)[:rows]


@triton.jit
def _norm_kernel(
    x, delta, weight, total, out, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The norm of one token; with ``ADD``, of its sum with ``delta``, which is stored as well."""
    await_previous(EARLY)
    n, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = h < WIDTH
    wide = tl.load(x + n * WIDTH + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(delta + n * WIDTH + h, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + n * WIDTH + h, wide.to(total.dtype.element_ty), mask=inside)
    scale = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    shrink = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    tl.store(out + n * WIDTH + h, (wide * shrink * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_gradient_kernel(
    x, weight, grad, beside, out, rounded, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BESIDE: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """The gradient of ``_norm_kernel``. With ``BESIDE``, the gradient of the branch beside the norm is added; with
    ``ROUND``, the sum is also stored in half precision."""
    n, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = h < WIDTH
    wide = tl.load(x + n * WIDTH + h, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    shrink = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    slope = tl.load(grad + n * WIDTH + h, mask=inside, other=0.0).to(tl.float32) * scale
    along = tl.sum(slope * wide, 0) / WIDTH * shrink * shrink
    result = shrink * (slope - along * wide)
    if BESIDE:
        result += tl.load(beside + n * WIDTH + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n * WIDTH + h, result.to(out.dtype.element_ty), mask=inside)
    if ROUND:
        tl.store(rounded + n * WIDTH + h, result.to(rounded.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(x, delta, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    wide = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(delta + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(gate, up, out, gate_row, up_row, width, BLOCK: tl.constexpr):
    """silu(gate) * up for a part of one token; both inputs may be parts of wider rows."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    g = tl.load(gate + n * gate_row + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + n * up_row + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n * width + c, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_gradient_kernel(
    gate, up, grad, grad_gate, grad_up, gate_row, up_row, out_row, width, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradient of ``_gate_kernel``; both gradients may be parts of wider rows as well."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    g = tl.load(gate + n * gate_row + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + n * up_row + c, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + n * width + c, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    of_gate, of_up = slope * u * s * (1.0 + g * (1.0 - s)), slope * g * s
    tl.store(grad_gate + n * out_row + c, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + n * out_row + c, of_up.to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _place_kernel(rows, origin, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One output row: the row at its origin, or zeros."""
    n, source = tl.program_id(0).to(tl.int64), tl.load(origin + tl.program_id(0))
    for start in tl.static_range(0, WIDTH, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mask = c < WIDTH
        row = tl.load(rows + source * WIDTH + c, mask=mask & (source >= 0), other=0.0)
        tl.store(out + n * WIDTH + c, row, mask=mask)


@triton.jit
def _sum_rows_kernel(rows, places, starts, out, row, width, BLOCK: tl.constexpr):
    """A part of one output row: the sum of the rows at its places, in their order."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(tl.load(starts + n), tl.load(starts + n + 1)):
        total += tl.load(rows + tl.load(places + k) * row + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n * width + c, total.to(out.dtype.element_ty), mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, room: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return _normed(x, None, weight, epsilon, dtype, room)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return _norm_gradient(x, weight, grad, None, ctx.epsilon)[0], None, None, None, None


class _Branch(torch.autograd.Function):
    """The norm of x, and x itself for the residual branch: both gradients are added where the norm's is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return x.view_as(x), _normed(x, None, weight, epsilon, dtype)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        return _norm_gradient(x, weight, grad, beside, ctx.epsilon)[0], None, None, None


class _AddNorm(torch.autograd.Function):
    """The sum of two tensors, and its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, room: bool
    ) -> tuple[Tensor, Tensor]:
        normed, total = _normed(x.contiguous(), delta.contiguous(), weight, epsilon, dtype, room)
        ctx.save_for_backward(total, weight)
        ctx.epsilon, ctx.dtype = epsilon, delta.dtype
        return total, normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        return *_norm_gradient(total, weight, grad, beside, ctx.epsilon, ctx.dtype), None, None, None, None


class _Sum(torch.autograd.Function):
    """The sum of two tensors, in the dtype of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor) -> Tensor:
        x, delta = x.contiguous(), delta.contiguous()
        out = torch.empty_like(x)
        ctx.dtype = delta.dtype
        _sum_kernel[(-(-x.numel() // BLOCK),)](x, delta, out, x.numel(), BLOCK=BLOCK, num_warps=4)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.dtype)


def _normed(
    x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype, room: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of x, and x; or with ``delta``, the norm of their sum, and the sum. ``room``: the norm has some behind
    its last row (``with_room``)."""
    width = x.shape[-1]
    out = with_room(x.numel() // width, width, x, dtype).view(x.shape) if room else torch.empty_like(x, dtype=dtype)
    total = x if delta is None else torch.empty_like(x)
    _norm_kernel[(x.numel() // width,)](
        x, x if delta is None else delta, weight, total, out, epsilon, WIDTH=width,
        BLOCK=power_of_2(width), ADD=delta is not None, num_warps=_warps(width), **early(x),
    )  # fmt: skip
    return out, total


def _norm_gradient(
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    beside: Tensor | None,
    epsilon: float,
    rounded_to: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient in the dtype of x, and in ``rounded_to`` if that is given."""
    width, out = x.shape[-1], torch.empty_like(x)
    rounded = out if rounded_to is None else torch.empty_like(x, dtype=rounded_to)
    _norm_gradient_kernel[(x.numel() // width,)](
        x, weight, grad.contiguous(), x if beside is None else beside.contiguous(), out, rounded, epsilon,
        WIDTH=width, BLOCK=power_of_2(width), BESIDE=beside is not None, ROUND=rounded_to is not None,
        num_warps=_warps(width),
    )  # fmt: skip
    return out, rounded


def _warps(width: int) -> int:
    return 8 if width > BLOCK else 4


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gate(_as_rows(gate), _as_rows(up)).view(gate.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        _gate_gradient(_as_rows(gate), _as_rows(up), grad, _as_rows(grad_gate), _as_rows(grad_up))
        return grad_gate, grad_up


class _GatedRows(torch.autograd.Function):
    """``_Gated`` for rows in which gate and up are side by side; so are their gradients."""

    @staticmethod
    def forward(ctx: Any, both_NW: Tensor) -> Tensor:
        ctx.save_for_backward(both_NW)
        return _gate(*both_NW.chunk(2, 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both_NW,) = ctx.saved_tensors
        out_NW = torch.empty(*both_NW.shape, dtype=both_NW.dtype, device=both_NW.device)
        (gate, up), (of_gate, of_up) = both_NW.chunk(2, 1), out_NW.chunk(2, 1)
        _gate_gradient(gate, up, grad, of_gate, of_up)
        return out_NW


def _gate(gate_NC: Tensor, up_NC: Tensor) -> Tensor:
    tokens, width = gate_NC.shape
    out = torch.empty(tokens, width, dtype=gate_NC.dtype, device=gate_NC.device)
    _gate_kernel[(tokens, -(-width // BLOCK))](
        gate_NC, up_NC, out, gate_NC.stride(0), up_NC.stride(0), width, BLOCK=BLOCK, num_warps=4
    )
    return out


def _gate_gradient(gate_NC: Tensor, up_NC: Tensor, grad: Tensor, of_gate_NC: Tensor, of_up_NC: Tensor) -> None:
    tokens, width = gate_NC.shape
    _gate_gradient_kernel[(tokens, -(-width // BLOCK))](
        gate_NC, up_NC, grad.contiguous(), of_gate_NC, of_up_NC, gate_NC.stride(0), up_NC.stride(0),
        of_gate_NC.stride(0), width, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _as_rows(x: Tensor) -> Tensor:
    """Two-dimensional, without a copy unless rows are not contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def norm(x: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype, *, room: bool = False) -> Tensor:
    """RMS norm of x times the weight; out in ``dtype``, the gradient in that of ``x``. ``room``: out has memory behind
    its last row, for products of few rows."""
    out: Tensor = _Norm.apply(x, weight_H, epsilon, dtype, room)
    return out


def branch(x: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x itself, and its norm in ``dtype``."""
    found: tuple[Tensor, Tensor] = _Branch.apply(x, weight_H, epsilon, dtype)
    return found


def add_norm(
    x: Tensor, delta: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype, *, room: bool = False
) -> tuple[Tensor, Tensor]:
    """x + delta in the dtype of x, and its norm in ``dtype``, with ``room`` as in ``norm``."""
    found: tuple[Tensor, Tensor] = _AddNorm.apply(x, delta, weight_H, epsilon, dtype, room)
    return found


def added(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta, in the dtype of x."""
    out: Tensor = _Sum.apply(x, delta)
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    out: Tensor = _Gated.apply(gate, up)
    return out


def gated_rows(both_NW: Tensor) -> Tensor:
    """silu(gate) * up, for rows in which gate and up are side by side."""
    out: Tensor = _GatedRows.apply(both_NW)
    return out


def placed(rows: Tensor, origin_P: Tensor) -> Tensor:
    """``rows[origin]``, and zeros where the origin is below zero."""
    rows, width = rows.contiguous(), rows[0].numel()
    out = torch.empty(len(origin_P), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    block = min(BLOCK, power_of_2(width))
    _place_kernel[(len(origin_P),)](rows, origin_P, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out


def summed(rows: Tensor, places_P: Tensor, starts_N: Tensor) -> Tensor:
    """Sums of rows, each rounded once: the first is over ``places[starts[0] : starts[1]]``, and so on."""
    wide, count = _as_rows(rows.reshape(len(rows), -1)), len(starts_N) - 1
    width = wide.shape[1]
    out = torch.empty(count, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    block = min(BLOCK, power_of_2(width))
    _sum_rows_kernel[(count, -(-width // block))](
        wide, places_P, starts_N, out, wide.stride(0), width, BLOCK=block, num_warps=4
    )
    return out
