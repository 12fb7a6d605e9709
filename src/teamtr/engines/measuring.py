"""Measures an update: the current policy against the one frozen before it, on the same messages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from teamtr.answers import Divergence, TokenShift
from teamtr.batches import Verified
from teamtr.engines.passes import Passes, Reference, packed, packed_ids
from teamtr.engines.scoring import token_logp
from teamtr.engines.shards import Rows
from teamtr.engines.transfer import send
from teamtr.theory.kl import kl_k3, per_message_sum
from teamtr.theory.verification import chance_so_far, kept_tokens
from teamtr.types import Floats, Ids

SHIFT_RANKS = 20
"""How many ranks ``token_shift`` reports one by one."""


@torch.no_grad()
def measure(passes: Passes, reference: Reference, rows: Rows | None = None) -> Divergence:
    """Divergence of the current policy from the frozen one on these messages (all if None)."""
    chosen = np.arange(len(reference.batch)) if rows is None else rows
    kl_N, new_N = _measure(passes, reference, chosen)
    cur_N = packed(reference.logp, chosen).double().cpu().numpy()
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
    kl_N, _ = _measure(passes, reference, np.arange(len(reference.batch)))
    return np.split(kl_N, np.cumsum(reference.batch.lengths_M)[:-1])


def _measure(passes: Passes, reference: Reference, rows: Rows) -> tuple[Floats, Floats]:
    """Packed KLs and current log-probabilities, in the order of ``rows``."""
    batch = reference.batch
    own = passes.fitting(lambda: _measure_own(passes, reference, rows))
    sizes_R = 2 * batch.lengths_M[rows]
    found = passes.shards.complete(own, batch, rows, sizes_R)
    both_N2 = torch.cat(found).double().cpu().numpy().reshape(-1, 2)
    kl_N, new_N = np.ascontiguousarray(both_N2.T)
    return kl_N, new_N


def _measure_own(passes: Passes, reference: Reference, rows: Rows) -> dict[int, Tensor]:
    """KL and log-probability of each token, for each row of this process's shards."""
    found: dict[int, Tensor] = {}
    parts = passes.own_parts(reference.batch, rows)
    with passes.in_step(len(parts)), passes.over(len(parts)) as work:
        for part in parts:
            with passes.policy.computing():
                scored = passes.score(reference, part)
            both_N2 = torch.stack([scored.kl_N, scored.logp_N], dim=1)
            pieces = both_N2.flatten().split([2 * length for length in scored.lengths])
            found.update(zip(part.tolist(), pieces, strict=True))
            work.advance()
    return found


@torch.no_grad()
def verify(passes: Passes, reference: Reference, noise_N: Floats, noise_M: Floats) -> Verified:
    """How many tokens of each message the current policy may keep, and the token that follows them."""
    own, batch = passes.fitting(lambda: _verify(passes, reference, noise_N, noise_M)), reference.batch
    rows = np.arange(len(batch))
    found = passes.shards.complete(own, batch, rows, np.full(len(batch), 2))
    kept_M, next_M = torch.stack(found).numpy().T
    return Verified(kept_M, next_M)


def _verify(passes: Passes, reference: Reference, noise_N: Floats, noise_M: Floats) -> dict[int, Tensor]:
    """For each row of this process's shards: how many tokens are kept, and the token that follows them (-1 if all are
    kept)."""
    batch, found = reference.batch, {}
    noise = np.split(noise_N, np.cumsum(batch.lengths_M)[:-1])
    parts = passes.own_parts(batch, np.arange(len(batch)))
    with passes.in_step(len(parts)):
        for rows in parts:
            for row, chance, rest, tokens in _chances(passes, reference, rows, noise_M):
                kept = kept_tokens(chance, rest, noise[row])
                found[row] = torch.tensor([kept, int(tokens[kept]) if kept < len(rest) else -1])
    return found


def _chances(
    passes: Passes, reference: Reference, rows: Rows, noise_M: Floats
) -> Iterator[tuple[int, Floats, Floats, Ids]]:
    """For each row: p_0 ... p_L, r_0 ... r_(L-1), and for each token the one that would replace it."""
    part = reference.batch.rows(rows)
    lengths, cuts = part.lengths_M.tolist(), np.cumsum(part.lengths_M)[:-1]
    with passes.policy.computing():
        new_NH, head = passes.features(part), passes.policy.head()
        cur_NH = packed(reference.features, rows)
        ids_N = packed_ids(part, new_NH.device)
        logp_N = torch.cat([token_logp(head(h), t) for h, t in passes.chunks(reference.batch, head, new_NH, ids_N)])
        ratio_N = (logp_N - packed(reference.logp, rows)).double().cpu().numpy()
        chances = [chance_so_far(ratio) for ratio in np.split(ratio_N, cuts)]
        chance_N = send(np.concatenate([chance[:-1] for chance in chances]), new_NH.device)
        draw_N = send(np.repeat(noise_M[rows], lengths), new_NH.device)
        pieces = [
            _rest(head(new), reference.head(cur), chance, draw)
            for new, cur, chance, draw in passes.chunks(reference.batch, head, new_NH, cur_NH, chance_N, draw_N)
        ]
    rest_N, token_N = (torch.cat(x).cpu().numpy() for x in zip(*pieces, strict=True))
    return zip(rows.tolist(), chances, np.split(rest_N.astype(np.float64), cuts), np.split(token_N, cuts), strict=True)


@torch.no_grad()
def token_shift(passes: Passes, reference: Reference) -> TokenShift:
    """How far probabilities moved, by the token's rank under the frozen policy."""
    batch, shards = reference.batch, passes.shards
    assert len(batch), "begin needs at least one message"
    rows, positions = np.arange(len(batch)), int(batch.lengths_M.sum())
    own: dict[int, list[Tensor]] = {}
    by_part = [(shard, part) for shard, parts in passes.own_shards(batch, rows) for part in parts]
    with passes.in_step(len(by_part)):
        for shard, part in by_part:
            found = _shift(passes, reference, part)
            own[shard] = [own[shard][0] + found] if shard in own else [found]
    vocabulary = reference.head(next(x for x in reference.features if len(x))[:1]).shape[-1] if own else 0
    ranks = int(-shards.least(-float(min(SHIFT_RANKS, vocabulary))))
    some = next(iter(passes.policy.parameters().values()))
    like = some.new_zeros(3 * (ranks + 1) + 1, dtype=torch.float64)
    (sums,) = shards.added(own, [shard for shard, _ in shards.split(batch, rows)], [like])
    mean = (sums / positions).cpu().numpy()
    before_R, after_R, moved_R = mean[:-1].reshape(3, -1)
    return TokenShift(before_R, after_R, moved_R, flipped=float(mean[-1]), positions=positions)


def _shift(passes: Passes, reference: Reference, part: Rows) -> Tensor:
    """The sums over one micro-batch."""
    with passes.policy.computing():
        new_NH = passes.features(reference.batch.rows(part))
        cur_NH = packed(reference.features, part)
        head = passes.policy.head()
        chunks = passes.chunks(reference.batch, head, new_NH, cur_NH)
        pieces = [_shift_sums(reference.head(cur), head(new)) for new, cur in chunks]
    return torch.stack(pieces).sum(0)


def _shift_sums(logits_cur_NV: Tensor, logits_new_NV: Tensor) -> Tensor:
    """Sums over positions, as one vector: probability before, probability after and change of log-probability by rank,
    then flips."""
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
    """Total of max(0, p_i q - p) over tokens at each position, and a token drawn from it; see
    ``theory.verification``."""
    chance_N1 = chance_N[:, None].to(logits_new_NV.dtype)
    rest_NV = (chance_N1 * logits_new_NV.softmax(-1) - logits_cur_NV.softmax(-1)).clamp(min=0.0)
    total_N = rest_NV.sum(-1)
    below_NV = rest_NV.cumsum(-1)
    wanted_N1 = (draw_N.to(below_NV.dtype) * below_NV[:, -1])[:, None]
    token_N = torch.searchsorted(below_NV, wanted_N1, right=True).squeeze(-1)
    beyond_N = token_N >= rest_NV.shape[-1]  # rounding: the last sum did not exceed the target
    return total_N, torch.where(beyond_N, rest_NV.argmax(-1), token_N)
