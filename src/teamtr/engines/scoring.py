"""Token log-probability and exact KL of one position from two rows of logits: what every update reads most."""

from __future__ import annotations

import torch
from torch import Tensor

from teamtr.theory.kl import kl_cur_to_new


def token_logp(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    return torch.log_softmax(logits_NV, dim=-1).gather(-1, ids_N[:, None]).squeeze(-1)


def score_tokens(logits_new_NV: Tensor, logits_cur_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """(log new(token), KL(cur || new)) at each position; differentiable in the new logits.

    On a GPU one fused kernel reads both logits twice and keeps nothing of their size but themselves. It adds in
    float32, so float64 takes the plain way.
    """
    if logits_new_NV.device.type == "cuda" and logits_new_NV.dtype != torch.float64:
        from teamtr.engines.torch.scoring import fused_score

        return fused_score(logits_new_NV, logits_cur_NV, ids_N)
    return token_logp(logits_new_NV, ids_N), kl_cur_to_new(logits_cur_NV, logits_new_NV)
