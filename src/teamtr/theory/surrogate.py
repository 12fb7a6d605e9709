"""Likelihood ratios and the clipped surrogate, eq:ppo_obj and its token-level variants.

Token log-probabilities are padded ``_MT`` tensors with a boolean ``mask_MT``, True at real tokens. Values at padded
positions (nan and inf included) affect neither results nor gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from teamtr.theory.gain import LOG_RATIO_BOUND
from teamtr.theory.objective import AverageOver, Objective


@dataclass(frozen=True)
class Surrogate:
    """A sum and what to divide it by, so that micro-batches add up exactly.

    The surrogate of a batch is (sum of ``total``) / (sum of ``denominator``) over its micro-batches; its ratio
    clip rate (app:diagnostics) is (sum of ``clipped``) / (sum of ``ratios``). ``ratios`` counts the ratios, of messages
    or tokens by ``objective.ratio``; ``denominator`` counts what is averaged, by ``objective.average_over``. All of
    them stay on the device: reading one synchronizes.
    """

    total: Tensor
    denominator: Tensor
    clipped: Tensor
    ratios: Tensor


def message_log_ratio(logp_new_MT: Tensor, logp_cur_MT: Tensor, mask_MT: Tensor) -> Tensor:
    """log w(m; s) = sum over tokens of log new - log cur, one per message (the ratio above eq:ppo_obj)."""
    return _token_log_ratio(logp_new_MT, logp_cur_MT, mask_MT).sum(dim=-1)


def clipped_surrogate(
    logp_new_MT: Tensor,
    logp_cur_MT: Tensor,
    mask_MT: Tensor,
    advantages: Tensor,
    objective: Objective,
    weights_M: Tensor | None = None,
) -> Surrogate:
    """The first term of eq:ppo_obj, min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), as a sum to be maximized.

    ``objective.ratio`` defines w: "message" is the product of the message's token ratios (the paper),
    "length_normalized" their geometric mean, "token" each token's own ratio (PPO, GRPO, DAPO).
    ``objective.average_over`` defines the weights of messages: "messages" weights all equally (with "token": the mean
    over a message's tokens first, as in GRPO), "tokens" by their number of tokens (DAPO).

    ``advantages`` hold one number per message (M), or with the ratio "token" one per token (M x T, from a critic).
    ``weights_M`` multiplies each message's term and does not enter the denominator: plain importance weighting
    (app:exp:isdeg), unbiased, not self-normalized. A row without a real token is padding and is not counted.
    """
    token_log_ratio_MT = _token_log_ratio(logp_new_MT, logp_cur_MT, mask_MT)
    lengths_M = mask_MT.sum(dim=-1)
    spoken_M = lengths_M > 0
    if advantages.ndim == 2:
        advantages = _per_token(advantages, token_log_ratio_MT, mask_MT, objective)
    else:
        advantages = _per_message("advantages_M", advantages, token_log_ratio_MT, spoken_M)

    match objective.ratio:
        case "token":
            log_ratio, counted = token_log_ratio_MT, mask_MT
            advantages = advantages if advantages.ndim == 2 else advantages[:, None]
        case "message":
            log_ratio, counted = token_log_ratio_MT.sum(dim=-1), spoken_M
        case "length_normalized":
            log_ratio, counted = token_log_ratio_MT.sum(dim=-1) / lengths_M.clamp(min=1), spoken_M

    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    ratio = _bounded(log_ratio).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    gain = torch.where(counted, gain, torch.zeros_like(gain))

    match objective.ratio, objective.average_over:
        case "token", "messages":
            gain_M = gain.sum(dim=-1) / lengths_M.clamp(min=1)
        case "token", "tokens":
            gain_M = gain.sum(dim=-1)
        case _, "messages":
            gain_M = gain
        case _, "tokens":
            gain_M = gain * lengths_M
    if weights_M is not None:
        gain_M = gain_M * _per_message("weights_M", weights_M, token_log_ratio_MT, spoken_M)

    outside = (ratio < low) | (ratio > high)  # never at padding, whose ratio is 1
    return Surrogate(
        total=gain_M.sum(),
        denominator=(lengths_M if objective.average_over == "tokens" else spoken_M).sum(),
        clipped=outside.sum(),
        ratios=counted.sum(),
    )


def reference_kl(logp_new_MT: Tensor, logp_ref_MT: Tensor, mask_MT: Tensor, average_over: AverageOver) -> Tensor:
    """GRPO's penalty (arXiv 2402.03300, eq. 3 and 4) as a sum, to be divided by ``surrogate_denominator``.

    exp(d) - d - 1 with d = log ref - log new of each token: unbiased for KL(new || ref) under samples from new, never
    negative beyond rounding, and 0 for equal policies. ``average_over`` as in ``clipped_surrogate``: "messages" takes
    the mean over a message's tokens first. d is clamped to ``LOG_RATIO_BOUND``.
    """
    d_MT = _bounded(_token_log_ratio(logp_ref_MT, logp_new_MT, mask_MT))
    kl_M = (torch.expm1(d_MT) - d_MT).sum(dim=-1)
    return (kl_M if average_over == "tokens" else kl_M / mask_MT.sum(dim=-1).clamp(min=1)).sum()


def surrogate_denominator(lengths_M: ArrayLike, average_over: AverageOver) -> float:
    """The denominator of ``clipped_surrogate``, from message lengths alone.

    Gradient accumulation needs it for the whole minibatch before the backward pass of the first micro-batch.
    """
    lengths = np.asarray(lengths_M)
    return float(lengths.sum()) if average_over == "tokens" else float((lengths > 0).sum())


def _bounded(log_ratio: Tensor) -> Tensor:
    """``bound_log_ratio`` for tensors, differentiable."""
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.where(torch.isfinite(log_ratio), bounded, torch.full_like(log_ratio, torch.nan))


def _token_log_ratio(logp_new_MT: Tensor, logp_cur_MT: Tensor, mask_MT: Tensor) -> Tensor:
    """log new - log cur per token, 0 at padding, in float32 or better."""
    if logp_new_MT.ndim != 2 or not logp_new_MT.shape == logp_cur_MT.shape == mask_MT.shape:
        raise ValueError(
            "logp_new_MT, logp_cur_MT and mask_MT must have one and the same M x T shape, got "
            f"{tuple(logp_new_MT.shape)}, {tuple(logp_cur_MT.shape)} and {tuple(mask_MT.shape)}"
        )
    if mask_MT.dtype != torch.bool:
        raise TypeError(f"mask_MT must be boolean, True at real tokens, got {mask_MT.dtype}")
    # Half precision cannot hold a sum over a message: exp(12) already overflows float16.
    difference_MT = _at_least_float32(logp_new_MT) - _at_least_float32(logp_cur_MT)
    # `where` before anything nonlinear: multiplying by the mask would turn padding into nan (0 * inf), and a `where`
    # after exp would still leak nan into the gradient.
    return torch.where(mask_MT, difference_MT, torch.zeros_like(difference_MT))


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _per_message(name: str, values_M: Tensor, like: Tensor, spoken_M: Tensor) -> Tensor:
    """One number per message in the ratio's dtype, 0 in padding rows."""
    if values_M.shape != spoken_M.shape:
        raise ValueError(f"{name} must hold one number per message ({spoken_M.shape[0]}), got {tuple(values_M.shape)}")
    values_M = values_M.to(like)
    return torch.where(spoken_M, values_M, torch.zeros_like(values_M))


def _per_token(values_MT: Tensor, like: Tensor, mask_MT: Tensor, objective: Objective) -> Tensor:
    """One number per token in the ratio's dtype, 0 at padding."""
    if objective.ratio != "token":
        raise ValueError(f'advantages per token need the ratio "token", not "{objective.ratio}"')
    if values_MT.shape != mask_MT.shape:
        raise ValueError(
            f"advantages_MT must hold one number per token ({tuple(mask_MT.shape)}), got {tuple(values_MT.shape)}"
        )
    values_MT = values_MT.to(like)
    return torch.where(mask_MT, values_MT, torch.zeros_like(values_MT))
