"""Trains one policy, whatever it is made of: the Learner port over a ``Policy``.

One engine on both sides of a ratio: log-probabilities before and after an update come from here, never from
the sampler.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teamtr.engines.critic import Critic
from teamtr.engines.gradients import LossPart, gather
from teamtr.engines.hashing import hash_tensors
from teamtr.engines.optim import Adam
from teamtr.engines.policy import Head, Policy
from teamtr.engines.saving import raising_os_errors
from teamtr.engines.scoring import score_tokens, token_logp
from teamtr.engines.transfer import send
from teamtr.errors import UserError
from teamtr.ports import Snapshot
from teamtr.theory.kl import kl_k3, per_message_sum
from teamtr.theory.objective import Objective
from teamtr.theory.surrogate import clipped_surrogate, reference_kl, surrogate_denominator
from teamtr.theory.value_loss import clipped_value_loss
from teamtr.theory.verification import chance_so_far, kept_tokens
from teamtr.types import AgentBatch, Divergence, Floats, Ids, StepStats, TokenShift, ValueStats, Verified

Result = TypeVar("Result")

CRITIC_FILE = "critic.safetensors"
"""Where a checkpoint holds an agent's critic, beside its weights and its optimizer."""

NO_ROOM = ("_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDA error: out of memory")
"""What a card's libraries say when it is full."""

SHIFT_RANKS = 20
"""Tokens told apart by ``token_shift``."""

HEAD_CHUNK_ELEMENTS = 16_000_000
"""Logits held at once on a CPU: chunk of positions x vocabulary."""
HEAD_CHUNK_SHARE = 0.03
"""Share of a card's memory for the same. When there are several chunks, each is computed again for the gradient."""


@dataclass(frozen=True)
class Saved:
    """Weights and optimizer moments, cloned, and the critic's: what a ``Snapshot`` of this engine holds."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    critic: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Reference:
    """A frozen policy on one batch: features per message token, its head, and its token log-probabilities. ``initial``
    are those of the policy that the learner began with, where they were asked for; ``values`` are the critic's, where
    there is one."""

    batch: AgentBatch
    features: list[Tensor]
    head: Head
    logp: list[Tensor]
    initial: list[Tensor] | None = None
    values: list[Tensor] | None = None


@dataclass(frozen=True)
class _Scored:
    """Token log-probabilities and per-position KL of some rows, packed, with each message's length."""

    logp_N: Tensor
    kl_N: Tensor
    lengths: list[int]


class PolicyLearner:
    """Adam on a policy, with the frozen reference that ratios and KLs are measured against.

    ``keep_initial``: keep a copy of the trainable parameters as they are now, off the card, for objectives with a
    ``reference_kl``. ``critic``: have one, for advantages per token.
    """

    def __init__(
        self,
        agent: str,
        policy: Policy,
        *,
        micro_batch: int = 64,
        betas: tuple[float, float] = (0.9, 0.99),
        max_grad_norm: float = 1.0,
        keep_initial: bool = False,
        critic: bool = False,
    ) -> None:
        self.agent = agent
        self.policy = policy
        self.micro_batch = micro_batch
        self.max_grad_norm = max_grad_norm
        self.tokens = {"scored": 0, "trained": 0}
        self.optimizer = Adam(betas)
        self.critic = Critic(policy.value_head(), betas) if critic else None
        self._reference: Reference | None = None
        self._version: str | None = None
        self._initial: dict[str, Tensor] | None = None
        self.initial_version: str | None = None
        """A hash of the policy that ``keep_initial`` kept; None without one."""
        if keep_initial:
            self._initial = {name: p.detach().to("cpu", copy=True) for name, p in policy.parameters().items()}
            self.initial_version = self.version()

    # -- identity ---------------------------------------------------------------------------------------------

    def version(self) -> str:
        if self._version is None:
            self._version = hash_tensors(self.policy.parameters(), salt=self.policy.base_version)
        return self._version

    def fingerprint(self) -> str:
        """A hash of everything that ``save`` writes."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.version().encode())
        digest.update(hash_tensors(self.optimizer.moments).encode())
        counters = [float(x) for x in self.optimizer.counters().values()]
        digest.update(json.dumps(counters).encode())
        if self.critic is not None:
            digest.update(self.critic.fingerprint().encode())
        return digest.hexdigest()

    def _touched(self) -> None:
        self._version = None

    # -- the frozen policy ------------------------------------------------------------------------------------

    def begin(self, batch: AgentBatch, *, reference: bool = False) -> Floats:
        initial = self._under_initial(batch) if reference else None  # first: then one policy's features are held
        frozen = replace(self.freeze(batch), initial=initial)
        self.follow(frozen if self.critic is None else replace(frozen, values=self._values(self.critic, frozen)))
        return np.array([x.sum() for x in self.token_logprobs()])

    @torch.no_grad()
    def _under_initial(self, batch: AgentBatch) -> list[Tensor]:
        """Token log-probabilities of the policy that the learner began with; the present one is put back to the bit."""
        if self._initial is None:
            raise RuntimeError("this learner was made without keep_initial: it has no reference policy")
        parameters = self.policy.parameters()
        present = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.copy_(self._initial[name])
            return self.freeze(batch).logp
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(present[name])

    def follow(self, reference: Reference) -> None:
        """Measure from this policy on: the learner's own as it was, or another's (app:align)."""
        self.optimizer.to(self.policy.device)
        if self.critic is not None:
            self.critic.optimizer.to(self.policy.device)
        self._reference = reference

    def freeze(self, batch: AgentBatch) -> Reference:
        """The policy as it is now, on this batch."""
        return self._fitting(lambda: self._freeze(batch))

    @torch.no_grad()
    def _freeze(self, batch: AgentBatch) -> Reference:
        head = self.policy.frozen_head()
        empty = torch.zeros(0)
        features, logp = [empty] * len(batch), [empty] * len(batch)
        for rows in self._micro_batches(batch, np.arange(len(batch))):
            part = batch.rows(rows)
            with self.policy.computing():
                hidden_NH = self._features(part)
                ids_N = _packed_ids(part, hidden_NH.device)
                logp_N = torch.cat([token_logp(head(h), t) for h, t in self._chunks(head, hidden_NH, ids_N)])
            lengths = part.lengths_M.tolist()
            for row, own_features, own_logp in zip(rows, hidden_NH.split(lengths), logp_N.split(lengths), strict=True):
                features[row], logp[row] = own_features, own_logp
        return Reference(batch, features, head, logp)

    def end(self) -> None:
        """Only the agent being updated keeps its optimizer's moments on the card."""
        self._reference = None
        if self.policy.device.type != "cpu":
            self.optimizer.leave_the_card()
            if self.critic is not None:
                self.critic.optimizer.leave_the_card()

    def token_logprobs(self) -> list[Floats]:
        """Token log-probabilities of the frozen policy, per message."""
        reference = self._require()
        return _by_message(reference.logp, reference.batch)

    def _require(self) -> Reference:
        if self._reference is None:
            raise RuntimeError("call begin(batch) first: nothing was frozen to measure against")
        return self._reference

    # -- optimization -----------------------------------------------------------------------------------------

    def step(
        self,
        rows: NDArray[np.int64],
        advantages: Floats | Sequence[Floats],
        objective: Objective,
        *,
        beta: float,
        learning_rate: float,
    ) -> StepStats:
        """One Adam step on the rows, accumulated over micro-batches with exact weights."""
        stats = self._fitting(lambda: self._accumulate(rows, advantages, objective, beta))
        if stats.applied:
            shrink = min(1.0, self.max_grad_norm / (stats.grad_norm + 1e-12))
            self.optimizer.step(self.policy.parameters(), shrink, learning_rate)
            self._touched()
        self._forget_gradients()
        return stats

    def _accumulate(
        self, rows: NDArray[np.int64], advantages: Floats | Sequence[Floats], objective: Objective, beta: float
    ) -> StepStats:
        """Gradients of the whole step, micro-batch by micro-batch, the longest messages first: a step that does not
        fit into memory fails at once."""
        reference = self._require()
        initial = reference.initial if objective.has_reference else None
        if objective.has_reference and initial is None:
            raise RuntimeError("call begin(batch, reference=True) first: the objective has a KL to the initial policy")
        denominator = surrogate_denominator(reference.batch.lengths_M[rows], objective.average_over)
        position = {int(row): k for k, row in enumerate(rows)}

        def forward(part: NDArray[np.int64]) -> LossPart:
            scored = self._score(part)
            logp_new_MT, mask_MT = _pad(scored.logp_N, scored.lengths)
            logp_cur_MT, _ = _pad(torch.cat([reference.logp[i] for i in part]), scored.lengths)
            own = send(_chosen(advantages, [position[int(i)] for i in part]), logp_new_MT.device)
            own = own if isinstance(advantages, np.ndarray) else _pad(own, scored.lengths)[0]
            gain = clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, own.to(logp_new_MT.dtype), objective)
            kl_sum = scored.kl_N.sum()
            loss = beta * kl_sum / len(rows) - gain.total / denominator
            counted = [gain.total, kl_sum, gain.clipped, gain.ratios]
            if initial is not None:
                logp_ref_MT, _ = _pad(torch.cat([initial[i] for i in part]), scored.lengths)
                drift = reference_kl(logp_new_MT, logp_ref_MT, mask_MT, objective.average_over)
                loss = loss + objective.reference_kl * drift / denominator
                counted.append(drift)
            return LossPart(loss, torch.stack([x.detach().double() for x in counted]))

        found = gather(
            self._micro_batches(reference.batch, rows),
            forward,
            list(self.policy.parameters().values()),
            self._scale(),
            self.policy.computing,
        )
        total, kl_total, clipped, ratios, *drift = found.sums
        if found.finite and found.scale < self._scale():
            self.optimizer.lower_scale(found.scale)
        clip_rate = clipped / ratios if ratios else 0.0
        kl_reference = drift[0] / denominator if drift else None
        return StepStats(found.finite, total / denominator, kl_total / len(rows), found.norm, clip_rate, kl_reference)

    def _scale(self) -> float:
        """Of the loss, in float16."""
        return self.optimizer.loss_scale if self.policy.precision == "fp16" else 1.0

    def _forget_gradients(self) -> None:
        for parameter in self.policy.parameters().values():
            parameter.grad = None

    def _fitting(self, compute: Callable[[], Result]) -> Result:
        """Compute; when memory runs out, halve the micro-batch, then recompute activations, and start over.

        Micro-batches are weighted exactly, so what comes out is the same but for rounding.
        """
        while True:
            try:
                return compute()
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                self._forget_gradients()
                if self.micro_batch == 1 and not self.policy.recompute_activations():
                    raise UserError(
                        f"agent {self.agent!r}: a single message does not fit into the memory of "
                        f"{self.policy.device}; shorten max_tokens or the contexts, or use a smaller model"
                    ) from error
                self.micro_batch = max(1, self.micro_batch // 2)
            # Outside of the handler, so that the failed pass is really gone.
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()

    # -- the critic -------------------------------------------------------------------------------------------

    def values(self) -> list[Floats]:
        """The critic's value before each token under the frozen policy, per message."""
        reference = self._require()
        if reference.values is None:
            raise RuntimeError("this learner was made without a critic: it has no values")
        return _by_message(reference.values, reference.batch)

    @torch.no_grad()
    def _values(self, critic: Critic, frozen: Reference) -> list[Tensor]:
        values = [torch.zeros(0)] * len(frozen.batch)
        for rows in self._micro_batches(frozen.batch, np.arange(len(frozen.batch))):
            part = frozen.batch.rows(rows)
            value_N = critic.head.values(_packed(frozen.features, rows), part.prompts, part.messages)
            for row, own in zip(rows, value_N.split(part.lengths_M.tolist()), strict=True):
                values[row] = own
        return values

    def fit_values(
        self, rows: NDArray[np.int64], targets: Sequence[Floats], *, clip: float, learning_rate: float
    ) -> ValueStats:
        """One Adam step of the critic on the frozen features of the rows: no pass through the policy."""
        reference, critic = self._require(), self.critic
        if critic is None or reference.values is None:
            raise RuntimeError("this learner was made without a critic: there is nothing to fit")
        old, position = reference.values, {int(row): k for k, row in enumerate(rows)}
        tokens = sum(len(target_T) for target_T in targets)
        loss, outside = 0.0, 0
        for part in self._micro_batches(reference.batch, rows):
            batch = reference.batch.rows(part)
            new_N = critic.head.values(_packed(reference.features, part), batch.prompts, batch.messages)
            target_N = send(_chosen(targets, [position[int(i)] for i in part]), new_N.device).to(new_N.dtype)
            total, clipped = clipped_value_loss(new_N, _packed(old, part), target_N, clip)
            (total / tokens).backward()
            loss, outside = loss + float(total.detach()), outside + int(clipped)
        parameters = critic.head.parameters()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None]))
        applied = bool(np.isfinite([loss, norm]).all())
        if applied:
            critic.optimizer.step(parameters, min(1.0, self.max_grad_norm / (norm + 1e-12)), learning_rate)
        critic.forget_gradients()
        return ValueStats(applied, loss / tokens, outside / tokens)

    # -- measuring --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, rows: NDArray[np.int64] | None = None) -> Divergence:
        reference = self._require()
        chosen = np.arange(len(reference.batch)) if rows is None else rows
        kl_N, cur_N, new_N = self._fitting(lambda: self._measure(reference, chosen))
        lengths_M = reference.batch.lengths_M[chosen]
        ratio_M = per_message_sum(new_N - cur_N, lengths_M)
        reference_M = None
        if reference.initial is not None:
            initial_N = torch.cat([reference.initial[i] for i in chosen]).double().cpu().numpy()
            reference_M = per_message_sum(kl_k3(new_N, initial_N), lengths_M)
        return Divergence(
            full_M=per_message_sum(kl_N, lengths_M),
            k1_M=-ratio_M,
            k3_M=per_message_sum(kl_k3(cur_N, new_N), lengths_M),
            log_ratio_M=ratio_M,
            reference_M=reference_M,
        )

    @torch.no_grad()
    def token_kls(self) -> list[Floats]:
        reference = self._require()
        kl_N, _, _ = self._fitting(lambda: self._measure(reference, np.arange(len(reference.batch))))
        return np.split(kl_N, np.cumsum(reference.batch.lengths_M)[:-1])

    def _measure(self, reference: Reference, rows: NDArray[np.int64]) -> list[Floats]:
        """Packed KLs and both log-probabilities, in the order of ``rows``."""
        order: list[int] = []
        pieces: list[tuple[Tensor, ...]] = []
        place = {int(row): k for k, row in enumerate(rows)}
        for part in self._micro_batches(reference.batch, rows):
            with self.policy.computing():
                scored = self._score(part)
            order.extend(place[int(i)] for i in part)
            cur_N = torch.cat([reference.logp[i] for i in part])
            pieces.extend(zip(*(x.split(scored.lengths) for x in (scored.kl_N, cur_N, scored.logp_N)), strict=True))
        back = np.argsort(order)
        return [torch.cat([pieces[k][axis] for k in back]).double().cpu().numpy() for axis in range(3)]

    @torch.no_grad()
    def verify(self, noise_N: Floats, noise_M: Floats) -> Verified:
        reference = self._require()
        return self._fitting(lambda: self._verify(reference, noise_N, noise_M))

    def _verify(self, reference: Reference, noise_N: Floats, noise_M: Floats) -> Verified:
        batch = reference.batch
        noise = np.split(noise_N, np.cumsum(batch.lengths_M)[:-1])
        kept_M, next_M = np.zeros(len(batch), dtype=np.int64), np.full(len(batch), -1, dtype=np.int64)
        for rows in self._micro_batches(batch, np.arange(len(batch))):
            part = batch.rows(rows)
            lengths = part.lengths_M.tolist()
            with self.policy.computing():
                new_NH, head = self._features(part), self.policy.head()
                cur_NH = torch.cat([reference.features[i] for i in rows])
                ids_N = _packed_ids(part, new_NH.device)
                logp_N = torch.cat([token_logp(head(h), t) for h, t in self._chunks(head, new_NH, ids_N)])
                ratio_N = (logp_N - torch.cat([reference.logp[i] for i in rows])).double().cpu().numpy()
                chances = [chance_so_far(ratio) for ratio in np.split(ratio_N, np.cumsum(lengths)[:-1])]
                chance_N = send(np.concatenate([chance[:-1] for chance in chances]), new_NH.device)
                draw_N = send(np.repeat(noise_M[rows], lengths), new_NH.device)
                pieces = [
                    _rest(head(new), reference.head(cur), chance, draw)
                    for new, cur, chance, draw in self._chunks(head, new_NH, cur_NH, chance_N, draw_N)
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
    def token_shift(self) -> TokenShift:
        reference = self._require()
        sums: Tensor | None = None
        positions = 0
        for part in self._micro_batches(reference.batch, np.arange(len(reference.batch))):
            with self.policy.computing():
                new_NH = self._features(reference.batch.rows(part))
                cur_NH = torch.cat([reference.features[i] for i in part])
                head = self.policy.head()
                for new, cur in self._chunks(head, new_NH, cur_NH):
                    part_sums = _shift_sums(reference.head(cur), head(new))
                    sums = part_sums if sums is None else sums + part_sums
                    positions += len(new)
        assert sums is not None, "begin needs at least one message"
        mean = (sums / positions).double().cpu().numpy()
        before_R, after_R, moved_R = mean[:-1].reshape(3, -1)
        return TokenShift(before_R, after_R, moved_R, flipped=float(mean[-1]), positions=positions)

    def _score(self, rows: NDArray[np.int64]) -> _Scored:
        reference = self._require()
        part = reference.batch.rows(rows)
        hidden_NH = self._features(part)
        head = self.policy.head()
        cur_NH = torch.cat([reference.features[i] for i in rows])
        ids_N = _packed_ids(part, hidden_NH.device)

        def score(new: Tensor, cur: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                logits_cur = reference.head(cur)
            return score_tokens(head(new), logits_cur, ids)

        pieces = []
        for new, cur, ids in self._chunks(head, hidden_NH, cur_NH, ids_N):
            if torch.is_grad_enabled() and len(new) < len(hidden_NH):
                # more than one chunk: recompute its logits in the backward pass instead of keeping them all
                pieces.append(checkpoint(score, new, cur, ids, use_reentrant=False))
            else:
                pieces.append(score(new, cur, ids))
        logp_N, kl_N = (torch.cat(x) for x in zip(*pieces, strict=True))
        return _Scored(logp_N, kl_N, part.lengths_M.tolist())

    def _features(self, part: AgentBatch) -> Tensor:
        kind = "trained" if torch.is_grad_enabled() else "scored"
        self.tokens[kind] += sum(len(p) + len(m) for p, m in zip(part.prompts, part.messages, strict=True))
        return self.policy.features(part.prompts, part.messages)

    def _chunks(self, head: Head, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        with torch.no_grad():
            vocabulary = head(tensors[0][:1]).shape[-1]
        size = head_chunk(self.policy.device, vocabulary)
        return zip(*(t.split(size) for t in tensors), strict=True)

    def _micro_batches(self, batch: AgentBatch, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The rows of one problem side by side, because what they begin with in common is computed once; the
        micro-batches by falling size."""
        size_M = np.array([len(p) + len(m) for p, m in zip(batch.prompts, batch.messages, strict=True)])
        longest = np.zeros(int(batch.problem_M.max()) + 1, dtype=np.int64)
        np.maximum.at(longest, batch.problem_M[rows], size_M[rows])
        problem_M = batch.problem_M
        ordered = rows[np.lexsort((rows, -size_M[rows], problem_M[rows], -longest[problem_M[rows]]))]
        parts = [ordered[start : start + self.micro_batch] for start in range(0, len(ordered), self.micro_batch)]
        return sorted(parts, key=lambda part: -int(size_M[part].sum()))

    # -- going back -------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        parameters = {k: p.detach().clone() for k, p in self.policy.parameters().items()}
        critic = None if self.critic is None else self.critic.state()
        return Snapshot(Saved(parameters, self.optimizer.state(), critic))

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        saved = _saved(snapshot)
        for name, parameter in self.policy.parameters().items():
            parameter.copy_(saved.parameters[name])
        # A snapshot taken while the moments were off the card is restored to where they are used.
        self.optimizer.restore({k: t.clone().to(self.policy.device) for k, t in saved.moments.items()})
        if self.critic is not None and saved.critic is not None:
            self.critic.restore(saved.critic)
        self._touched()

    @torch.no_grad()
    def move(self, start: Snapshot, end: Snapshot, fraction: float) -> None:
        origin, target = _saved(start).parameters, _saved(end).parameters
        for name, parameter in self.policy.parameters().items():
            parameter.copy_(origin[name] + fraction * (target[name] - origin[name]))
        self._touched()

    @torch.no_grad()
    def perturb(self, relative: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        parameters = self.policy.parameters().values()
        sizes = torch.stack([p.float().square().mean().sqrt() for p in parameters]).tolist()
        typical = float(np.sqrt(np.mean(np.square(sizes))))
        for parameter, size in zip(parameters, sizes, strict=True):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter)
            # A fresh adapter's second factor is all zeros: without a size of its own it takes the others'.
            parameter.add_(noise, alpha=relative * (size or typical))
        self._touched()

    # -- disk -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = {k: t.contiguous().cpu() for k, t in self.optimizer.state().items()}
        with raising_os_errors():
            self.policy.save_weights(folder)
            save_file(state, folder / "optimizer.safetensors")
            if self.critic is not None:
                save_file({k: t.contiguous().cpu() for k, t in self.critic.state().items()}, folder / CRITIC_FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self.policy.load_weights(folder)
        self.optimizer.restore(load_file(folder / "optimizer.safetensors"))
        if self.critic is not None:
            self.critic.restore(load_file(folder / CRITIC_FILE))
        self._touched()


def _saved(snapshot: Snapshot) -> Saved:
    assert isinstance(snapshot, Saved), "a snapshot of another engine"
    return snapshot


def head_chunk(device: torch.device, vocabulary: int) -> int:
    """Positions whose logits are held at once."""
    elements = HEAD_CHUNK_ELEMENTS
    if device.type == "cuda":
        elements = int(HEAD_CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory) // 4
    return max(1, elements // vocabulary)


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


def _chosen(values: Floats | Sequence[Floats], places: Sequence[int]) -> Floats:
    """One number per message, or those of all tokens end to end."""
    if isinstance(values, np.ndarray):
        return np.asarray(values[places])
    return np.concatenate([values[k] for k in places])


def _packed(tensors: Sequence[Tensor], rows: NDArray[np.int64]) -> Tensor:
    return torch.cat([tensors[i] for i in rows])


def _by_message(tensors: Sequence[Tensor], batch: AgentBatch) -> list[Floats]:
    """Packed, taken off the device in one transfer, and split again."""
    if not tensors:
        return []
    return np.split(torch.cat(list(tensors)).double().cpu().numpy(), np.cumsum(batch.lengths_M)[:-1])


def _packed_ids(batch: AgentBatch, device: torch.device) -> Tensor:
    packed: Ids = np.concatenate(batch.messages) if len(batch) else np.zeros(0, dtype=np.int32)
    return send(packed.astype(np.int64), device)


def _pad(values_N: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Packed tokens to [M, T] with a mask that comes from lengths, never from ids."""
    padded_MT = torch.nn.utils.rnn.pad_sequence(list(values_N.split(lengths)), batch_first=True)
    lengths_M = send(np.array(lengths), values_N.device)
    mask_MT = torch.arange(padded_MT.shape[1], device=values_N.device)[None] < lengths_M[:, None]
    return padded_MT, mask_MT


def _out_of_memory(error: RuntimeError) -> bool:
    """Libraries of the card say it in words of their own when they find no room for their workspace."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_ROOM)
