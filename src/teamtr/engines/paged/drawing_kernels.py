"""Triton kernels of the sampler: drawing a token with one read of the logits, and recording what was drawn.

``engines.sampling`` and ``buffers`` have the same in plain torch; tests compare them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from teamtr.engines.torch.early_launch import await_previous, early

VOCABULARY_BLOCK = 2048


@triton.jit
def _mass_kernel(logits, mass, vocabulary, blocks, inverse_temperature, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Largest logit of one block of the vocabulary, and the sum of exponentials relative to it."""
    await_previous(EARLY)
    # The last blocks first: they were written last, and are partly still in the card's cache.
    row, block = tl.program_id(0).to(tl.int64), blocks - 1 - tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = (
        tl.load(logits + row * vocabulary + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        * inverse_temperature
    )
    best = tl.max(x, 0)
    finite = tl.where(best > float("-inf"), best, 0.0)
    total = tl.sum(tl.exp(x - finite).to(tl.float64), 0)
    tl.store(mass + (row * blocks + block) * 2, best.to(tl.float64))
    tl.store(mass + (row * blocks + block) * 2 + 1, total)


@triton.jit
def _pick_kernel(
    logits, mass, uniform, chosen, logprob, vocabulary, blocks, inverse_temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Find where the cumulative distribution reaches ``uniform``: first the block, then the token inside it."""
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    best_b = tl.load(mass + (row * blocks + b) * 2, mask=b < blocks, other=float("-inf"))
    sum_b = tl.load(mass + (row * blocks + b) * 2 + 1, mask=b < blocks, other=0.0)
    best = tl.max(best_b, 0)
    mass_b = sum_b * tl.exp(best_b - best)
    best = best.to(tl.float32)
    total = tl.sum(mass_b, 0)
    target = tl.load(uniform + row) * total
    before_b = tl.cumsum(mass_b, 0) - mass_b
    reached = (before_b <= target) & (mass_b > 0)
    block = tl.max(tl.where(reached, b, 0), 0)
    left = target - tl.sum(tl.where(b == block, before_b, 0.0), 0)

    v = tl.arange(0, BLOCK)
    at = block * BLOCK + v
    x = (
        tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        * inverse_temperature
    )
    mass_v = tl.exp(x - best).to(tl.float64)
    before_v = tl.cumsum(mass_v, 0) - mass_v
    index = tl.max(tl.where((before_v <= left) & (mass_v > 0), v, 0), 0)
    score = tl.sum(tl.where(v == index, x, 0.0), 0)
    tl.store(chosen + row, (block * BLOCK + index).to(tl.int64))
    tl.store(logprob + row, score - best - tl.log(total).to(tl.float32))


def draw_token(logits_NV: Tensor, uniform_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draws a token per row by inverting the cumulative distribution at ``uniform_N`` (float64); returns tokens and
    their log-probabilities. Reads the logits once; probabilities are summed in float64."""
    logits_NV = logits_NV.float().contiguous()
    uniform_N = uniform_N.contiguous()  # a column of the noise table is not
    rows, vocabulary = logits_NV.shape
    blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    mass = torch.empty(rows, blocks, 2, dtype=torch.float64, device=logits_NV.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    _mass_kernel[(rows, blocks)](
        logits_NV,
        mass,
        vocabulary,
        blocks,
        1.0 / temperature,
        BLOCK=VOCABULARY_BLOCK,
        num_warps=4,
        **early(logits_NV),
    )
    _pick_kernel[(rows,)](
        logits_NV, mass, uniform_N, chosen, logprob, vocabulary, blocks, 1.0 / temperature,
        BLOCK=VOCABULARY_BLOCK, BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
        **early(logits_NV),
    )  # fmt: skip
    return chosen, logprob


@triton.jit
def _record_kernel(
    chosen, logprob, features, token, position, next_uniform, step, row, alive, limit, ends, uniform, ids, logp, kept,
    spare, tokens, features_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENDS: tl.constexpr, FED: tl.constexpr,
    KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One seat: store its token, and advance."""
    await_previous(EARLY)
    n = tl.program_id(0).to(tl.int64)
    lives, at, said = tl.load(alive + n) != 0, tl.load(step + n), tl.load(chosen + n)
    own = tl.load(row + n).to(tl.int64)
    to = tl.where(lives, own, spare).to(tl.int64) * tokens + at
    tl.store(ids + to, said)
    tl.store(logp + to, tl.load(logprob + n))
    if KEPT:
        for start in tl.static_range(0, WIDTH, BLOCK):
            c = start + tl.arange(0, BLOCK)
            feature = tl.load(features + n * features_row + c, mask=c < WIDTH, other=0.0)
            tl.store(kept + to * WIDTH + c, feature.to(kept.dtype.element_ty), mask=c < WIDTH)
    ended = tl.max((tl.load(ends + n * ENDS + tl.arange(0, ENDS)) == said).to(tl.int32), 0) > 0
    goes_on = lives & (ended == 0) & (at + 1 < tl.load(limit + n))
    next_token, fed = tl.where(lives, said, tl.load(token + n)), tl.load(position + n) + lives.to(tl.int32)
    next_step = at + goes_on.to(tl.int64)
    next_number = tl.load(uniform + own * tokens + next_step)
    tl.debug_barrier()  # all warps have read the seat before one of them changes it
    tl.store(token + n, next_token)
    if FED:
        tl.store(position + n, fed)
    tl.store(next_uniform + n, next_number)
    tl.store(step + n, next_step)
    tl.store(alive + n, goes_on)


def record_tokens(
    ids_N: Tensor, logp_N: Tensor, features_NH: Tensor, seats: tuple[Tensor, ...], uniform: Tensor, ids: Tensor,
    logp: Tensor, kept: Tensor | None, *, fed: bool,
) -> None:  # fmt: skip
    """``DecodeBuffers.record`` in one kernel. ``seats``: token, position, next_uniform, step, row, alive, limit and
    ends of the rows that drew; ``uniform`` holds all rows' noise, ``ids``, ``logp`` and ``kept`` what they said, with
    one spare row."""
    width = features_NH.shape[1]
    _record_kernel[(len(ids_N),)](
        ids_N, logp_N, features_NH, *seats, uniform, ids, logp, ids if kept is None else kept,
        len(ids) - 1, ids.shape[1], features_NH.stride(0), WIDTH=width, BLOCK=min(1024, triton.next_power_of_2(width)),
        ENDS=seats[-1].shape[1], FED=fed, KEPT=kept is not None, num_warps=4 if kept is not None else 1,
        **early(ids_N),
    )  # fmt: skip
