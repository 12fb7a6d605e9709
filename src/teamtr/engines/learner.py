"""The Learner port over a ``Policy``: trains one policy of any kind.

Log-probabilities before and after an update are computed by the same engine. Those before it may be computed from
features of the sampler, taken with the same weights, where this is requested and their error was measured (``begin``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from teamtr.answers import Divergence, StepStats, TokenShift, ValueStats
from teamtr.batches import AgentBatch, Verified
from teamtr.engines import measuring
from teamtr.engines.critic import Critic
from teamtr.engines.gradients import Gathered, LossPart, added, gather_in_lockstep, gather_shards
from teamtr.engines.hashing import hash_tensors
from teamtr.engines.kept import KeptFeatures
from teamtr.engines.optim import MOMENTS, Adam, weight_of
from teamtr.engines.passes import WHOLE, Padding, Passes, Reference, by_message, forget_gradients, off_device, packed
from teamtr.engines.policy import Policy, Recompute
from teamtr.engines.saving import CRITIC_FILE, OPTIMIZER_FILE, LearnerFiles, fingerprint_of
from teamtr.engines.shards import Rows, Shards
from teamtr.engines.slices import cut, joined, own, whole
from teamtr.engines.stored import load_parts
from teamtr.engines.transfer import off_the_card, send
from teamtr.ports import Snapshot
from teamtr.theory.kl import pairwise_sum_per_message
from teamtr.theory.objective import Objective
from teamtr.theory.surrogate import clipped_surrogate, reference_kl, surrogate_denominator
from teamtr.theory.value_loss import clipped_value_loss
from teamtr.types import Floats


@dataclass(frozen=True)
class Saved:
    """Weights, optimizer moments and the critic's state, cloned: what a ``Snapshot`` of this engine holds."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    critic: dict[str, Tensor] | None = None


class PolicyLearner:
    """Trains a policy with Adam and holds the frozen reference that ratios and KLs are measured against.

    ``keep_initial``: keep a copy of the current trainable parameters in host memory, for objectives with a
    ``reference_kl``. ``critic``: have a critic, for advantages per token. ``kept_bytes``: most memory for features that
    sampling computes of the agent's messages (``keep_scores``).
    """

    def __init__(
        self,
        agent: str,
        policy: Policy,
        *,
        micro_batch: int = 64,
        recompute: Recompute = "auto",
        betas: tuple[float, float] = (0.9, 0.99),
        max_grad_norm: float = 1.0,
        keep_initial: bool = False,
        critic: bool = False,
        shards: Shards = WHOLE,
        kept_bytes: int = 0,
    ) -> None:
        self.agent = agent
        self.policy = policy
        self.passes = Passes(agent, policy, micro_batch, shards, recompute)
        self.tokens = self.passes.tokens
        self.max_grad_norm = max_grad_norm
        self.optimizer = Adam(betas)
        self.critic = Critic(policy.value_head(), betas) if critic else None
        self.kept = KeptFeatures(kept_bytes)
        self.sampler_scored = 0
        self._reference: Reference | None = None
        self._version: str | None = None
        self._initial: dict[str, Tensor] | None = None
        self.initial_version: str | None = None
        """A hash of the policy that ``keep_initial`` kept; None without it."""
        if keep_initial:
            self._initial = policy.initial_parameters()
            like = policy.parameters()
            self.initial_version = hash_tensors(self._initial, salt=policy.base_version, like=like)

    # -- identity ---------------------------------------------------------------------------------------------

    def version(self) -> str:
        if self._version is None:
            self._version = hash_tensors(self.policy.parameters(), salt=self.policy.base_version)
        return self._version

    def fingerprint(self) -> str:
        """A hash of everything that ``save`` writes."""
        moments = hash_tensors(self.optimizer.moments, like=self._of_moments())
        critic = None if self.critic is None else self.critic.fingerprint()
        return fingerprint_of(self.version(), moments, self.optimizer.counters(), critic)

    def _touched(self) -> None:
        self._version = None

    def _of_moments(self) -> dict[str, Tensor]:
        """The weight that each of the optimizer's moments belongs to, by the moment's name."""
        weights = self.policy.parameters()
        return {name: weights[weight_of(name)] for name in self.optimizer.moments}

    # -- the frozen policy ------------------------------------------------------------------------------------

    def keep_scores(self, on: bool) -> None:
        """Starts or stops keeping the features that sampling computes of this agent's messages."""
        self.policy.keep_features(self.kept.put if on else None)

    def begin(self, batch: AgentBatch, *, reference: bool = False, from_sampler: bool = False) -> Floats:
        if not from_sampler:
            self.kept.clear()  # not needed any more
        initial = self._under_initial(batch) if reference else None  # first, to hold one policy's features at a time
        found = self._found(batch) if from_sampler else {}
        self.sampler_scored = len(found)
        frozen = replace(self.passes.freeze(batch, found), initial=initial)
        self.follow(frozen if self.critic is None else replace(frozen, values=self._values(self.critic, frozen)))
        return pairwise_sum_per_message(off_device(frozen.logp), batch.lengths_M)

    def _found(self, batch: AgentBatch) -> dict[int, Tensor]:
        """Features that sampling computed with the current weights, for the rows of this process."""
        version, found = self.version(), {}
        for _, rows in self.passes.shards.split_own(batch, np.arange(len(batch))):
            for row in rows.tolist():
                features_TH = self.kept.find(version, batch.prompts[row], batch.messages[row])
                if features_TH is not None:
                    found[row] = features_TH
        return found

    @torch.no_grad()
    def _under_initial(self, batch: AgentBatch) -> list[Tensor]:
        """Token log-probabilities under the policy that the learner started with. The current weights are restored bit
        for bit."""
        if self._initial is None:
            raise RuntimeError("this learner was made without keep_initial: it has no reference policy")
        parameters = {name: own(parameter) for name, parameter in self.policy.parameters().items()}
        present = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.copy_(self._initial[name])
            return self.passes.freeze(batch).logp
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(present[name])

    def follow(self, reference: Reference) -> None:
        """Measures from this policy from now on: the learner's own as it was, or another's (app:align)."""
        self.optimizer.to(self.policy.device)
        if self.critic is not None:
            self.critic.optimizer.to(self.policy.device)
        self._reference = reference

    def end(self) -> None:
        """Drops the frozen policy. Only the agent being updated keeps its optimizer's moments on the GPU."""
        self._reference = None
        if self.policy.device.type != "cpu":
            self.optimizer.leave_the_card()
            if self.critic is not None:
                self.critic.optimizer.leave_the_card()

    def token_logprobs(self) -> list[Floats]:
        """Token log-probabilities of the frozen policy, per message."""
        reference = self._require()
        return by_message(reference.logp, reference.batch)

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
        stats = self._accumulate(rows, advantages, objective, beta)
        if stats.applied:
            shrink = min(1.0, self.max_grad_norm / (stats.grad_norm + 1e-12))
            self.optimizer.step(self.policy.parameters(), shrink, learning_rate)
            self._touched()
        forget_gradients(self.policy)
        return stats

    def _accumulate(
        self, rows: NDArray[np.int64], advantages: Floats | Sequence[Floats], objective: Objective, beta: float
    ) -> StepStats:
        """Accumulates the gradient of the whole step over micro-batches, the largest first, so that a step that does
        not fit into memory fails at once."""
        reference = self._require()
        initial = reference.initial if objective.has_reference else None
        if objective.has_reference and initial is None:
            raise RuntimeError("call begin(batch, reference=True) first: the objective has a KL to the initial policy")
        denominator = surrogate_denominator(reference.batch.lengths_M[rows], objective.average_over)
        position = {int(row): k for k, row in enumerate(rows)}

        def forward(part: Rows) -> LossPart:
            scored = self.passes.score(reference, part)
            pad = Padding.of(scored.lengths, scored.logp_N.device)
            logp_new_MT, mask_MT = pad(scored.logp_N), pad.mask_MT
            logp_cur_MT = pad(packed(reference.logp, part))
            own = send(_chosen(advantages, [position[int(i)] for i in part]), logp_new_MT.device)
            own = own if isinstance(advantages, np.ndarray) else pad(own)
            gain = clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, own.to(logp_new_MT.dtype), objective)
            kl_sum = scored.kl_N.sum()
            loss = beta * kl_sum / len(rows) - gain.total / denominator
            counted = [gain.total, kl_sum, gain.clipped, gain.ratios]
            if initial is not None:
                logp_ref_MT = pad(packed(initial, part))
                drift = reference_kl(logp_new_MT, logp_ref_MT, mask_MT, objective.average_over)
                loss = loss + objective.reference_kl * drift / denominator
                counted.append(drift)
            return LossPart(loss, torch.stack([x.detach().double() for x in counted]))

        parameters, shards = list(self.policy.parameters().values()), self.passes.shards

        def gathered() -> dict[int, Gathered]:
            parts = self.passes.own_shards(reference.batch, rows)
            if not shards.lockstep:
                return gather_shards(parts, shards, forward, parameters, self._scale(), self.policy.computing)
            counts = self.passes.counts(reference.batch, rows)
            idly, computing = self.passes.pass_idly, self.policy.computing
            return gather_in_lockstep(parts, counts, shards, forward, idly, parameters, self._scale(), computing)

        forget_gradients(self.policy)
        by_shard = self.passes.fitting(gathered)
        found = added(by_shard, shards, self._shards_of(rows), parameters, 4 if initial is None else 5)
        total, kl_total, clipped, ratios, *drift = found.sums
        if found.finite and found.scale < self._scale():
            self.optimizer.lower_scale(found.scale)
        clip_rate = clipped / ratios if ratios else 0.0
        kl_reference = drift[0] / denominator if drift else None
        return StepStats(found.finite, total / denominator, kl_total / len(rows), found.norm, clip_rate, kl_reference)

    def _shards_of(self, rows: Rows) -> list[int]:
        return [shard for shard, _ in self.passes.shards.split(self._require().batch, rows)]

    def _scale(self) -> float:
        """The loss scale: 1 except in float16."""
        return self.optimizer.loss_scale if self.policy.precision == "fp16" else 1.0

    # -- the critic -------------------------------------------------------------------------------------------

    def values(self) -> list[Floats]:
        """The critic's value before each token under the frozen policy, per message."""
        reference = self._require()
        if reference.values is None:
            raise RuntimeError("this learner was made without a critic: it has no values")
        return by_message(reference.values, reference.batch)

    @torch.no_grad()
    def _values(self, critic: Critic, frozen: Reference) -> list[Tensor]:
        values: dict[int, Tensor] = {}
        for rows in self.passes.own_parts(frozen.batch, np.arange(len(frozen.batch))):
            part = frozen.batch.rows(rows)
            value_N = critic.head.values(packed(frozen.features, rows), part.prompts, part.messages)
            values.update(zip(rows.tolist(), value_N.split(part.lengths_M.tolist()), strict=True))
        return self.passes.of_all_rows(values, frozen.batch)

    def fit_values(
        self, rows: NDArray[np.int64], targets: Sequence[Floats], *, clip: float, learning_rate: float
    ) -> ValueStats:
        """One Adam step of the critic on the frozen features of the rows, without a pass through the policy."""
        reference, critic = self._require(), self.critic
        if critic is None or reference.values is None:
            raise RuntimeError("this learner was made without a critic: there is nothing to fit")
        old, position = reference.values, {int(row): k for k, row in enumerate(rows)}
        tokens = sum(len(target_T) for target_T in targets)
        parameters = critic.head.parameters()

        def forward(part: Rows) -> LossPart:
            batch = reference.batch.rows(part)
            new_N = critic.head.values(packed(reference.features, part), batch.prompts, batch.messages)
            target_N = send(_chosen(targets, [position[int(i)] for i in part]), new_N.device).to(new_N.dtype)
            total, clipped = clipped_value_loss(new_N, packed(old, part), target_N, clip)
            return LossPart(total / tokens, torch.stack([total.detach().double(), clipped.double()]))

        shards, weights = self.passes.shards, list(parameters.values())
        parts = self.passes.own_shards(reference.batch, rows)
        by_shard = gather_shards(parts, shards, forward, weights, 1.0, nullcontext)
        found = added(by_shard, shards, self._shards_of(rows), weights, 2)
        loss, outside = found.sums
        if found.finite:
            critic.optimizer.step(parameters, min(1.0, self.max_grad_norm / (found.norm + 1e-12)), learning_rate)
        critic.forget_gradients()
        return ValueStats(found.finite, loss / tokens, outside / tokens)

    # -- measuring --------------------------------------------------------------------------------------------

    def measure(self, rows: NDArray[np.int64] | None = None) -> Divergence:
        return measuring.measure(self.passes, self._require(), rows)

    def token_kls(self) -> list[Floats]:
        return measuring.token_kls(self.passes, self._require())

    def verify(self, noise_N: Floats, noise_M: Floats) -> Verified:
        return measuring.verify(self.passes, self._require(), noise_N, noise_M)

    def token_shift(self) -> TokenShift:
        return measuring.token_shift(self.passes, self._require())

    # -- going back -------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        parameters = {k: own(p).detach().clone() for k, p in self.policy.parameters().items()}
        critic = None if self.critic is None else self.critic.state()
        return Snapshot(Saved(parameters, self.optimizer.state(), critic))

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        saved = _saved(snapshot)
        for name, parameter in self.policy.parameters().items():
            own(parameter).copy_(saved.parameters[name])
        # The moments of a snapshot may be in host memory.
        self.optimizer.restore({k: t.clone().to(self.policy.device) for k, t in saved.moments.items()})
        if self.critic is not None and saved.critic is not None:
            self.critic.restore(saved.critic)
        self._touched()

    @torch.no_grad()
    def move(self, start: Snapshot, end: Snapshot, fraction: float) -> None:
        origin, target = _saved(start).parameters, _saved(end).parameters
        for name, parameter in self.policy.parameters().items():
            own(parameter).copy_(origin[name] + fraction * (target[name] - origin[name]))
        self._touched()

    @torch.no_grad()
    def perturb(self, relative: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        parameters = self.policy.parameters().values()
        sizes = torch.stack([whole(p).float().square().mean().sqrt() for p in parameters]).tolist()
        typical = float(np.sqrt(np.mean(np.square(sizes))))
        for parameter, size in zip(parameters, sizes, strict=True):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            here = own(parameter)
            # A fresh adapter's second factor is all zeros and has no size of its own: use that of the others.
            here.add_(cut(noise, parameter).to(here), alpha=relative * (size or typical))
        self._touched()

    # -- disk -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """With partitioned weights, all processes must call this, and one of them writes."""
        files = self._files()
        if self.passes.shards.writes:
            files.save(folder)

    def set_aside(self) -> LearnerFiles | None:
        return None if self.passes.shards.lockstep else self._files()

    def _files(self) -> LearnerFiles:
        """The learner's state at this moment. Tensors that are in host memory already are not copied, because only an
        update changes them."""
        write, moments = self.passes.shards.writes, {}
        for name, weight in self._of_moments().items():
            moment = joined(self.optimizer.moments[name], weight)
            if write:  # other processes need not keep the whole tensor
                moments[name] = moment.cpu()
        critic = None if self.critic is None else off_the_card(self.critic.state())
        write_weights = self.policy.to_write(write=write)
        return LearnerFiles(self.version(), write_weights, moments, self.optimizer.counters(), critic)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self.policy.load_weights(folder)
        weights = self.policy.parameters()
        of_moments = {f"{kind}.{name}": weight for kind in MOMENTS for name, weight in weights.items()}
        self.optimizer.restore(load_parts(folder / OPTIMIZER_FILE, of_moments))
        if self.critic is not None:
            self.critic.restore(load_file(folder / CRITIC_FILE))
        self._touched()


def _saved(snapshot: Snapshot) -> Saved:
    assert isinstance(snapshot, Saved), "a snapshot of another engine"
    return snapshot


def _chosen(values: Floats | Sequence[Floats], places: Sequence[int]) -> Floats:
    """The numbers of these messages: one per message, or one per token, concatenated."""
    if isinstance(values, np.ndarray):
        return np.asarray(values[places])
    return np.concatenate([values[k] for k in places])
