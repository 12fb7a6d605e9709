"""Passes of a policy over a batch, as large as memory allows; and what a policy was when it was frozen."""

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
"""A message of one token."""

NO_ROOM = ("_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDA error: out of memory")
"""What a card's libraries say when it is full."""

MOST_TIMES = 8
"""So many times ``micro_batch`` rows are passed together at most, however short they are: the numbers of their tokens
are padded to the longest message beside them."""

HEAD_CHUNK_ELEMENTS = 16_000_000
"""Logits held at once on a CPU: chunk of positions x vocabulary."""
HEAD_CHUNK_SHARE = 0.03
"""Share of a card's memory for the same. When there are several chunks, each is computed again for the gradient."""
LEAN = 16 / 10
"""So many times as many where output layer and score are one: plans count 16 bytes for each logit, and 10 are held
there (``scoring.fused_features``: the logits of both policies in float32, their gradient in float16)."""


@dataclass(frozen=True)
class Reference:
    """A frozen policy on one batch: features per message token of this process' rows, its head, and its token
    log-probabilities. ``initial`` are those of the policy that the learner began with, where they were asked for;
    ``values`` are the critic's, where there is one."""

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
    """The forward passes of one agent's policy: micro-batches of messages, chunks of the head, and a count of tokens.
    When memory runs out, micro-batches become smaller and stay so, and then activations are recomputed unless
    ``recompute`` forbids it. Only the rows of this process' shards are passed through; what others found is put beside
    it."""

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
        """Whether activations are recomputed where that is needed. Layers that processes hold in parts are not there
        any more on the way back."""
        return self.recompute != "never" and not self.shards.lockstep and self.policy.can_recompute

    def freeze(self, batch: AgentBatch, found: Mapping[int, Tensor] = NOTHING) -> Reference:
        """The policy as it is now, on this batch. ``found``: of rows of this process, features that somebody has
        computed with the same weights; only the others are passed through the model."""
        own = self.fitting(lambda: self._freeze(batch, found))
        return replace(own, logp=self.of_all_rows(dict(enumerate(own.logp)), batch))

    def of_all_rows(self, own: Mapping[int, Tensor], batch: AgentBatch) -> list[Tensor]:
        """Something for every token of every message, from whoever computed it."""
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
        """The policy as it is now, beside the frozen one, on some rows."""
        part = reference.batch.rows(rows)
        hidden_NH = self.features(part)
        head = self.policy.head()
        cur_NH = packed(reference.features, rows)
        ids_N = packed_ids(part, hidden_NH.device)

        pieces = []
        lean = scores_in_half(head) and scores_in_half(reference.head)
        for new, cur, ids in self.chunks(reference.batch, head, hidden_NH, cur_NH, ids_N, lean=lean):
            keep = len(new) == len(hidden_NH)  # of several chunks, logits would be held all at once
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
        """Of positions, so few that the logits of one chunk fit: never more than ``micro_batch`` of the batch's longest
        messages have, because the memory plan counts so many. Where passes are filled by tokens, short prompts leave
        room for more. ``lean``: only ``score_features`` reads them, with both heads in half precision, and ``LEAN``
        times as many take the memory that is planned."""
        with torch.no_grad():
            vocabulary = head(tensors[0][:1]).shape[-1]
        planned = self.micro_batch * int(batch.lengths_M.max())
        size = max(1, min(head_chunk(self.policy.device, vocabulary), planned))
        if lean:
            size = int(size * LEAN)
        if len(tensors[0]) <= size:
            return iter([tensors])  # as they are: a gradient need not go through a cut that cuts nothing
        return zip(*(t.split(size) for t in tensors), strict=True)

    def own_shards(self, batch: AgentBatch, rows: Rows) -> list[tuple[int, list[Rows]]]:
        """The micro-batches of each shard that this process computes."""
        return [(shard, self.micro_batches(batch, part)) for shard, part in self.shards.split_own(batch, rows)]

    def own_parts(self, batch: AgentBatch, rows: Rows) -> list[Rows]:
        """All of them, one after the other."""
        return [part for _, parts in self.own_shards(batch, rows) for part in parts]

    @contextmanager
    def in_step(self, passes: int) -> Iterator[None]:
        """So many passes are made within; then, in lockstep, as many more as others make."""
        rounds = self.shards.rounds(passes)
        yield
        for _ in range(rounds - passes):
            self.pass_idly()

    def over(self, passes: int) -> AbstractContextManager[Work]:
        """So many micro-batches, for whoever shows what takes long."""
        return working(f"passes of {self.agent}", passes, "micro-batches")

    def counts(self, batch: AgentBatch, rows: Rows) -> dict[int, int]:
        """How many micro-batches each shard has, wherever it is computed."""
        return {shard: len(self.micro_batches(batch, part)) for shard, part in self.shards.split(batch, rows)}

    def pass_idly(self) -> None:
        """Through the model, for others' sake: it leaves no trace but what others add to spread weights' gradients."""
        parameters = [parameter for parameter in self.policy.parameters().values() if not is_spread(parameter)]
        held = [parameter.grad for parameter in parameters]
        for parameter in parameters:  # zeros that are added could still turn the sign of a zero
            parameter.grad = None
        with self.policy.computing():
            hidden_NH = self.policy.features([ANYTHING], [ANYTHING])
            if torch.is_grad_enabled():
                (hidden_NH.sum() * 0.0).backward()
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient

    def micro_batches(self, batch: AgentBatch, rows: Rows) -> list[Rows]:
        """The rows of one problem side by side, because what they begin with in common is computed once; the
        micro-batches by falling size. Where memory goes by tokens, each holds up to as many as ``micro_batch`` of the
        longest rows have, so that a pass over short rows is not too small for a card."""
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
        """Compute; when memory runs out, lower the micro-batch, then recompute activations, and start over.

        Micro-batches are weighted exactly, so what comes out is the same but for rounding.
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
            # Outside of the handler, so that the failed pass is really gone.
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()


def lowered(micro_batch: int) -> int:
    """The next one to try where so many messages at a time do not fit: by a quarter, since a card often waits for the
    host with fewer."""
    return max(1, 3 * micro_batch // 4)


def _filled(rows: Rows, sizes: NDArray[np.int64], room: int, most: int) -> list[Rows]:
    """Rows in this order, cut wherever the next one has no room left, or there are so many. None is larger than the
    room."""
    cuts, taken, begun = [], 0, 0
    for place, size in enumerate(sizes.tolist()):
        if taken + size > room or place - begun == most:
            cuts.append(place)
            taken, begun = 0, place
        taken += size
    return np.split(rows, cuts) if len(rows) else []


def head_chunk(device: torch.device, vocabulary: int) -> int:
    """Positions whose logits are held at once."""
    on_a_card = device.type == "cuda"
    return chunk_for(torch.cuda.get_device_properties(device).total_memory if on_a_card else None, vocabulary)


def chunk_for(memory: int | None, vocabulary: int) -> int:
    """Positions whose logits are held at once on a card with so many bytes of memory; None: on a CPU."""
    elements = HEAD_CHUNK_ELEMENTS if memory is None else int(HEAD_CHUNK_SHARE * memory) // 4
    return max(1, elements // vocabulary)


def packed(tensors: Sequence[Tensor], rows: NDArray[np.int64]) -> Tensor:
    return torch.cat([tensors[i] for i in rows])


def off_device(tensors: Sequence[Tensor]) -> Floats:
    """Packed, in one transfer."""
    packed_N: Floats = torch.cat(list(tensors) or [torch.zeros(0)]).double().cpu().numpy()
    return packed_N


def by_message(tensors: Sequence[Tensor], batch: AgentBatch) -> list[Floats]:
    """The same, and split again."""
    return np.split(off_device(tensors), np.cumsum(batch.lengths_M)[:-1]) if len(batch) else []


def packed_ids(batch: AgentBatch, device: torch.device) -> Tensor:
    ids: Ids = np.concatenate(batch.messages) if len(batch) else np.zeros(0, dtype=np.int32)
    return send(ids.astype(np.int64), device)


@dataclass(frozen=True)
class Padding:
    """Where packed tokens stand in [M, T], and which places hold one: it comes from lengths, never from ids."""

    place_N: Tensor
    mask_MT: Tensor

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Padding:
        mask_MT = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
        return Padding(send(np.flatnonzero(mask_MT), device), send(mask_MT, device))

    def __call__(self, values_N: Tensor) -> Tensor:
        """[N] to [M, T], zeros elsewhere. One copy each way: ``pad_sequence`` goes back message by message."""
        empty = values_N.new_zeros(self.mask_MT.numel())
        return empty.index_copy(0, self.place_N, values_N).view(self.mask_MT.shape)


def forget_gradients(policy: Policy) -> None:
    for parameter in policy.parameters().values():
        parameter.grad = None


def out_of_memory(error: RuntimeError) -> bool:
    """Libraries of the card say it in words of their own when they find no room for their workspace."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_ROOM)
