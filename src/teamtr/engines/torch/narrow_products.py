"""Products of wide activations with an adapter's narrow factors, in half precision on a card.

Such a product computes next to nothing and reads everything: what it takes is how fast, and how often, activations are
read. Libraries are made for wide factors; with narrow ones they read slowly, and once for each product. Here one pass
over the gradient of a layer's output serves both that need it. Sums over many tokens or columns are made in parts, and
these are added in a fixed order, so that the same numbers have the same bits.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

NARROW_TOKENS, ACROSS_TOKENS = 32, 64
"""Tokens of a tile of the wide factor: in ``narrow``, and in ``across``, which adds up over tokens."""
SUMS = 8192
"""Columns of a tile, times those of a narrow factor: what a program holds in registers."""
ADDED = 1024
"""Numbers that a program adds parts of."""
PROGRAMS = 264
"""Of a pass over a gradient: two for each processor of a large card."""


@triton.jit
def _narrow_kernel(
    wide, factor, out, tokens, row, WIDTH: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Some rows of wide @ factor'."""
    n, r = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, RANKS)
    in_n, in_r = n < tokens, r < RANK
    total = tl.zeros([TOKENS, RANKS], dtype=tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        in_c = c < WIDTH
        tile = tl.load(wide + n[:, None] * row + c[None, :], mask=in_n[:, None] & in_c[None, :], other=0.0)
        part = tl.load(factor + r[:, None] * WIDTH + c[None, :], mask=in_r[:, None] & in_c[None, :], other=0.0)
        total = tl.dot(tile, tl.trans(part), total)
    at = out + n[:, None] * RANK + r[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=in_n[:, None] & in_r[None, :])


@triton.jit
def _across_kernel(
    wide, narrow, factor, across, along, scale, tokens, row, narrow_row, each, WIDTH: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """Some columns of ``each`` tokens: their part of scale * wide' @ narrow, and with ``ALONG`` of scale * wide @
    factor."""
    block, share = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c, r = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    in_c, in_r = c < WIDTH, r < RANK
    of_columns = in_c[:, None] & in_r[None, :]
    if ALONG:
        columns = tl.load(factor + c[:, None] * RANK + r[None, :], mask=of_columns, other=0.0)
    total = tl.zeros([COLUMNS, RANKS], dtype=tl.float32)
    for start in range(0, each, TOKENS):
        n = share * each + start + tl.arange(0, TOKENS)
        in_n = n < tokens
        of_tokens = in_n[:, None] & in_r[None, :]
        tile = tl.load(wide + n[:, None] * row + c[None, :], mask=in_n[:, None] & in_c[None, :], other=0.0)
        rows = tl.load(narrow + n[:, None] * narrow_row + r[None, :], mask=of_tokens, other=0.0)
        total = tl.dot(tl.trans(tile), rows, total)
        if ALONG:
            found = scale * tl.dot(tile, columns)
            tl.store(along + (block * tokens + n[:, None]) * RANK + r[None, :], found, mask=of_tokens)
    tl.store(across + (share * WIDTH + c[:, None]) * RANK + r[None, :], scale * total, mask=of_columns)


@triton.jit
def _add_kernel(
    across, along, sums, found, shares, blocks, of_sums, of_found, programs, WIDTH: tl.constexpr, RANK: tl.constexpr,
    BLOCK: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """The parts of both, one after the other; what belongs to tokens is rounded at the end. Sums that are alone are
    turned, to the shape of A."""
    place = tl.program_id(0)
    if ALONG and place >= programs:
        i = (place - programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for _ in range(blocks):
            total += tl.load(along + i, mask=i < of_found, other=0.0)
            along += of_found
        tl.store(found + i, total.to(found.dtype.element_ty), mask=i < of_found)
    else:
        i = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for _ in range(shares):
            total += tl.load(across + i, mask=i < of_sums, other=0.0)
            across += of_sums
        at = i if ALONG else i % RANK * WIDTH + i // RANK
        tl.store(sums + at, total, mask=i < of_sums)


def narrow(wide_NW: Tensor, factor_RW: Tensor) -> Tensor:
    """wide @ factor', rounded to the dtype of both."""
    wide_NW = _by_row(wide_NW)
    tokens, width = wide_NW.shape
    rank = len(factor_RW)
    out_NR = torch.empty(tokens, rank, dtype=wide_NW.dtype, device=wide_NW.device)
    _narrow_kernel[(triton.cdiv(tokens, NARROW_TOKENS),)](
        wide_NW, factor_RW.contiguous(), out_NR, tokens, wide_NW.stride(0), WIDTH=width, RANK=rank,
        TOKENS=NARROW_TOKENS, COLUMNS=_columns(width, rank) // 2, RANKS=_ranks(rank), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out_NR


def across(wide_NW: Tensor, narrow_NR: Tensor) -> Tensor:
    """narrow' @ wide, in float32."""
    return _across(wide_NW, narrow_NR, None, 1.0)[0]


def across_and_along(
    wide_NW: Tensor, narrow_NR: Tensor, factor_WR: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """wide' @ narrow in float32 and wide @ factor, rounded, both scaled, with one look at the wide one."""
    sums_WR, found_NR = _across(wide_NW, narrow_NR, factor_WR.contiguous(), scale)
    assert found_NR is not None
    return sums_WR, found_NR


def _across(wide_NW: Tensor, narrow_NR: Tensor, factor_WR: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    wide_NW, narrow_NR = _by_row(wide_NW), _by_row(narrow_NR)
    tokens, width = wide_NW.shape
    rank = narrow_NR.shape[1]
    columns = _columns(width, rank)
    blocks = triton.cdiv(width, columns)
    each = ACROSS_TOKENS * max(1, triton.cdiv(tokens, ACROSS_TOKENS * max(1, PROGRAMS // blocks)))
    shares = max(1, triton.cdiv(tokens, each))  # of no tokens at all, sums are zero
    in_parts = partial(torch.empty, dtype=torch.float32, device=wide_NW.device)
    across_SWR = in_parts(shares, width, rank)
    along_BNR = across_SWR if factor_WR is None else in_parts(blocks, tokens, rank)
    _across_kernel[(blocks, shares)](
        wide_NW, narrow_NR, narrow_NR if factor_WR is None else factor_WR, across_SWR, along_BNR, scale, tokens,
        wide_NW.stride(0), narrow_NR.stride(0), each, WIDTH=width, RANK=rank, TOKENS=ACROSS_TOKENS, COLUMNS=columns,
        RANKS=_ranks(rank), ALONG=factor_WR is not None, num_warps=8, num_stages=3,
    )  # fmt: skip
    sums = in_parts(rank, width) if factor_WR is None else in_parts(width, rank)
    found_NR = None if factor_WR is None else torch.empty(tokens, rank, dtype=wide_NW.dtype, device=wide_NW.device)
    of_sums, of_found = triton.cdiv(width * rank, ADDED), 0 if found_NR is None else triton.cdiv(tokens * rank, ADDED)
    _add_kernel[(of_sums + of_found,)](
        across_SWR, along_BNR, sums, sums if found_NR is None else found_NR, shares, blocks, width * rank,
        tokens * rank, of_sums, WIDTH=width, RANK=rank, BLOCK=ADDED, ALONG=found_NR is not None, num_warps=4,
    )  # fmt: skip
    return sums, found_NR


def _by_row(wide_NW: Tensor) -> Tensor:
    """Numbers of a row side by side; rows may lie apart."""
    return wide_NW if wide_NW.stride(1) == 1 else wide_NW.contiguous()


def _columns(width: int, rank: int) -> int:
    return max(32, min(SUMS // _ranks(rank), triton.next_power_of_2(width)))


def _ranks(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))
