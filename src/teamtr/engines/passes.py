"""Passes of a policy over a batch, in micro-batches that fit into memory, and the policy frozen on a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teamtr.batches import AgentBatch
from teamtr.engines.policy import Head, Policy, Recompute
from teamtr.engines.scoring import score_features, scores_in_half, token_logp
from teamtr.engines.shards import Rows, Shards
from teamtr.engines.slices import is_spread
from teamtr.engines.transfer import send
from teamtr.errors import UserError
from teamtr.progress import Work, working
from teamtr.types import Floats, Ids

Result = TypeVar("Result")

WHOLE = Shards()
NOTHING: Mapping[int, Tensor] = MappingProxyType({})
ANYTHING = np.zeros(1, dtype=np.int32)
"""A placeholder message of one token."""

NO_ROOM = ("_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDA error: out of memory")
"""Parts of the messages of GPU libraries that mean out of memory."""

MOST_TIMES = 8
"""Maximum number of rows per pass, as a multiple of ``micro_batch``, however short they are: values of their tokens are
padded to the longest message of the pass."""

HEAD_CHUNK_ELEMENTS = 16_000_000
"""Logits held at once on a CPU: chunk of positions x vocabulary."""
HEAD_CHUNK_SHARE = 0.03
"""Share of a card's memory for the same. If there are several chunks, each is recomputed for the gradient."""
LEAN = 16 / 10
"""Positions that fit, as a multiple, if output layer and score are fused: plans count 16 bytes per logit, and the fused
path holds 10 (``scoring.fused_features``: the logits of both policies in float32, their gradient in float16)."""


@dataclass(frozen=True)
class Reference:
    """A frozen policy on one batch: features per message token of this process's rows, its head, and its token
    log-probabilities. ``initial``: those of the policy that the learner began with, if requested; ``values``: those of
    the critic, if there is one."""

    batch: AgentBatch
    features: list[Tensor]
    head: Head
    logp: list[Tensor]
    initial: list[Tensor] | None = None
    values: list[Tensor] | None = None


@dataclass(frozen=True)
class Scored:
    """Token log-probabilities and per-position KL of some rows, packed, with each message's length."""

    logp_N: Tensor
    kl_N: Tensor
    lengths: list[int]


class Passes:
    """Forward passes of one agent's policy: micro-batches of messages, chunks of the head, and token counts. When
    memory runs out, micro-batches are lowered for good; at one message, activations are recomputed unless
    ``recompute`` forbids it. Only the rows of this process's shards are computed; results for other rows come from
    other processes."""

    def __init__(
        self, agent: str, policy: Policy, micro_batch: int, shards: Shards = WHOLE, recompute: Recompute = "auto"
    ) -> None:
        self.agent = agent
        self.policy = policy
        self.micro_batch = micro_batch
        self.shards = shards
        self.recompute = recompute
        self.tokens = {"scored": 0, "trained": 0}
        if recompute == "always" and not policy.recomputes and not policy.recompute_activations():
            raise UserError(
                f"agent {agent!r}: learner.recompute: always, but its architecture cannot recompute activations; "
                "use auto"
            )

    @property
    def may_recompute(self) -> bool:
        """Whether activations may be recomputed if needed. Not in lockstep: partitioned layers are no longer gathered
        in the backward pass."""
        return self.recompute != "never" and not self.shards.lockstep and self.policy.can_recompute

    def freeze(self, batch: AgentBatch, found: Mapping[int, Tensor] = NOTHING) -> Reference:
        """Freezes the current policy on this batch. ``found``: features of rows of this process that were already
        computed with the same weights; only the other rows are passed through the model."""
        own = self.fitting(lambda: self._freeze(batch, found))
        return replace(own, logp=self.of_all_rows(dict(enumerate(own.logp)), batch))

    def of_all_rows(self, own: Mapping[int, Tensor], batch: AgentBatch) -> list[Tensor]:
        """Values for every token of every message, each from the process that computed them."""
        return self.shards.complete(own, batch, np.arange(len(batch)), batch.lengths_M)

    @torch.no_grad()
    def _freeze(self, batch: AgentBatch, found: Mapping[int, Tensor]) -> Reference:
        head = self.policy.frozen_head()
        empty = torch.zeros(0)
        features, logp = [empty] * len(batch), [empty] * len(batch)

        def score(rows: Rows, part: AgentBatch, hidden_NH: Tensor) -> None:
            ids_N = packed_ids(part, hidden_NH.device)
            logp_N = torch.cat([token_logp(head(h), t) for h, t in self.chunks(batch, head, hidden_NH, ids_N)])
            lengths = part.lengths_M.tolist()
            for row, own, own_logp in zip(rows, hidden_NH.split(lengths), logp_N.split(lengths), strict=True):
                features[row], logp[row] = found.get(int(row), own), own_logp

        found_M = np.isin(np.arange(len(batch)), list(found))
        parts = self.own_parts(batch, np.flatnonzero(~found_M))
        with self.in_step(len(parts)), self.over(len(parts)) as work:
            for rows in parts:
                part = batch.rows(rows)
                with self.policy.computing():
                    score(rows, part, self.features(part))
                work.advance()
        for rows in self.own_parts(batch, np.flatnonzero(found_M)):
            with self.policy.computing():
                score(rows, batch.rows(rows), torch.cat([found[int(row)] for row in rows]))
        return Reference(batch, features, head, logp)

    def score(self, reference: Reference, rows: Rows) -> Scored:
        """Scores some rows with the current policy, next to the frozen one."""
        part = reference.batch.rows(rows)
        hidden_NH = self.features(part)
        head = self.policy.head()
        cur_NH = packed(reference.features, rows)
        ids_N = packed_ids(part, hidden_NH.device)

        pieces = []
        lean = scores_in_half(head) and scores_in_half(reference.head)
        for new, cur, ids in self.chunks(reference.batch, head, hidden_NH, cur_NH, ids_N, lean=lean):
            keep = len(new) == len(hidden_NH)  # with several chunks, all their logits would be held at once
            pieces.append(score_features(head, reference.head, new, cur, ids, keep=keep))
        logp_N, kl_N = pieces[0] if len(pieces) == 1 else (torch.cat(x) for x in zip(*pieces, strict=True))
        return Scored(logp_N, kl_N, part.lengths_M.tolist())

    def features(self, part: AgentBatch) -> Tensor:
        kind = "trained" if torch.is_grad_enabled() else "scored"
        self.tokens[kind] += int(part.sizes_M.sum())
        return self.policy.features(part.prompts, part.messages)

    def chunks(
        self, batch: AgentBatch, head: Head, *tensors: Tensor, lean: bool = False
    ) -> Iterator[tuple[Tensor, ...]]:
        """Splits positions into chunks whose logits fit into memory: at most as many as ``micro_batch`` of the batch's
        longest messages have, because the memory plan counts that many. A pass that is filled by tokens may have more
        if prompts are short. ``lean``: chunks are only read by ``score_features``, with both heads in half precision,
        where ``LEAN`` times as many take the planned memory."""
        with torch.no_grad():
            vocabulary = head(tensors[0][:1]).shape[-1]
        planned = self.micro_batch * int(batch.lengths_M.max())
        size = max(1, min(head_chunk(self.policy.device, vocabulary), planned))
        if lean:
            size = int(size * LEAN)
        if len(tensors[0]) <= size:
            return iter([tensors])  # unsplit, so that gradients do not pass through a split into one chunk
        return zip(*(t.split(size) for t in tensors), strict=True)

    def own_shards(self, batch: AgentBatch, rows: Rows) -> list[tuple[int, list[Rows]]]:
        """The micro-batches of each shard that this process computes."""
        return [(shard, self.micro_batches(batch, part)) for shard, part in self.shards.split_own(batch, rows)]

    def own_parts(self, batch: AgentBatch, rows: Rows) -> list[Rows]:
        """All micro-batches of this process, one after the other."""
        return [part for _, parts in self.own_shards(batch, rows) for part in parts]

    @contextmanager
    def in_step(self, passes: int) -> Iterator[None]:
        """Context for this many passes. In lockstep, idle passes are added at its end until all processes have made the
        same number."""
        rounds = self.shards.rounds(passes)
        yield
        for _ in range(rounds - passes):
            self.pass_idly()

    def over(self, passes: int) -> AbstractContextManager[Work]:
        """Progress over this many micro-batches, for display."""
        return working(f"passes of {self.agent}", passes, "micro-batches")

    def counts(self, batch: AgentBatch, rows: Rows) -> dict[int, int]:
        """Number of micro-batches of each shard, whichever process computes it."""
        return {shard: len(self.micro_batches(batch, part)) for shard, part in self.shards.split(batch, rows)}

    def pass_idly(self) -> None:
        """Passes through the model because other processes need this one to take part. No effect, except that others
        add to gradients of partitioned weights."""
        parameters = [parameter for parameter in self.policy.parameters().values() if not is_spread(parameter)]
        held = [parameter.grad for parameter in parameters]
        for parameter in parameters:  # adding zeros could still change the sign of a zero
            parameter.grad = None
        with self.policy.computing():
            hidden_NH = self.policy.features([ANYTHING], [ANYTHING])
            if torch.is_grad_enabled():
                (hidden_NH.sum() * 0.0).backward()
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient

    def micro_batches(self, batch: AgentBatch, rows: Rows) -> list[Rows]:
        """Splits rows into micro-batches, sorted by decreasing size. Rows of one problem are adjacent, because their
        common prefix is computed once. If memory depends on tokens, a micro-batch holds up to as many tokens as
        ``micro_batch`` of the longest rows, so that a pass over short rows is not too small for a card."""
        size_M = batch.sizes_M
        longest = np.zeros(int(batch.problem_M.max()) + 1, dtype=np.int64)
        np.maximum.at(longest, batch.problem_M[rows], size_M[rows])
        problem_M = batch.problem_M
        ordered = rows[np.lexsort((rows, -size_M[rows], problem_M[rows], -longest[problem_M[rows]]))]
        if self.policy.end_to_end:
            room, most = self.micro_batch * int(size_M[rows].max(initial=0)), MOST_TIMES * self.micro_batch
            parts = _filled(ordered, size_M[ordered], room, most)
        else:
            parts = [ordered[start : start + self.micro_batch] for start in range(0, len(ordered), self.micro_batch)]
        return sorted(parts, key=lambda part: -int(size_M[part].sum()))

    def fitting(self, compute: Callable[[], Result]) -> Result:
        """Calls ``compute``. When memory runs out, lowers the micro-batch, then recomputes activations, and starts
        over.

        Micro-batches are weighted exactly, so the result is the same up to rounding.
        """
        while True:
            try:
                return compute()
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                forget_gradients(self.policy)
                if self.shards.lockstep:
                    raise UserError(
                        f"agent {self.agent!r}: {self.micro_batch} of its longest messages at once do not fit beside a "
                        "worker's part of the model: lower learner.micro_batch, or shorten max_tokens"
                    ) from error
                if self.micro_batch == 1 and not (self.may_recompute and self.policy.recompute_activations()):
                    spare = "set learner.recompute to auto, " if self.recompute == "never" else ""
                    raise UserError(
                        f"agent {self.agent!r}: a single message does not fit into the memory of "
                        f"{self.policy.device}; {spare}shorten max_tokens or the contexts, or use a smaller model"
                    ) from error
                self.micro_batch = lowered(self.micro_batch)
            # Outside of the handler, where the exception no longer keeps tensors of the failed pass alive.
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()


def lowered(micro_batch: int) -> int:
    """The next micro-batch to try if this one does not fit: a quarter smaller, because with fewer messages a card often
    waits for the host."""
    return max(1, 3 * micro_batch // 4)


def _filled(rows: Rows, sizes: NDArray[np.int64], room: int, most: int) -> list[Rows]:
    """Splits rows, in this order, before each row that exceeds the room left, or after ``most`` rows. No row is larger
    than ``room``."""
    cuts, taken, begun = [], 0, 0
    for place, size in enumerate(sizes.tolist()):
        if taken + size > room or place - begun == most:
            cuts.append(place)
            taken, begun = 0, place
        taken += size
    return np.split(rows, cuts) if len(rows) else []


def head_chunk(device: torch.device, vocabulary: int) -> int:
    """Number of positions whose logits are held at once."""
    on_a_card = device.type == "cuda"
    return chunk_for(torch.cuda.get_device_properties(device).total_memory if on_a_card else None, vocabulary)


def chunk_for(memory: int | None, vocabulary: int) -> int:
    """Number of positions whose logits are held at once on a card with this many bytes of memory; None: on a CPU."""
    elements = HEAD_CHUNK_ELEMENTS if memory is None else int(HEAD_CHUNK_SHARE * memory) // 4
    return max(1, elements // vocabulary)


def packed(tensors: Sequence[Tensor], rows: NDArray[np.int64]) -> Tensor:
    return torch.cat([tensors[i] for i in rows])


def off_device(tensors: Sequence[Tensor]) -> Floats:
    """The concatenated tensors on the host, in one transfer."""
    packed_N: Floats = torch.cat(list(tensors) or [torch.zeros(0)]).double().cpu().numpy()
    return packed_N


def by_message(tensors: Sequence[Tensor], batch: AgentBatch) -> list[Floats]:
    """The same, split into messages again."""
    return np.split(off_device(tensors), np.cumsum(batch.lengths_M)[:-1]) if len(batch) else []


def packed_ids(batch: AgentBatch, device: torch.device) -> Tensor:
    ids: Ids = np.concatenate(batch.messages) if len(batch) else np.zeros(0, dtype=np.int32)
    return send(ids.astype(np.int64), device)


@dataclass(frozen=True)
class Padding:
    """Places of packed tokens in [M, T], and a mask of the places that hold one: derived from lengths, never from
    ids."""

    place_N: Tensor
    mask_MT: Tensor

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Padding:
        mask_MT = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
        return Padding(send(np.flatnonzero(mask_MT), device), send(mask_MT, device))

    def __call__(self, values_N: Tensor) -> Tensor:
        """Pads [N] to [M, T] with zeros. One copy in each direction: the backward pass of ``pad_sequence`` goes message
        by message."""
        empty = values_N.new_zeros(self.mask_MT.numel())
        return empty.index_copy(0, self.place_N, values_N).view(self.mask_MT.shape)


def forget_gradients(policy: Policy) -> None:
    for parameter in policy.parameters().values():
        parameter.grad = None


def out_of_memory(error: RuntimeError) -> bool:
    """Whether this error means out of memory. GPU libraries raise errors of their own when there is no room for a
    workspace."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_ROOM)
