"""Triton kernels between product and attention in half precision: norm and rotation of queries and keys, and the
angles of the rotation.

As in ``fused_layers``, there is one kernel forward and one backward. They read their inputs once, compute in float32,
round once at the end, and save nothing but their inputs. Where query, key and value are side by side in one row, one
kernel handles all three, and their gradients are side by side again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from teamtr.engines.torch.early_launch import await_previous, early
from teamtr.engines.torch.fused_layers import BLOCK, power_of_2


@triton.jit
def _angles_kernel(
    position, frequency, cos, sin, tokens, scale, HALF: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Cosine and sine of the angles of some tokens, for both halves of a head."""
    await_previous(EARLY)
    n, d = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    in_n, mask = n < tokens, (n < tokens)[:, None] & (d < HALF)[None, :]
    turns = tl.load(frequency + d, mask=d < HALF, other=0.0)
    angle = tl.load(position + n, mask=in_n, other=0).to(tl.float32)[:, None] * turns[None, :]
    at = n[:, None] * (2 * HALF) + d[None, :]
    cosine, sine = (tl.cos(angle) * scale).to(cos.dtype.element_ty), (tl.sin(angle) * scale).to(sin.dtype.element_ty)
    tl.store(cos + at, cosine, mask=mask)
    tl.store(cos + at + HALF, cosine, mask=mask)
    tl.store(sin + at, sine, mask=mask)
    tl.store(sin + at + HALF, sine, mask=mask)


def angles(position_N: Tensor, frequency: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a plain rotation, [N, D] each, for float32 frequencies of half a head."""
    tokens, half = len(position_N), len(frequency)
    cos, sin = torch.empty(2, tokens, 2 * half, dtype=dtype, device=position_N.device)
    rows = max(1, BLOCK // power_of_2(half))
    _angles_kernel[(-(-tokens // rows),)](
        position_N, frequency, cos, sin, tokens, scale, HALF=half, TOKENS=rows, BLOCK=power_of_2(half), num_warps=4,
        **early(position_N),
    )  # fmt: skip
    return cos, sin


@triton.jit
def _turn_kernel(
    x, cos, sin, weight, grad, out, epsilon, angle_row,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """All heads of one token; with ``BACK``, their gradient."""
    n, row = tl.program_id(0).to(tl.int64), HEADS * 2 * HALF
    _turn_heads(
        x + n * row, cos + n * angle_row, sin + n * angle_row, weight, grad + n * row, out + n * row, epsilon,
        HEADS, HALF, BLOCK_H, BLOCK_D, NORM, BACK,
    )  # fmt: skip


@triton.jit
def _turn_rows_kernel(
    rows, cos, sin, of_query, of_key, query, key, value, back, epsilon, angle_row, query_row, key_row, value_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NORM: tl.constexpr, BACK: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Query and key of one token, from a row with query, key and value side by side; with ``VALUE``, the value is
    copied unchanged. With ``BACK``, the gradients of all three, into such a row."""
    n = tl.program_id(0).to(tl.int64)
    at_key, at_value = HEADS * 2 * HALF, (HEADS + KV_HEADS) * 2 * HALF
    whole = n * (HEADS + 2 * KV_HEADS) * 2 * HALF
    rows, back, cos, sin = rows + whole, back + whole, cos + n * angle_row, sin + n * angle_row
    query, key, value = query + n * query_row, key + n * key_row, value + n * value_row
    if BACK:
        _turn_heads(rows, cos, sin, of_query, query, back, epsilon, HEADS, HALF, BLOCK_H, BLOCK_D, NORM, True)
        _turn_heads(
            rows + at_key, cos, sin, of_key, key, back + at_key, epsilon, KV_HEADS, HALF, BLOCK_K, BLOCK_D, NORM, True
        )
    else:
        _turn_heads(rows, cos, sin, of_query, rows, query, epsilon, HEADS, HALF, BLOCK_H, BLOCK_D, NORM, False)
        _turn_heads(rows + at_key, cos, sin, of_key, rows, key, epsilon, KV_HEADS, HALF, BLOCK_K, BLOCK_D, NORM, False)
    if VALUE:
        v = tl.arange(0, BLOCK_V)
        inside = v < KV_HEADS * 2 * HALF
        if BACK:
            tl.store(back + at_value + v, tl.load(value + v, mask=inside), mask=inside)
        else:
            tl.store(value + v, tl.load(rows + at_value + v, mask=inside), mask=inside)


@triton.jit
def _turn_heads(
    x, cos, sin, weight, grad, out, epsilon,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of heads that are side by side, each of two halves that rotate into each other; with ``BACK``,
    the gradient."""
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    in_d = d < HALF
    mask = (h < HEADS)[:, None] & in_d[None, :]
    first = h[:, None] * 2 * HALF + d[None, :]
    second = first + HALF
    cos_1 = tl.load(cos + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + d + HALF, mask=in_d, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + d + HALF, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if NORM:
        x_1 = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
        x_2 = tl.load(x + second, mask=mask, other=0.0).to(tl.float32)
        weight_1 = tl.load(weight + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        weight_2 = tl.load(weight + d + HALF, mask=in_d, other=0.0).to(tl.float32)[None, :]
        shrink = tl.rsqrt(tl.sum(x_1 * x_1 + x_2 * x_2, 1) / (2 * HALF) + epsilon)[:, None]
    if BACK:
        grad_1 = tl.load(grad + first, mask=mask, other=0.0).to(tl.float32)
        grad_2 = tl.load(grad + second, mask=mask, other=0.0).to(tl.float32)
        out_1 = grad_1 * cos_1 + grad_2 * sin_2
        out_2 = grad_2 * cos_2 - grad_1 * sin_1
        if NORM:
            out_1, out_2 = out_1 * weight_1, out_2 * weight_2
            along = (tl.sum(out_1 * x_1 + out_2 * x_2, 1) / (2 * HALF))[:, None] * shrink * shrink
            out_1, out_2 = shrink * (out_1 - along * x_1), shrink * (out_2 - along * x_2)
    else:
        if NORM:
            x_1, x_2 = x_1 * shrink * weight_1, x_2 * shrink * weight_2
        else:
            x_1 = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
            x_2 = tl.load(x + second, mask=mask, other=0.0).to(tl.float32)
        out_1 = x_1 * cos_1 - x_2 * sin_1
        out_2 = x_2 * cos_2 + x_1 * sin_2
    tl.store(out + first, out_1.to(out.dtype.element_ty), mask=mask)
    tl.store(out + second, out_2.to(out.dtype.element_ty), mask=mask)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        ctx.save_for_backward(x if weight is not None else x.new_empty(0), cos, sin, weight)
        ctx.epsilon = epsilon
        _turn(x, cos, sin, weight, x, out, epsilon, back=False)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, cos, sin, weight = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        _turn(x, cos, sin, weight, grad, out, ctx.epsilon, back=True)
        return out, None, None, None, None


def _turn(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, grad: Tensor, out: Tensor, epsilon: float, *, back: bool
) -> None:
    tokens, heads, dim = out.shape
    _turn_kernel[(tokens,)](
        x, cos, sin, x if weight is None else weight, grad, out, epsilon, cos.stride(0),
        HEADS=heads, HALF=dim // 2, BLOCK_H=power_of_2(heads), BLOCK_D=power_of_2(dim // 2),
        NORM=weight is not None, BACK=back, num_warps=4,
    )  # fmt: skip


class _TurnedRows(torch.autograd.Function):
    """Query, key and value, from rows of all three. With norms, the rows are saved for the gradient, and the value is a
    view of them. Without, the value gets its own memory, and the rows are not saved."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_NW: Tensor,
        cos: Tensor,
        sin: Tensor,
        of_query: Tensor | None,
        of_key: Tensor | None,
        epsilon: float,
        heads: int,
        kv_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, width = rows_NW.shape
        dim = width // (heads + 2 * kv_heads)
        made = partial(torch.empty, dtype=rows_NW.dtype, device=rows_NW.device)
        query, key = made(tokens, heads, dim), made(tokens, kv_heads, dim)
        if of_query is None:
            value = made(tokens, kv_heads, dim)
        else:
            value = rows_NW[:, -kv_heads * dim :].view(tokens, kv_heads, dim)
        ctx.save_for_backward(rows_NW if of_query is not None else None, cos, sin, of_query, of_key)
        ctx.epsilon = epsilon
        _turn_rows(rows_NW, cos, sin, of_query, of_key, (query, key, value), rows_NW, epsilon, back=False)
        return query, key, value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_NW, cos, sin, of_query, of_key = ctx.saved_tensors
        query, key, value = (_by_token(grad) for grad in grads)
        width = sum(grad.shape[1] * grad.shape[2] for grad in grads)
        out_NW = torch.empty(len(query), width, dtype=query.dtype, device=query.device)
        given = out_NW if rows_NW is None else rows_NW
        _turn_rows(given, cos, sin, of_query, of_key, (query, key, value), out_NW, ctx.epsilon, back=True)
        return out_NW, *[None] * 7


def _turn_rows(
    rows_NW: Tensor,
    cos: Tensor,
    sin: Tensor,
    of_query: Tensor | None,
    of_key: Tensor | None,
    parts: tuple[Tensor, Tensor, Tensor],
    back_NW: Tensor,
    epsilon: float,
    *,
    back: bool,
) -> None:
    query, key, value = parts
    (tokens, heads, dim), kv_heads = query.shape, key.shape[1]
    _turn_rows_kernel[(tokens,)](
        rows_NW, cos, sin, rows_NW if of_query is None else of_query, rows_NW if of_key is None else of_key,
        query, key, value, back_NW, epsilon, cos.stride(0), query.stride(0), key.stride(0), value.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK_H=power_of_2(heads), BLOCK_K=power_of_2(kv_heads),
        BLOCK_D=power_of_2(dim // 2), BLOCK_V=power_of_2(kv_heads * dim), NORM=of_query is not None, BACK=back,
        VALUE=back or of_query is None, num_warps=4,
    )  # fmt: skip


def _by_token(x_NHD: Tensor) -> Tensor:
    """Contiguous within each token; tokens may have any stride."""
    return x_NHD if x_NHD.stride()[1:] == (x_NHD.shape[2], 1) else x_NHD.contiguous()


def turned(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, weight_D: Tensor | None, epsilon: float) -> Tensor:
    """Queries or keys normed over a head and rotated, as in ``Rotation``; angles get no gradient."""
    assert cos_ND.stride() == sin_ND.stride()
    assert cos_ND.stride(1) == 1
    out: Tensor = _Turned.apply(x_NHD, cos_ND, sin_ND, weight_D, epsilon)
    return out


def turned_rows(
    rows_NW: Tensor,
    cos_ND: Tensor,
    sin_ND: Tensor,
    of_query_D: Tensor | None,
    of_key_D: Tensor | None,
    epsilon: float,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as in ``turned``, and values unchanged, from rows in which they are side by side: [N, H, D],
    [N, K, D], [N, K, D]. Either both are normed or neither is."""
    assert cos_ND.stride() == sin_ND.stride()
    assert cos_ND.stride(1) == 1
    found: tuple[Tensor, Tensor, Tensor] = _TurnedRows.apply(
        rows_NW, cos_ND, sin_ND, of_query_D, of_key_D, epsilon, heads, kv_heads
    )
    return found
