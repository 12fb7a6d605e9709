"""What an update did: a policy beside the one that was frozen before it, on the same messages."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teamtr.engines.passes import Passes, Reference, packed, packed_ids
from teamtr.engines.scoring import token_logp
from teamtr.engines.transfer import send
from teamtr.theory.kl import kl_k3, per_message_sum
from teamtr.theory.verification import chance_so_far, kept_tokens
from teamtr.types import Divergence, Floats, TokenShift, Verified

SHIFT_RANKS = 20
"""Tokens told apart by ``token_shift``."""


@torch.no_grad()
def measure(passes: Passes, reference: Reference, rows: NDArray[np.int64] | None = None) -> Divergence:
    """How far the policy is from the frozen one on these messages, or on all."""
    chosen = np.arange(len(reference.batch)) if rows is None else rows
    kl_N, cur_N, new_N = passes.fitting(lambda: _measure(passes, reference, chosen))
    lengths_M = reference.batch.lengths_M[chosen]
    ratio_M = per_message_sum(new_N - cur_N, lengths_M)
    reference_M = None
    if reference.initial is not None:
        initial_N = packed(reference.initial, chosen).double().cpu().numpy()
        reference_M = per_message_sum(kl_k3(new_N, initial_N), lengths_M)
    return Divergence(
        full_M=per_message_sum(kl_N, lengths_M),
        k1_M=-ratio_M,
        k3_M=per_message_sum(kl_k3(cur_N, new_N), lengths_M),
        log_ratio_M=ratio_M,
        reference_M=reference_M,
    )


@torch.no_grad()
def token_kls(passes: Passes, reference: Reference) -> list[Floats]:
    """The KL at every position, per message."""
    kl_N, _, _ = passes.fitting(lambda: _measure(passes, reference, np.arange(len(reference.batch))))
    return np.split(kl_N, np.cumsum(reference.batch.lengths_M)[:-1])


def _measure(passes: Passes, reference: Reference, rows: NDArray[np.int64]) -> list[Floats]:
    """Packed KLs and both log-probabilities, in the order of ``rows``."""
    order: list[int] = []
    pieces: list[tuple[Tensor, ...]] = []
    place = {int(row): k for k, row in enumerate(rows)}
    for part in passes.micro_batches(reference.batch, rows):
        with passes.policy.computing():
            scored = passes.score(reference, part)
        order.extend(place[int(i)] for i in part)
        cur_N = packed(reference.logp, part)
        pieces.extend(zip(*(x.split(scored.lengths) for x in (scored.kl_N, cur_N, scored.logp_N)), strict=True))
    back = np.argsort(order)
    return [torch.cat([pieces[k][axis] for k in back]).double().cpu().numpy() for axis in range(3)]


@torch.no_grad()
def verify(passes: Passes, reference: Reference, noise_N: Floats, noise_M: Floats) -> Verified:
    """How much of each message the policy may keep, and what it says instead of the rest's first token."""
    return passes.fitting(lambda: _verify(passes, reference, noise_N, noise_M))


def _verify(passes: Passes, reference: Reference, noise_N: Floats, noise_M: Floats) -> Verified:
    batch = reference.batch
    noise = np.split(noise_N, np.cumsum(batch.lengths_M)[:-1])
    kept_M, next_M = np.zeros(len(batch), dtype=np.int64), np.full(len(batch), -1, dtype=np.int64)
    for rows in passes.micro_batches(batch, np.arange(len(batch))):
        part = batch.rows(rows)
        lengths = part.lengths_M.tolist()
        with passes.policy.computing():
            new_NH, head = passes.features(part), passes.policy.head()
            cur_NH = packed(reference.features, rows)
            ids_N = packed_ids(part, new_NH.device)
            logp_N = torch.cat([token_logp(head(h), t) for h, t in passes.chunks(head, new_NH, ids_N)])
            ratio_N = (logp_N - packed(reference.logp, rows)).double().cpu().numpy()
            chances = [chance_so_far(ratio) for ratio in np.split(ratio_N, np.cumsum(lengths)[:-1])]
            chance_N = send(np.concatenate([chance[:-1] for chance in chances]), new_NH.device)
            draw_N = send(np.repeat(noise_M[rows], lengths), new_NH.device)
            pieces = [
                _rest(head(new), reference.head(cur), chance, draw)
                for new, cur, chance, draw in passes.chunks(head, new_NH, cur_NH, chance_N, draw_N)
            ]
        rest_N, token_N = (torch.cat(x).cpu().numpy() for x in zip(*pieces, strict=True))
        cuts = np.cumsum(lengths)[:-1]
        for row, chance, rest, tokens in zip(
            rows, chances, np.split(rest_N.astype(np.float64), cuts), np.split(token_N, cuts), strict=True
        ):
            kept_M[row] = kept_tokens(chance, rest, noise[row])
            if kept_M[row] < len(rest):
                next_M[row] = tokens[kept_M[row]]
    return Verified(kept_M, next_M)


@torch.no_grad()
def token_shift(passes: Passes, reference: Reference) -> TokenShift:
    """How far probabilities moved, by rank of a token under the frozen policy."""
    sums: Tensor | None = None
    positions = 0
    for part in passes.micro_batches(reference.batch, np.arange(len(reference.batch))):
        with passes.policy.computing():
            new_NH = passes.features(reference.batch.rows(part))
            cur_NH = packed(reference.features, part)
            head = passes.policy.head()
            for new, cur in passes.chunks(head, new_NH, cur_NH):
                part_sums = _shift_sums(reference.head(cur), head(new))
                sums = part_sums if sums is None else sums + part_sums
                positions += len(new)
    assert sums is not None, "begin needs at least one message"
    mean = (sums / positions).double().cpu().numpy()
    before_R, after_R, moved_R = mean[:-1].reshape(3, -1)
    return TokenShift(before_R, after_R, moved_R, flipped=float(mean[-1]), positions=positions)


def _shift_sums(logits_cur_NV: Tensor, logits_new_NV: Tensor) -> Tensor:
    """Sums over positions: probability before, after and change of log-probability by rank, then flips; one row."""
    cur_NV, new_NV = logits_cur_NV.log_softmax(-1), logits_new_NV.log_softmax(-1)
    ranks = min(SHIFT_RANKS, cur_NV.shape[-1])
    top_NR, place_NR = cur_NV.topk(ranks, dim=-1)
    then_NR = new_NV.gather(-1, place_NR)
    before_NR, after_NR = top_NR.exp(), then_NR.exp()
    rest = [(1.0 - x.sum(-1, keepdim=True)).clamp(min=1e-12) for x in (before_NR, after_NR)]
    moved_NR = torch.cat([(then_NR - top_NR).abs(), (rest[1].log() - rest[0].log()).abs()], -1)
    flips = (new_NV.argmax(-1) != place_NR[:, 0]).sum()[None]
    by_rank = [torch.cat([before_NR, rest[0]], -1), torch.cat([after_NR, rest[1]], -1), moved_NR]
    return torch.cat([*(x.double().sum(0) for x in by_rank), flips.double()])


def _rest(logits_new_NV: Tensor, logits_cur_NV: Tensor, chance_N: Tensor, draw_N: Tensor) -> tuple[Tensor, Tensor]:
    """What the new policy says too seldom at each position, in all, and a token drawn from it; see
    ``theory.verification``."""
    chance_N1 = chance_N[:, None].to(logits_new_NV.dtype)
    rest_NV = (chance_N1 * logits_new_NV.softmax(-1) - logits_cur_NV.softmax(-1)).clamp(min=0.0)
    total_N = rest_NV.sum(-1)
    below_NV = rest_NV.cumsum(-1)
    wanted_N1 = (draw_N.to(below_NV.dtype) * below_NV[:, -1])[:, None]
    token_N = torch.searchsorted(below_NV, wanted_N1, right=True).squeeze(-1)
    beyond_N = token_N >= rest_NV.shape[-1]  # rounding: the last sum was not above what was wanted
    return total_N, torch.where(beyond_N, rest_NV.argmax(-1), token_N)
