"""Products of wide activations with an adapter's narrow factors, in half precision on a GPU.

Such a product computes next to nothing and reads everything: its cost is how fast, and how often, activations are read.
Libraries are made for wide factors; with narrow ones they read slowly, and once for each product. Here one pass over
the gradient of a layer's output serves both products that need it. That also holds for layers that read the same x and
whose outputs are side by side, each with narrow factors of its own. Sums over many tokens or columns are computed in
parts, which are added in a fixed order, so that the same numbers give the same bits.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NARROW_TOKENS, ACROSS_TOKENS = 32, 64
"""Tokens in a tile of the wide factor: in ``narrow``, and in ``across``, which sums over tokens."""
SUMS = 8192
"""Columns of a tile times those of a narrow factor: what a program holds in registers."""
ADDED = 1024
"""Numbers for which one program adds up partial sums."""
PROGRAMS = 264
"""Programs of a pass over a gradient: two for each multiprocessor of a large GPU."""


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
    wide, narrow, factor, across, along, places, scale, tokens, row, narrow_row, each, WIDTH: tl.constexpr,
    RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, ALIGNED: tl.constexpr,
    ALONG: tl.constexpr,
):  # fmt: skip
    """Some columns, all of one layer, over ``each`` tokens: their part of scale * wide' @ narrow, and with ``ALONG`` of
    scale * wide @ factor."""
    block, share = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    # Without knowing that columns are aligned, a tile would be read number by number, at a third of the speed.
    start = tl.multiple_of(tl.load(places + 3 * block), ALIGNED)
    end, layer = tl.multiple_of(tl.load(places + 3 * block + 1), ALIGNED), tl.load(places + 3 * block + 2)
    c, r = start.to(tl.int64) + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    in_c, in_r = c < end, r < RANK
    of_columns = in_c[:, None] & in_r[None, :]
    narrow += layer * RANK
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
    across, along, sums, found, firsts, shares, of_sums, of_found, programs, each, WIDTH: tl.constexpr,
    RANK: tl.constexpr, LAYERS: tl.constexpr, BLOCK: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of both results, one after the other. Results by token are rounded at the end, by ``each``
    programs for every layer. Without them, the sums are transposed to the shape of A."""
    place = tl.program_id(0)
    if ALONG and place >= programs:
        layer = (place - programs) // each
        i = ((place - programs) % each).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        first, last = tl.load(firsts + layer), tl.load(firsts + layer + 1)
        along += first.to(tl.int64) * of_found
        for _ in range(first, last):
            total += tl.load(along + i, mask=i < of_found, other=0.0)
            along += of_found
        at = (i // RANK * LAYERS + layer) * RANK + i % RANK
        tl.store(found + at, total.to(found.dtype.element_ty), mask=i < of_found)
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
    (tokens, width), rank = wide_NW.shape, factor_RW.shape[0]
    out_NR = torch.empty(tokens, rank, dtype=wide_NW.dtype, device=wide_NW.device)
    _narrow_kernel[(_parts(tokens, NARROW_TOKENS),)](
        wide_NW, factor_RW.contiguous(), out_NR, tokens, wide_NW.stride(0), WIDTH=width, RANK=rank,
        TOKENS=NARROW_TOKENS, COLUMNS=_columns(width, rank) // 2, RANKS=_ranks(rank), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out_NR


def across(wide_NW: Tensor, narrow_NR: Tensor) -> Tensor:
    """narrow' @ wide, in float32."""
    return _across(wide_NW, narrow_NR, None, 1.0, (wide_NW.shape[1],))[0]


def across_and_along(
    wide_NW: Tensor, narrow_NR: Tensor, factor_WR: Tensor, scale: float = 1.0, sizes: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """wide' @ narrow in float32 and wide @ factor, rounded; both scaled, with one read of the wide factor.

    ``sizes``: columns of several layers that are side by side. Each has its own columns of ``narrow``, side by side as
    well, and its rows of ``factor``; the results are arranged in the same way.
    """
    sums_WR, found_NR = _across(wide_NW, narrow_NR, factor_WR.contiguous(), scale, sizes or (wide_NW.shape[1],))
    assert found_NR is not None
    return sums_WR, found_NR


def _across(
    wide_NW: Tensor, narrow_NR: Tensor, factor_WR: Tensor | None, scale: float, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    wide_NW, narrow_NR = _by_row(wide_NW), _by_row(narrow_NR)
    tokens, width = wide_NW.shape
    layers, ranks, device = len(sizes), narrow_NR.shape[1], wide_NW.device
    rank = ranks // layers
    work = _Work.of(tokens, sizes, rank, PROGRAMS)
    places, firsts = _tables(sizes, work.columns, device)
    in_parts = partial(torch.empty, dtype=torch.float32, device=device)
    across_SWR = in_parts(work.shares, width, rank)
    along_BNR = across_SWR if factor_WR is None else in_parts(work.blocks, tokens, rank)
    _across_kernel[(work.blocks, work.shares)](
        wide_NW, narrow_NR, narrow_NR if factor_WR is None else factor_WR, across_SWR, along_BNR, places, scale, tokens,
        wide_NW.stride(0), narrow_NR.stride(0), work.each, WIDTH=width, RANK=rank, TOKENS=ACROSS_TOKENS,
        COLUMNS=work.columns, RANKS=work.ranks, ALIGNED=gcd(*sizes, work.columns), ALONG=factor_WR is not None,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    sums = in_parts(rank, width) if factor_WR is None else in_parts(width, rank)
    found_NR = None if factor_WR is None else torch.empty(tokens, ranks, dtype=wide_NW.dtype, device=device)
    of_found = 0 if found_NR is None else layers * work.adding
    _add_kernel[(work.summing + of_found,)](
        across_SWR, along_BNR, sums, sums if found_NR is None else found_NR, firsts, work.shares, width * rank,
        tokens * rank, work.summing, work.adding, WIDTH=width, RANK=rank, LAYERS=layers, BLOCK=ADDED,
        ALONG=found_NR is not None, num_warps=4,
    )  # fmt: skip
    return sums, found_NR


class _Work(NamedTuple):
    """How a pass over a wide factor is divided: blocks of columns, each within one layer, and shares of the tokens."""

    columns: int
    ranks: int
    blocks: int
    shares: int
    each: int
    """Tokens per share."""
    summing: int
    """Programs that add up the sums over tokens."""
    adding: int
    """Programs that add up the sums over the columns of one layer."""

    @staticmethod
    @lru_cache(maxsize=256)  # the layers of a model share a few shapes
    def of(tokens: int, sizes: tuple[int, ...], rank: int, programs: int) -> _Work:
        columns = _columns(max(sizes), rank)
        blocks = sum(_parts(size, columns) for size in sizes)
        each = ACROSS_TOKENS * max(1, _parts(tokens, ACROSS_TOKENS * max(1, programs // blocks)))
        shares = max(1, _parts(tokens, each))  # at least one: without tokens, sums are zero
        return _Work(
            columns, _ranks(rank), blocks, shares, each, _parts(sum(sizes) * rank, ADDED), _parts(tokens * rank, ADDED)
        )


@cache
def _tables(sizes: tuple[int, ...], columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each block: its first column, the end of its layer's columns, and the layer. Then the first block of each
    layer, with the number of blocks at the end."""
    places, firsts, end = [], [0], 0
    for layer, size in enumerate(sizes):
        start, end = end, end + size
        places += [(column, end, layer) for column in range(start, end, columns)]
        firsts.append(len(places))
    on_device = partial(torch.tensor, dtype=torch.int32, device=device)
    return on_device(places), on_device(firsts)


def _by_row(wide_NW: Tensor) -> Tensor:
    """Contiguous within each row; rows may have any stride."""
    return wide_NW if wide_NW.stride(1) == 1 else wide_NW.contiguous()


@cache
def _columns(width: int, rank: int) -> int:
    return max(32, min(SUMS // _ranks(rank), triton.next_power_of_2(width)))


@cache
def _ranks(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


def _parts(whole: int, each: int) -> int:
    """How many parts of at most ``each`` make up the whole."""
    return -(-whole // each)
