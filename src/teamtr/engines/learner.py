"""Trains one policy, whatever it is made of: the Learner port over a ``Policy``.

One engine on both sides of a ratio: log-probabilities before and after an update come from here, never from
the sampler.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teamtr.engines.policy import Head, Policy
from teamtr.presets import Objective
from teamtr.theory.kl import kl_cur_to_new, kl_k3, per_message_sum
from teamtr.theory.surrogate import clipped_surrogate, surrogate_denominator
from teamtr.types import AgentBatch, AgentState, Divergence, Floats, Ids, StepStats

LOSS_SCALE = 1024.0

HEAD_CHUNK_ELEMENTS = 16_000_000
"""Logits held at once: chunk of positions x vocabulary."""


@dataclass(frozen=True)
class Snapshot:
    """Weights and optimizer moments, cloned."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    state: AgentState


@dataclass(frozen=True)
class _Reference:
    """The frozen policy on one batch: features per message token, its head, and its token log-probabilities."""

    batch: AgentBatch
    features: list[Tensor]
    head: Head
    logp: list[Tensor]


@dataclass(frozen=True)
class _Scored:
    """Token log-probabilities and per-position KL of some rows, packed, with each message's length."""

    logp_N: Tensor
    kl_N: Tensor
    lengths: list[int]


class PolicyLearner:
    """Adam on a policy, with the frozen reference that ratios and KLs are measured against."""

    def __init__(
        self,
        agent: str,
        policy: Policy,
        state: AgentState,
        *,
        micro_batch: int = 64,
        betas: tuple[float, float] = (0.9, 0.99),
        max_grad_norm: float = 1.0,
    ) -> None:
        self.agent = agent
        self.policy = policy
        self.state = state
        self.micro_batch = micro_batch
        self.max_grad_norm = max_grad_norm
        self.tokens = {"scored": 0, "trained": 0}
        self._betas = betas
        self._moments: dict[str, Tensor] = {}
        self._steps = 0
        self._reference: _Reference | None = None
        self._version: str | None = None

    # -- identity ---------------------------------------------------------------------------------------------

    def version(self) -> str:
        if self._version is None:
            self._version = hash_tensors(self.policy.parameters(), salt=self.policy.base_version)
        return self._version

    def fingerprint(self) -> str:
        """A hash of everything that ``save`` writes."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.version().encode())
        digest.update(hash_tensors(self._moments).encode())
        digest.update(json.dumps([self._steps, asdict(self.state)]).encode())
        return digest.hexdigest()

    def _touched(self) -> None:
        self._version = None

    # -- the frozen policy ------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, batch: AgentBatch) -> Floats:
        head = self.policy.frozen_head()
        features: list[Tensor] = []
        logp: list[Tensor] = []
        for rows in self._micro_batches(np.arange(len(batch))):
            part = batch.rows(rows)
            hidden_NH = self._features(part)
            logp_N = torch.cat(
                [_token_logp(head(h), t) for h, t in self._chunks(head, hidden_NH, _packed_ids(part, hidden_NH.device))]
            )
            lengths = part.lengths_M.tolist()
            features.extend(hidden_NH.split(lengths))
            logp.extend(logp_N.split(lengths))
        self._reference = _Reference(batch, features, head, logp)
        return np.array([float(x.double().sum()) for x in logp])

    def end(self) -> None:
        self._reference = None

    def token_logprobs(self) -> list[Floats]:
        """Token log-probabilities of the frozen policy, per message."""
        return [x.double().cpu().numpy() for x in self._require().logp]

    def _require(self) -> _Reference:
        if self._reference is None:
            raise RuntimeError("call begin(batch) first: nothing was frozen to measure against")
        return self._reference

    # -- optimisation -----------------------------------------------------------------------------------------

    def step(
        self,
        rows: NDArray[np.int64],
        advantages_M: Floats,
        objective: Objective,
        *,
        beta: float,
        learning_rate: float,
    ) -> StepStats:
        """One Adam step on the rows, accumulated over micro-batches with exact weights."""
        reference = self._require()
        denominator = surrogate_denominator(reference.batch.lengths_M[rows], objective.average_over)
        parameters = self.policy.parameters()
        for parameter in parameters.values():
            parameter.grad = None
        # fp16 flushes small gradients to zero: lift them out of its reach, and undo it in float32
        loss_scale = LOSS_SCALE if self.policy.precision == "fp16" else 1.0
        surrogate = kl_total = clipped = units = 0.0
        for part in self._micro_batches(np.arange(len(rows))):
            scored = self._score(rows[part])
            logp_new_MT, mask_MT = _pad(scored.logp_N, scored.lengths)
            logp_cur_MT, _ = _pad(torch.cat([reference.logp[i] for i in rows[part]]), scored.lengths)
            advantages = torch.as_tensor(advantages_M[part], dtype=logp_new_MT.dtype, device=logp_new_MT.device)
            gain = clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, advantages, objective)
            kl_sum = scored.kl_N.sum()
            loss = beta * kl_sum / len(rows) - gain.total / denominator
            (loss * loss_scale).backward()
            surrogate += float(gain.total.detach()) / denominator
            kl_total += float(kl_sum.detach()) / len(rows)
            clipped += float(gain.clipped)
            units += gain.ratios
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / loss_scale if gradients else 0.0
        applied = bool(np.isfinite(norm) and np.isfinite(surrogate) and np.isfinite(kl_total))
        if applied:
            self._adam(min(1.0, self.max_grad_norm / (norm + 1e-12)) / loss_scale, learning_rate)
        for parameter in parameters.values():
            parameter.grad = None
        return StepStats(applied, surrogate, kl_total, norm, clipped / units if units else 0.0)

    @torch.no_grad()
    def _adam(self, gradient_scale: float, learning_rate: float) -> None:
        """Adam with bias correction, written out so that its whole state is two named tensors per parameter."""
        self._steps += 1
        b1, b2 = self._betas
        correction = learning_rate * (1 - b2**self._steps) ** 0.5 / (1 - b1**self._steps)
        for name, parameter in self.policy.parameters().items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.mul(gradient_scale)
            first = self._moments.setdefault(f"first.{name}", torch.zeros_like(parameter))
            second = self._moments.setdefault(f"second.{name}", torch.zeros_like(parameter))
            first.lerp_(gradient, 1 - b1)
            second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            parameter.addcdiv_(first, second.sqrt().add_(1e-8), value=-correction)
        self._touched()

    # -- measuring --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, rows: NDArray[np.int64] | None = None) -> Divergence:
        reference = self._require()
        rows = np.arange(len(reference.batch)) if rows is None else rows
        kl: list[Tensor] = []
        cur: list[Tensor] = []
        new: list[Tensor] = []
        for part in self._micro_batches(rows):
            scored = self._score(part)
            kl.append(scored.kl_N)
            new.append(scored.logp_N)
            cur.extend(reference.logp[i] for i in part)
        kl_N, cur_N, new_N = (torch.cat(x).double().cpu().numpy() for x in (kl, cur, new))
        lengths_M = reference.batch.lengths_M[rows]
        ratio_M = per_message_sum(new_N - cur_N, lengths_M)
        return Divergence(
            full_M=per_message_sum(kl_N, lengths_M),
            k1_M=-ratio_M,
            k3_M=per_message_sum(kl_k3(cur_N, new_N), lengths_M),
            log_ratio_M=ratio_M,
        )

    def _score(self, rows: NDArray[np.int64]) -> _Scored:
        reference = self._require()
        part = reference.batch.rows(rows)
        hidden_NH = self._features(part)
        head = self.policy.head()
        cur_NH = torch.cat([reference.features[i] for i in rows])
        ids_N = _packed_ids(part, hidden_NH.device)

        def score(new: Tensor, cur: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits_new = head(new)
            logp = _token_logp(logits_new, ids)
            with torch.no_grad():
                logits_cur = reference.head(cur)
            return logp, kl_cur_to_new(logits_cur, logits_new)

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
        """Features of each message token; identical (prompt, message) pairs are computed once."""
        kind = "trained" if torch.is_grad_enabled() else "scored"
        self.tokens[kind] += sum(len(p) + len(m) for p, m in zip(part.prompts, part.messages, strict=True))
        keys: dict[tuple[bytes, bytes], int] = {}
        slot = [
            keys.setdefault((p.tobytes(), m.tobytes()), len(keys))
            for p, m in zip(part.prompts, part.messages, strict=True)
        ]
        if len(keys) == len(part):
            return self.policy.features(part.prompts, part.messages)
        first = {s: i for i, s in reversed(list(enumerate(slot)))}
        unique = [first[s] for s in range(len(keys))]
        hidden_NH = self.policy.features([part.prompts[i] for i in unique], [part.messages[i] for i in unique])
        lengths = [len(part.messages[i]) for i in unique]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        index = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in slot])
        return hidden_NH[torch.as_tensor(index, device=hidden_NH.device)]

    def _chunks(self, head: Head, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        with torch.no_grad():
            vocabulary = head(tensors[0][:1]).shape[-1]
        size = max(1, HEAD_CHUNK_ELEMENTS // vocabulary)
        return zip(*(t.split(size) for t in tensors), strict=True)

    def _micro_batches(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        for start in range(0, len(rows), self.micro_batch):
            yield rows[start : start + self.micro_batch]

    # -- going back -------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(
            parameters={k: p.detach().clone() for k, p in self.policy.parameters().items()},
            moments={k: t.clone() for k, t in self._moments.items()} | {"steps": torch.tensor(self._steps)},
            state=self.state,
        )

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        for name, parameter in self.policy.parameters().items():
            parameter.copy_(snapshot.parameters[name])
        self._moments = {k: t.clone() for k, t in snapshot.moments.items() if k != "steps"}
        self._steps = int(snapshot.moments["steps"])
        self.state = snapshot.state
        self._touched()

    @torch.no_grad()
    def move(self, start: Snapshot, end: Snapshot, fraction: float) -> None:
        for name, parameter in self.policy.parameters().items():
            origin = start.parameters[name]
            parameter.copy_(origin + fraction * (end.parameters[name] - origin))
        self._touched()

    @torch.no_grad()
    def perturb(self, relative: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        parameters = self.policy.parameters().values()
        sizes = [float(p.float().square().mean().sqrt()) for p in parameters]
        typical = float(np.sqrt(np.mean(np.square(sizes))))
        for parameter, size in zip(parameters, sizes, strict=True):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter)
            # A fresh adapter's second factor is all zeros: without a size of its own it takes the others'.
            parameter.add_(noise, alpha=relative * (size or typical))
        self._touched()

    # -- disk -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.policy.save_weights(folder)
        moments = self.snapshot().moments
        save_file({k: t.contiguous().cpu() for k, t in moments.items()}, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps(asdict(self.state), indent=1) + "\n")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self.policy.load_weights(folder)
        moments = load_file(folder / "optimizer.safetensors")
        self._steps = int(moments.pop("steps"))
        self._moments = {k: t.to(self.policy.device) for k, t in moments.items()}
        self.state = AgentState(**json.loads((folder / "state.json").read_text()))
        self._touched()


def hash_tensors(tensors: Mapping[str, Tensor], salt: str = "") -> str:
    """A hash of names and bits."""
    digest = hashlib.blake2b(salt.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _token_logp(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    return torch.log_softmax(logits_NV, dim=-1).gather(-1, ids_N[:, None]).squeeze(-1)


def _packed_ids(batch: AgentBatch, device: torch.device) -> Tensor:
    packed: Ids = np.concatenate(batch.messages) if len(batch) else np.zeros(0, dtype=np.int32)
    return torch.as_tensor(packed, dtype=torch.long, device=device)


def _pad(values_N: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Packed tokens to [M, T] with a mask that comes from lengths, never from ids."""
    padded_MT = torch.nn.utils.rnn.pad_sequence(list(values_N.split(lengths)), batch_first=True)
    lengths_M = torch.tensor(lengths, device=values_N.device)
    mask_MT = torch.arange(padded_MT.shape[1], device=values_N.device)[None] < lengths_M[:, None]
    return padded_MT, mask_MT
