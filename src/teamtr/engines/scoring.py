"""Token log-probability and exact KL at each position from two rows of logits: the largest arrays that an update
reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teamtr.theory.kl import kl_cur_to_new

if TYPE_CHECKING:
    from teamtr.engines.torch.head import OutputLayer


def token_logp(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    return _of_tokens(torch.log_softmax(logits_NV, dim=-1), ids_N)


def _of_tokens(logp_NV: Tensor, ids_N: Tensor) -> Tensor:
    return logp_NV.gather(-1, ids_N[:, None]).squeeze(-1)


def score_tokens(logits_new_NV: Tensor, logits_cur_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """(log new(token), KL(cur || new)) at each position; differentiable in the new logits.

    On a GPU one fused kernel reads both logits twice and keeps nothing else of their size. It sums in float32, so
    float64 takes the plain path.
    """
    if logits_new_NV.device.type == "cuda" and logits_new_NV.dtype != torch.float64:
        from teamtr.engines.torch.scoring import fused_score

        return fused_score(logits_new_NV, logits_cur_NV, ids_N)
    logp_new_NV = torch.log_softmax(logits_new_NV, dim=-1)
    return _of_tokens(logp_new_NV, ids_N), kl_cur_to_new(logits_cur_NV, logits_new_NV, logp_new_NV)


def score_features(
    head: Callable[[Tensor], Tensor],
    frozen: Callable[[Tensor], Tensor],
    new_NH: Tensor,
    cur_NH: Tensor,
    ids_N: Tensor,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """``score_tokens`` of the logits that two heads compute from features; differentiable in the new features.
    ``keep``: keep logits for the backward pass instead of recomputing them."""
    if scores_in_half(head) and scores_in_half(frozen):
        from teamtr.engines.torch.scoring import fused_features

        return fused_features(head, frozen, new_NH, cur_NH, ids_N, keep=keep)

    def score(new: Tensor, cur: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits_cur = frozen(cur)
        return score_tokens(head(new), logits_cur, ids)

    if keep or not torch.is_grad_enabled():
        return score(new_NH, cur_NH, ids_N)
    found: tuple[Tensor, Tensor] = checkpoint(score, new_NH, cur_NH, ids_N, use_reentrant=False)
    return found


def scores_in_half(head: Callable[[Tensor], Tensor]) -> TypeGuard[OutputLayer]:
    """Whether the head's scores are computed by the fused path (``OutputLayer``), which takes less memory."""
    return bool(getattr(head, "scores_in_half", False))
