"""Triton kernels of the sampler: attention over pages.

Pages hold the keys and values of ``PAGE`` consecutive tokens: pool[layer, page, kv head, slot, dim]. A row's table
lists its pages in order, so position p of a row is in page table[p // PAGE], slot p % PAGE.

``reference.py`` has the same in plain torch; tests compare them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from teamtr.engines.paged.work_split import Together, shares, splits
from teamtr.engines.torch.early_launch import await_previous, early
from teamtr.engines.torch.fused_layers import with_room
from teamtr.engines.torch.rotation import Rotation

PAGE = 64
"""Tokens in a page; also the tile that a program reads in a prefill, and from pages that rows have in common."""
TILE = 32
"""The tile that a program of a decode step reads from a row's own pages. The smaller a program, the more of them run at
once, and the more reads are under way."""


@triton.jit
def _rotated(
    x, at, mask, d, cos_row, sin_row, weight, epsilon, NORM: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Rows [R, BLOCK_D] that begin at ``at`` [R, 1], normalized over a head and rotated, in float32. An element's
    partner in the rotation is read a second time, because it is in another thread's register."""
    half: tl.constexpr = DIM // 2
    pair = tl.where(d < half, d + half, d - half)
    own = tl.load(x + at + d[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + at + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        shrink = tl.rsqrt(tl.sum(own * own, 1) / DIM + epsilon)[:, None]
        own = own * shrink * tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        other = other * shrink * tl.load(weight + pair, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    return own * cos_row + tl.where(d < half, -1.0, 1.0)[None, :] * other * sin_row


@triton.jit
def _common_kernel(
    query, key_pool, value_pool, table, member, pages, sums, sums_ml,
    cos, sin, query_weight,
    scale, epsilon,
    query_row, query_head, table_row, angle_row,
    MEMBERS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, SHARES: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one kv head of all rows of a cluster, over its share of the pages that they begin
    with. Unused cluster entries have no pages."""
    await_previous(EARLY)
    head, cluster, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(pages + cluster)
    if count == 0:
        return
    t, d, s = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D), tl.arange(0, PAGE)
    row = tl.load(member + cluster * MEMBERS + t // GROUP, mask=t < MEMBERS * GROUP, other=-1).to(tl.int64)
    in_t, in_d = row >= 0, d < DIM
    mask = in_t[:, None] & in_d[None, :]
    heads = head * GROUP + t % GROUP
    at_q = row[:, None] * query_row + heads[:, None] * query_head
    if ROTATE:
        angle = row[:, None] * angle_row + d[None, :]
        cos_td = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        sin_td = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        q = _rotated(query, at_q, mask, d, cos_td, sin_td, query_weight, epsilon, NORM, DIM).to(query.dtype.element_ty)
    else:
        q = tl.load(query + at_q + d[None, :], mask=mask, other=0.0)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sum_d = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    page_stride = KV_HEADS * PAGE * DIM
    any_row = tl.load(member + cluster * MEMBERS).to(tl.int64)
    each = (count + SHARES - 1) // SHARES
    for p in range(share * each, tl.minimum(count, share * each + each)):
        page = tl.load(table + any_row * table_row + p).to(tl.int64)
        tile = page * page_stride + head * PAGE * DIM + s[:, None] * DIM + d[None, :]
        k = tl.load(key_pool + tile, mask=in_d[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        higher = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp(best - higher)
        weight = tl.exp(score - higher[:, None])
        v = tl.load(value_pool + tile, mask=in_d[None, :], other=0.0)
        sum_d = sum_d * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        best = higher
    at = (row * KV_HEADS * GROUP + heads) * SHARES + share
    tl.store(sums + at[:, None] * DIM + d[None, :], sum_d, mask=mask)
    tl.store(sums_ml + at * 2, best, mask=in_t)
    tl.store(sums_ml + at * 2 + 1, total, mask=in_t)


@triton.jit
def _decode_kernel(
    query, key, value, key_pool, value_pool, table, length, out, partial, partial_ml, common, common_ml, first_page,
    cos, sin, query_weight, key_weight,
    scale, epsilon,
    query_row, query_head, key_row, key_head, value_row, value_head, table_row, angle_row,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_G: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
    SHARES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one kv head of one row, over its share of the row's pages, TILE tokens at a time.

    The current token's key and value come from registers; the first program also writes them to their page. With
    SHARES, a row in a cluster starts from the sums that ``_common_kernel`` left in ``common``, and continues from its
    first page of its own; each of the row's programs adds different shares of these sums.
    """
    await_previous(EARLY)
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    past = tl.load(length + row)
    g, d, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    in_d = d < DIM
    heads = head * GROUP + g
    in_gd = (g < GROUP)[:, None] & in_d[None, :]
    if ROTATE:
        cos_d = tl.load(cos + row * angle_row + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        sin_d = tl.load(sin + row * angle_row + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        at_q = row * query_row + heads[:, None] * query_head
        q = _rotated(query, at_q, in_gd, d, cos_d, sin_d, query_weight, epsilon, NORM, DIM).to(query.dtype.element_ty)
        at_k = row * key_row + head * key_head + tl.zeros([1, 1], tl.int64)
        k_row = _rotated(key, at_k, in_d[None, :], d, cos_d, sin_d, key_weight, epsilon, NORM, DIM)
        k_new = tl.reshape(k_row, [BLOCK_D]).to(key.dtype.element_ty)
    else:
        q = tl.load(query + row * query_row + heads[:, None] * query_head + d[None, :], mask=in_gd, other=0.0)
        k_new = tl.load(key + row * key_row + head * key_head + d, mask=in_d, other=0.0)
    v_new = tl.load(value + row * value_row + head * value_head + d, mask=in_d, other=0.0)

    page_stride = KV_HEADS * PAGE * DIM
    best = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sum_d = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if split == 0:
        here = tl.load(table + row * table_row + past // PAGE).to(tl.int64)
        slot = here * page_stride + head * PAGE * DIM + (past % PAGE) * DIM + d
        tl.store(key_pool + slot, k_new, mask=in_d)
        tl.store(value_pool + slot, v_new, mask=in_d)
        best = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        total = tl.full([BLOCK_G], 1.0, tl.float32)
        sum_d = tl.zeros([BLOCK_G, BLOCK_D], tl.float32) + v_new.to(tl.float32)[None, :]

    first = 0
    if SHARES:
        first = tl.load(first_page + row)
        if first > 0:
            for begin in tl.static_range(0, SHARES, SPLITS):
                share = begin + split
                if share < SHARES:
                    at_c = (row * KV_HEADS * GROUP + heads) * SHARES + share
                    common_best = tl.load(common_ml + at_c * 2, mask=g < GROUP, other=float("-inf"))
                    common_total = tl.load(common_ml + at_c * 2 + 1, mask=g < GROUP, other=0.0)
                    common_sum = tl.load(common + at_c[:, None] * DIM + d[None, :], mask=in_gd, other=0.0)
                    highest = tl.maximum(best, common_best)
                    level = tl.where(highest > float("-inf"), highest, 0.0)  # -inf while neither has read a page
                    shrink_own, shrink_common = tl.exp(best - level), tl.exp(common_best - level)
                    sum_d = sum_d * shrink_own[:, None] + common_sum * shrink_common[:, None]
                    total = total * shrink_own + common_total * shrink_common
                    best = highest

    tiles, first_tile = (past + TILE - 1) // TILE, first * (PAGE // TILE)
    each = (tiles - first_tile + SPLITS - 1) // SPLITS
    for t in range(first_tile + split * each, tl.minimum(tiles, first_tile + split * each + each)):
        page = tl.load(table + row * table_row + t * TILE // PAGE).to(tl.int64)
        valid = t * TILE + s < past
        tile = page * page_stride + (head * PAGE + t * TILE % PAGE + s)[:, None] * DIM + d[None, :]
        k = tl.load(key_pool + tile, mask=valid[:, None] & in_d[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp(best - higher)
        weight = tl.exp(score - higher[:, None])
        v = tl.load(value_pool + tile, mask=valid[:, None] & in_d[None, :], other=0.0)
        sum_d = sum_d * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        best = higher

    if SPLITS == 1:
        tl.store(
            out + (row * KV_HEADS * GROUP + heads[:, None]) * DIM + d[None, :],
            (sum_d / total[:, None]).to(out.dtype.element_ty),
            mask=in_gd,
        )
    else:
        at = (row * KV_HEADS * GROUP + heads) * SPLITS + split
        tl.store(partial + at[:, None] * DIM + d[None, :], sum_d, mask=in_gd)
        tl.store(partial_ml + at * 2, best, mask=g < GROUP)
        tl.store(partial_ml + at * 2 + 1, total, mask=g < GROUP)


@triton.jit
def _join_kernel(
    partial, partial_ml, out,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Combine the partial sums of one query head of one row."""
    await_previous(EARLY)
    at = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    best = tl.load(partial_ml + (at * SPLITS + s) * 2)
    total = tl.load(partial_ml + (at * SPLITS + s) * 2 + 1)
    sums = tl.load(partial + (at * SPLITS + s)[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
    share = tl.exp(best - tl.max(best, 0))
    joined = tl.sum(sums * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + at * DIM + d, joined.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def _prefill_kernel(
    query, key_pool, value_pool, table, block_row, block_first, block_count, block_position, out,
    scale,
    query_token, query_head, table_row,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program: one query head of up to BLOCK_M consecutive tokens of one row, over all pages before them."""
    block, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(block_row + block).to(tl.int64)
    first = tl.load(block_first + block).to(tl.int64)
    count = tl.load(block_count + block)
    position = tl.load(block_position + block)
    m, d, s = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, PAGE)
    in_d, in_m = d < DIM, m < count
    q = tl.load(
        query + (first + m)[:, None] * query_token + head * query_head + d[None, :],
        mask=in_m[:, None] & in_d[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_d = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    page_stride = KV_HEADS * PAGE * DIM
    for p in range((position + count + PAGE - 1) // PAGE):
        page = tl.load(table + row * table_row + p).to(tl.int64)
        seen = (p * PAGE + s)[None, :] <= (position + m)[:, None]
        written = p * PAGE + s < position + count
        tile = page * page_stride + (head // GROUP) * PAGE * DIM + s[:, None] * DIM + d[None, :]
        k = tl.load(key_pool + tile, mask=written[:, None] & in_d[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp(best - higher)
        weight = tl.exp(score - higher[:, None])
        v = tl.load(value_pool + tile, mask=written[:, None] & in_d[None, :], other=0.0)
        sum_d = sum_d * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        best = higher
    tl.store(
        out + ((first + m)[:, None] * KV_HEADS * GROUP + head) * DIM + d[None, :],
        (sum_d / total[:, None]).to(out.dtype.element_ty),
        mask=in_m[:, None] & in_d[None, :],
    )


def decode_attention(
    query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, key_pool: Tensor, value_pool: Tensor,
    table_NP: Tensor, length_N: Tensor, scale: float, rotation: Rotation | None = None,
    together: Together | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one new token per row over its ``length_N`` cached ones and itself. Also writes the token's key and
    value to their page. With ``rotation``, query and key are the layer's products before norm and rotation. Returns
    [N, H, D]."""
    rows, heads, dim = query_NHD.shape
    kv_heads = key_NKD.shape[1]
    parts, common_parts = splits(rows, kv_heads), 0 if together is None else shares(rows, kv_heads)
    out = with_room(rows, heads * dim, query_NHD).view(rows, heads, dim)
    partial = partial_ml = common = common_ml = first_page = out
    if parts > 1:
        partial, partial_ml = _room_for_sums(out, parts)
    group = heads // kv_heads
    block_g, block_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(dim))
    cos, sin, query_weight, key_weight, epsilon, angle_row = _pointers(rotation, out)
    kind: dict[str, Any] = {
        "GROUP": group, "DIM": dim, "BLOCK_D": block_d, "PAGE": PAGE, "KV_HEADS": kv_heads,
        "ROTATE": rotation is not None, "NORM": rotation is not None and rotation.query_weight_D is not None,
        **early(out),
    }  # fmt: skip
    if together is not None:
        member_CM, pages_C, first_page = together
        members = member_CM.shape[1]
        common, common_ml = _room_for_sums(out, common_parts)
        _common_kernel[(kv_heads, len(member_CM), common_parts)](
            query_NHD, key_pool, value_pool, table_NP, member_CM, pages_C, common, common_ml,
            cos, sin, query_weight,
            scale, epsilon,
            query_NHD.stride(0), query_NHD.stride(1), table_NP.stride(0), angle_row,
            MEMBERS=members, QUERIES=max(16, triton.next_power_of_2(members * group)), SHARES=common_parts,
            **kind, num_warps=4, num_stages=1,
        )  # fmt: skip
    _decode_kernel[(kv_heads, rows, parts)](
        query_NHD, key_NKD, value_NKD, key_pool, value_pool, table_NP, length_N, out, partial, partial_ml,
        common, common_ml, first_page,
        cos, sin, query_weight, key_weight,
        scale, epsilon,
        query_NHD.stride(0), query_NHD.stride(1), key_NKD.stride(0), key_NKD.stride(1),
        value_NKD.stride(0), value_NKD.stride(1), table_NP.stride(0), angle_row,
        TILE=TILE, SPLITS=parts, BLOCK_G=block_g, SHARES=common_parts, **kind,
        num_warps=_warps(block_g * block_d, out.dtype), num_stages=2,
    )  # fmt: skip
    if parts > 1:
        _join_kernel[(rows * heads,)](
            partial, partial_ml, out, DIM=dim, BLOCK_D=block_d, SPLITS=parts, num_warps=max(1, parts // 16),
            **early(out),
        )  # fmt: skip
    return out


def _warps(sums: int, dtype: torch.dtype) -> int:
    """Warps of a program of a decode step that holds this many sums: as few as have the registers for them. In float32,
    products take more registers."""
    return 4 if dtype == torch.float32 else min(4, max(1, sums // 2048))


def _room_for_sums(out_NHD: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Buffers for the partial results of this many programs: weighted values, and the highest score with the sum of
    weights."""
    rows, heads, dim = out_NHD.shape
    sums = torch.empty(rows, heads, parts, dim, dtype=torch.float32, device=out_NHD.device)
    return sums, torch.empty(rows, heads, parts, 2, dtype=torch.float32, device=out_NHD.device)


def _pointers(rotation: Rotation | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float, int]:
    """The kernel arguments of a rotation; without one, placeholders that kernels do not read."""
    if rotation is None:
        return unused, unused, unused, unused, 0.0, 0
    assert rotation.cos_ND.stride() == rotation.sin_ND.stride()
    weights = (rotation.query_weight_D, rotation.key_weight_D)
    query_weight, key_weight = (unused if weight is None else weight for weight in weights)
    return rotation.cos_ND, rotation.sin_ND, query_weight, key_weight, rotation.epsilon, rotation.cos_ND.stride(0)


@triton.jit
def _rotate_kernel(
    query, key, value, key_pool, value_pool, page, slot, out,
    cos, sin, query_weight, key_weight,
    tokens, epsilon,
    query_row, query_head, key_row, key_head, value_row, value_head, angle_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program: one head of BLOCK_T tokens. Queries go to ``out``, keys and values to their pages."""
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    head, d = tl.program_id(1), tl.arange(0, BLOCK_D)
    in_t, in_d = t < tokens, d < DIM
    mask = in_t[:, None] & in_d[None, :]
    cos_td = tl.load(cos + t[:, None] * angle_row + d[None, :], mask=mask, other=0.0).to(tl.float32)
    sin_td = tl.load(sin + t[:, None] * angle_row + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if head < HEADS:
        at = t[:, None] * query_row + head * query_head
        q = _rotated(query, at, mask, d, cos_td, sin_td, query_weight, epsilon, NORM, DIM)
        tl.store(out + (t[:, None] * HEADS + head) * DIM + d[None, :], q.to(out.dtype.element_ty), mask=mask)
    else:
        kv = head - HEADS
        pages = tl.load(page + t, mask=in_t, other=0)
        slots = tl.load(slot + t, mask=in_t, other=0)
        there = ((pages * KV_HEADS + kv) * PAGE + slots)[:, None] * DIM + d[None, :]
        at = t[:, None] * key_row + kv * key_head
        k = _rotated(key, at, mask, d, cos_td, sin_td, key_weight, epsilon, NORM, DIM)
        tl.store(key_pool + there, k.to(key_pool.dtype.element_ty), mask=mask)
        v = tl.load(value + t[:, None] * value_row + kv * value_head + d[None, :], mask=mask, other=0.0)
        tl.store(value_pool + there, v.to(value_pool.dtype.element_ty), mask=mask)


BLOCK_T = 16


def rotate_into_pages(
    query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rotation: Rotation, key_pool: Tensor, value_pool: Tensor,
    page_N: Tensor, slot_N: Tensor,
) -> Tensor:  # fmt: skip
    """Apply norm and rotation to queries and keys, and write keys and values to their pages. Returns the queries."""
    tokens, heads, dim = query_NHD.shape
    kv_heads = key_NKD.shape[1]
    out = torch.empty(tokens, heads, dim, dtype=query_NHD.dtype, device=query_NHD.device)
    cos, sin, query_weight, key_weight, epsilon, angle_row = _pointers(rotation, out)
    _rotate_kernel[(triton.cdiv(tokens, BLOCK_T), heads + kv_heads)](
        query_NHD, key_NKD, value_NKD, key_pool, value_pool, page_N, slot_N, out,
        cos, sin, query_weight, key_weight,
        tokens, epsilon,
        query_NHD.stride(0), query_NHD.stride(1), key_NKD.stride(0), key_NKD.stride(1),
        value_NKD.stride(0), value_NKD.stride(1), angle_row,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), PAGE=PAGE,
        BLOCK_T=BLOCK_T, NORM=rotation.query_weight_D is not None, num_warps=4,
    )  # fmt: skip
    return out


BLOCK_M = 64


def prefill_attention(
    query_NHD: Tensor, key_pool: Tensor, value_pool: Tensor, table_RP: Tensor, blocks: Tensor, scale: float
) -> Tensor:
    """Causal attention of packed tokens over pages that already hold them. ``blocks`` is int32 [4, blocks]: row,
    first packed token, tokens (at most BLOCK_M), position of the first."""
    tokens, heads, dim = query_NHD.shape
    kv_heads = key_pool.shape[1]
    out = torch.empty(tokens, heads, dim, dtype=query_NHD.dtype, device=query_NHD.device)
    _prefill_kernel[(blocks.shape[1], heads)](
        query_NHD, key_pool, value_pool, table_RP, blocks[0], blocks[1], blocks[2], blocks[3], out,
        scale,
        query_NHD.stride(0), query_NHD.stride(1), table_RP.stride(0),
        GROUP=heads // kv_heads, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), PAGE=PAGE, KV_HEADS=kv_heads,
        BLOCK_M=BLOCK_M, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
