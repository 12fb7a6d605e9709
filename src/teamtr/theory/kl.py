"""The KL from the policy before an update (cur) to the policy after it (new): exact, sampled, discounted, bounded.

The paper calls this one object reverse (app:tokenkl), forward (near eq:emp_tok_kl) and behaviour-to-updated
(sec:theory:kl). Here the name gives the order of the arguments: ``kl_cur_to_new`` is KL(cur || new), an expectation
under cur, which wrote the messages. Units are nats; a message's KL is the sum over its tokens (lem:chainrule).
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from teamtr.types import Floats

Array = TypeVar("Array", Floats, Tensor)


def kl_cur_to_new(logits_cur_NV: Tensor, logits_new_NV: Tensor, logp_new_NV: Tensor | None = None) -> Tensor:
    """Full-vocabulary KL(cur || new) at each position, exact given the prefixes (eq:token_chain_rule, app:impl).

    Computed and returned in the input's dtype; differentiable once, which keeps only two arrays of its inputs' size.
    ``logp_new_NV``: ``log_softmax`` of the new logits, if the caller has it; no gradient flows through it.
    Exactly 0, with an exactly zero gradient, for equal logits. A logit may be -inf (a forbidden token): if forbidden
    in both it contributes nothing; if forbidden only in new the KL is inf, as it should be.

    The textbook sum of p (log p - log q) is a small difference of large terms: in float32 its error is 1e-7 to
    1e-6 a position, whatever the step, and after clamping at 0 that noise adds up over a message. We sum
    p (exp(d) - 1 - d) with d = log q - log p instead. It is the same number, because the probabilities sum to one
    on both sides, but every term is at least 0 and of second order in d, so that the KL of a small step falls with
    the square of the step down to 1e-12.
    """
    if logits_cur_NV.shape != logits_new_NV.shape:
        raise ValueError(
            f"kl_cur_to_new: logits of one shape are needed, got {tuple(logits_cur_NV.shape)} for cur "
            f"and {tuple(logits_new_NV.shape)} for new"
        )
    known = None if logp_new_NV is None else logp_new_NV.detach()
    result: Tensor = _KlCurToNew.apply(logits_cur_NV, logits_new_NV, known)
    return result


class _KlCurToNew(torch.autograd.Function):
    """With a manual gradient: q - p for the new logits. Autograd would keep eight vocabulary-sized arrays."""

    @staticmethod
    def forward(ctx: Any, logits_cur: Tensor, logits_new: Tensor, logp_new: Tensor | None) -> Tensor:
        logp_cur = logits_cur.log_softmax(dim=-1)
        if logp_new is None:
            logp_new = logits_new.log_softmax(dim=-1)
        p_cur = logp_cur.exp()
        d = logp_new - logp_cur
        terms = p_cur * (torch.expm1(d) - d) if _all_near(p_cur, d) else _terms_anywhere(logp_new, p_cur, d)
        kl = terms.sum(dim=-1)
        # Rounding of expm1(d) - d can fall below 0 by one unit in the last place of d.
        kl = kl.clamp(min=0.0)
        ctx.save_for_backward(logp_cur, logp_new, kl)
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        logp_cur, logp_new, kl = ctx.saved_tensors
        p_cur = logp_cur.exp()
        grad_cur = grad_new = None
        if ctx.needs_input_grad[0]:
            log_ratio = torch.where(p_cur != 0, logp_cur - logp_new, 0.0)
            grad_cur = grad[..., None] * p_cur * (log_ratio - kl[..., None])
        if ctx.needs_input_grad[1]:
            grad_new = grad[..., None] * (logp_new.exp() - p_cur)
        return grad_cur, grad_new, None


def _all_near(p_cur: Tensor, d: Tensor) -> bool:
    """Whether every token has mass in cur and a small d, as in nearly every step. Always False on a GPU, where reading
    the answer would force a synchronization."""
    if d.device.type != "cpu" or d.numel() == 0:
        return False
    return bool(p_cur.amin() > 0.0) and bool(d.abs().amax() < 1.0)  # False if any is nan


def _terms_anywhere(logp_new: Tensor, p_cur: Tensor, d: Tensor) -> Tensor:
    """The terms for any d. Far from 0, expm1(d) may overflow but p exp(d) = q cannot; tokens without mass in cur
    contribute q."""
    has_mass = p_cur != 0
    d = torch.where(has_mass, d, 0.0)  # -inf - -inf is nan
    near = has_mass & (d.abs() < 1.0)
    return torch.where(near, p_cur * (torch.expm1(d) - d), logp_new.exp() - p_cur * (1.0 + d))


def kl_k1(logp_cur: Array, logp_new: Array) -> Array:
    """log cur - log new of each sampled token: the paper's estimate, eq:emp_tok_kl.

    Unbiased under samples from cur, of either sign, and mostly noise at small radii.
    """
    return logp_cur - logp_new


def kl_k3(logp_cur: Array, logp_new: Array) -> Array:
    """exp(d) - 1 - d with d = log new - log cur of each sampled token.

    Unbiased like ``kl_k1`` under samples from cur, because E[exp(d)] = 1, and never negative beyond rounding.
    """
    d = logp_new - logp_cur
    if isinstance(d, Tensor):
        return torch.expm1(d) - d
    return np.expm1(d) - d


def per_message_sum(values_N: ArrayLike, lengths_M: ArrayLike) -> Floats:
    """Sum packed token values over each message, in order (lem:chainrule); 0 for a message of length 0."""
    values = np.asarray(values_N, dtype=np.float64)
    lengths = np.asarray(lengths_M, dtype=np.int64)
    if values.ndim != 1 or lengths.ndim != 1 or (lengths < 0).any() or int(lengths.sum()) != len(values):
        raise ValueError(
            f"per_message_sum: the lengths (sum {int(lengths.sum())}) must be at least 0 and add up to the "
            f"number of token values ({values.shape})"
        )
    message_N = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(message_N, weights=values, minlength=len(lengths)).astype(np.float64)


def pairwise_sum_per_message(values_N: Floats, lengths_M: NDArray[np.int64]) -> Floats:
    """The same sums with numpy's pairwise summation, bit-identical to ``values.sum()`` of each message. Messages of
    equal length are summed together."""
    starts_M, total_M = np.cumsum(lengths_M) - lengths_M, np.zeros(len(lengths_M))
    for length in np.unique(lengths_M):
        own = np.flatnonzero(lengths_M == length)
        total_M[own] = values_N[starts_M[own][:, None] + np.arange(length)].sum(axis=1)
    return total_M


def discounted_kl(kl_M: ArrayLike, turn_M: ArrayLike, episode_M: ArrayLike, gamma: float, episodes: int) -> float:
    """The discounted functional of def:kltok, estimated as in app:eq:emp_tok_kl.

    Mean over ALL ``episodes`` of (1 - gamma) * sum over the agent's turns t of gamma**t * KL; turns of other
    agents, and episodes in which this agent never spoke, contribute zero. ``kl_M`` must be exact
    (``kl_cur_to_new`` summed over the message) for the estimate to be unbiased.

    At gamma = 1 the factor 1 - gamma would make the result 0 for any two policies. We return the finite-horizon analog
    instead: the mean over episodes of the plain sum, which is the KL between the two laws of an episode.
    """
    kl, turn, episode = np.asarray(kl_M, np.float64), np.asarray(turn_M, np.int64), np.asarray(episode_M, np.int64)
    if not kl.shape == turn.shape == episode.shape:
        raise ValueError(
            f"discounted_kl: one KL, turn and episode per message, got {kl.shape}, {turn.shape} and {episode.shape}"
        )
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"discounted_kl: gamma must be in [0, 1], got {gamma}")
    if episodes < 1 or (episode < 0).any() or (episode >= episodes).any() or (turn < 0).any():
        raise ValueError(
            f"discounted_kl: turns must be at least 0 and episode numbers within the {episodes} episodes of the batch"
        )
    scale = 1.0 - gamma if gamma < 1.0 else 1.0
    return float(scale * np.sum(float(gamma) ** turn * kl) / episodes)


def per_token(kl_M: ArrayLike, lengths_M: ArrayLike, weights_M: ArrayLike | None = None) -> float:
    """Mean over messages of the KL per token, E[A(m)] of lem:avgvssum, in nats per token; optionally weighted."""
    kl, lengths = np.asarray(kl_M, dtype=np.float64), np.asarray(lengths_M, dtype=np.int64)
    if kl.shape != lengths.shape or kl.size == 0 or (lengths < 1).any():
        raise ValueError(
            "per_token: at least one message, each of at least one token, is needed (the end token counts); got "
            f"{kl.shape} KLs and lengths {lengths.tolist() if lengths.size <= 8 else f'from {lengths.min()}'}"
        )
    weights = None if weights_M is None else np.asarray(weights_M, dtype=np.float64)
    return float(np.average(kl / lengths, weights=weights))


def radius_per_message(radius_per_token: float, t_max: int) -> float:
    """The radius in nats per message that a radius in nats per token implies, T_max * radius (lem:avgvssum).

    One way only: a step within the token radius is within this message radius. The reverse does not hold.
    """
    if not radius_per_token >= 0.0 or t_max < 1:
        raise ValueError(
            "radius_per_message: the radius must be at least 0 and the longest message at least one token, "
            f"got {radius_per_token} and {t_max}"
        )
    return t_max * radius_per_token
