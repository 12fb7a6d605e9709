"""Triton kernels for ``score_tokens``: the sums of ``theory.kl`` without arrays of the vocabulary's size.

The same kernels compute ``score_features``, from hidden states through the output layer to the score, and its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from teamtr.engines.torch.head import OutputLayer, half_product

BLOCK = 4096


@triton.jit
def _score_kernel(
    new, cur, ids, logp, kl, norm_new, norm_cur, vocabulary, new_row, cur_row, BLOCK: tl.constexpr
):  # fmt: skip
    """One position: both normalizers in a first pass, the KL in a second."""
    n = tl.program_id(0).to(tl.int64)
    best_new, sum_new = float("-inf"), 0.0
    best_cur, sum_cur = float("-inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(new + n * new_row + v, mask=v < vocabulary, other=float("-inf"))
        y = tl.load(cur + n * cur_row + v, mask=v < vocabulary, other=float("-inf"))
        # While all logits so far are minus infinity, there is no maximum to subtract.
        higher = tl.maximum(best_new, tl.max(x, 0))
        base = tl.where(higher > float("-inf"), higher, 0.0)
        sum_new = sum_new * tl.exp(best_new - base) + tl.sum(tl.exp(x - base), 0)
        best_new = higher
        higher = tl.maximum(best_cur, tl.max(y, 0))
        base = tl.where(higher > float("-inf"), higher, 0.0)
        sum_cur = sum_cur * tl.exp(best_cur - base) + tl.sum(tl.exp(y - base), 0)
        best_cur = higher
    z_new, z_cur = best_new + tl.log(sum_new), best_cur + tl.log(sum_cur)
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        inside = v < vocabulary
        # The order of these differences keeps equal logits at exactly 0.
        log_new = tl.load(new + n * new_row + v, mask=inside, other=float("-inf")) - z_new
        log_cur = tl.load(cur + n * cur_row + v, mask=inside, other=float("-inf")) - z_cur
        p, q = tl.exp(log_cur), tl.exp(log_new)
        d = tl.where(p > 0, log_new - log_cur, 0.0)
        small = tl.abs(d) < 0.3
        e = tl.where(small, d, 0.0)
        # exp(d) - 1 - d near 0, where the difference itself would cancel
        series = e * e * (0.5 + e * (1 / 6 + e * (1 / 24 + e * (1 / 120 + e * (1 / 720 + e * (1 / 5040))))))
        term = tl.where(small & (p > 0), p * series, q - p * (1.0 + d))
        total += tl.sum(tl.where(inside, term, 0.0), 0)
    token = tl.load(ids + n)
    tl.store(logp + n, tl.load(new + n * new_row + token) - z_new)
    tl.store(kl + n, tl.maximum(total, 0.0))
    tl.store(norm_new + n, z_new)
    tl.store(norm_cur + n, z_cur)


@triton.jit
def _gradient_kernel(
    new, cur, ids, norm_new, norm_cur, grad_logp, grad_kl, grad, vocabulary, new_row, cur_row, BLOCK: tl.constexpr
):  # fmt: skip
    """d/d new of grad_logp * log q(token) + grad_kl * KL: q - p for the KL, onehot(token) - q for the
    log-probability."""
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocabulary
    q = tl.exp(tl.load(new + n * new_row + v, mask=inside, other=float("-inf")) - tl.load(norm_new + n))
    p = tl.exp(tl.load(cur + n * cur_row + v, mask=inside, other=float("-inf")) - tl.load(norm_cur + n))
    chosen = tl.where(v == tl.load(ids + n), 1.0, 0.0)
    slope = tl.load(grad_logp + n) * (chosen - q) + tl.load(grad_kl + n) * (q - p)
    tl.store(grad + n * vocabulary + v, slope.to(grad.dtype.element_ty), mask=inside)


def _score(new: Tensor, cur: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, KL, and the normalizers of both."""
    rows, vocabulary = new.shape
    logp, kl, norm_new, norm_cur = (torch.empty(rows, dtype=torch.float32, device=new.device) for _ in range(4))
    _score_kernel[(rows,)](
        new, cur, ids, logp, kl, norm_new, norm_cur, vocabulary, new.stride(0), cur.stride(0), BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return logp, kl, norm_new, norm_cur


def _gradient(
    new: Tensor, cur: Tensor, ids: Tensor, norms: tuple[Tensor, Tensor], slopes: tuple[Tensor, Tensor], out: torch.dtype
) -> Tensor:
    """The gradient of the logits, from the slopes of log-probabilities and KL."""
    rows, vocabulary = new.shape
    grad = torch.empty(rows, vocabulary, dtype=out, device=new.device)
    _gradient_kernel[(rows, triton.cdiv(vocabulary, BLOCK))](
        new, cur, ids, *norms, slopes[0].contiguous(), slopes[1].contiguous(), grad, vocabulary,
        new.stride(0), cur.stride(0), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return grad


class _FusedScore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, cur: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logp, kl, norm_new, norm_cur = _score(new, cur, ids)
        ctx.save_for_backward(new, cur, ids, norm_new, norm_cur)
        return logp, kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_kl: Tensor) -> tuple[Tensor, None, None]:
        new, cur, ids, norm_new, norm_cur = ctx.saved_tensors
        return _gradient(new, cur, ids, (norm_new, norm_cur), (grad_logp, grad_kl), torch.float32), None, None


def fused_score(logits_new_NV: Tensor, logits_cur_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """See ``engines.scoring.score_tokens``. Logits are float32 with contiguous rows; the cur ones get no gradient."""
    result: tuple[Tensor, Tensor] = _FusedScore.apply(
        logits_new_NV.contiguous(), logits_cur_NV.contiguous(), ids_N.contiguous()
    )
    return result


class _FusedFeatures(torch.autograd.Function):
    """Logits of both policies, their score, and the backward pass, in float16 products that are accumulated in float32.
    Each position's gradient of its logits is scaled to where float16 has most room, whatever the loss scale: relative
    to the position's larger slope, nothing above 2e-12 is lost. That matters where probability is spread over the whole
    vocabulary and the KL is small: there all of its gradient is in numbers below 1e-7."""

    @staticmethod
    def forward(
        ctx: Any, new_NH: Tensor, cur_NH: Tensor, ids: Tensor, head: OutputLayer, frozen: OutputLayer, keep: bool
    ) -> tuple[Tensor, Tensor]:
        new, cur = _logits(head, new_NH), _logits(frozen, cur_NH)
        logp, kl, *norms = _score(new, cur, ids)
        kept = (new, cur) if keep else (new_NH.half(), cur_NH.half())
        ctx.save_for_backward(*kept, ids, *norms)
        ctx.heads, ctx.keep, ctx.dtype = (head, frozen), keep, new_NH.dtype
        return logp, kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        *pair, ids, norm_new, norm_cur = ctx.saved_tensors
        head, frozen = ctx.heads
        new, cur = pair if ctx.keep else (_logits(head, pair[0]), _logits(frozen, pair[1]))
        del pair
        larger = torch.maximum(grad_logp.abs(), grad_kl.abs()).clamp_min(TINY)
        slopes = grad_logp / larger * ROOM, grad_kl / larger * ROOM
        grad_NV = _gradient(new, cur, ids, (norm_new, norm_cur), slopes, torch.float16)
        grad_NH = half_product(grad_NV, head.half).mul_((larger / ROOM / head.temperature)[:, None])
        return grad_NH.to(ctx.dtype), None, None, None, None, None


TINY = 1e-30
"""A slope below that of any loss, but not zero."""
ROOM = 2.0**14
"""The larger slope of a position in float16. A gradient of its logits is at most twice as large, below the maximum of
65,504."""


def _logits(head: OutputLayer, hidden_NH: Tensor) -> Tensor:
    """``head(hidden_NH)`` in place, without autograd."""
    assert head.half is not None
    logits_NV = half_product(hidden_NH.half(), head.half.T)
    if head.bias is not None:
        logits_NV += head.bias.float()
    return logits_NV if head.temperature == 1.0 else logits_NV.div_(head.temperature)


def fused_features(
    head: OutputLayer, frozen: OutputLayer, new_NH: Tensor, cur_NH: Tensor, ids_N: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor]:
    """See ``engines.scoring.score_features``; for heads with a float16 weight."""
    result: tuple[Tensor, Tensor] = _FusedFeatures.apply(new_NH, cur_NH, ids_N.contiguous(), head, frozen, keep)
    return result
