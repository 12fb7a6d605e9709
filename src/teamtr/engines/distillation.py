"""A learner that follows another model (app:align): its frozen reference is the agent that it replaces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from teamtr.batches import AgentBatch
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.passes import Reference
from teamtr.engines.policy import Head
from teamtr.types import Floats

_NEVER = -1e4
"""A logit whose probability is exactly 0. It is finite, so that no KL has to handle minus infinity."""


class PolicyDistiller(PolicyLearner):
    """The Distiller port: shares the policy of the team's own learner and has its own optimizer."""

    def __init__(self, learner: PolicyLearner, teacher: PolicyLearner) -> None:
        super().__init__(
            learner.agent,
            learner.policy,
            micro_batch=learner.passes.micro_batch,
            recompute=learner.passes.recompute,
            betas=learner.optimizer.betas,
            max_grad_norm=learner.max_grad_norm,
        )
        self.teacher = teacher
        self._followed: Reference | None = None

    def use_probes(self, old: AgentBatch, new: AgentBatch, *, exact: bool) -> None:
        vocabulary = _vocabulary(self, new)
        if exact:
            frozen = self.teacher.passes.freeze(old)
            self._followed = replace(frozen, batch=new, head=fitted_head(frozen.head, vocabulary))
        else:
            self._followed = _said(new, vocabulary, self.policy.device)
        self.follow(self._followed)

    def load(self, folder: Path) -> None:
        super().load(folder)
        if self._followed is not None:
            self.follow(self._followed)

    def teacher_logprobs(self, batch: AgentBatch) -> Floats:
        try:
            return self.teacher.begin(batch)
        finally:
            self.teacher.end()


def fitted_head(head: Head, vocabulary: int) -> Head:
    """The teacher's logits over the student's vocabulary: models pad their output layers to different sizes.

    Ids that the teacher lacks get probability 0. Ids that the student lacks are produced by no tokenizer; their mass is
    dropped.
    """

    def fitted(features_NH: Tensor) -> Tensor:
        logits_NV = head(features_NH)
        missing = vocabulary - logits_NV.shape[-1]
        if missing <= 0:
            return logits_NV[:, :vocabulary]
        return torch.nn.functional.pad(logits_NV, (0, missing), value=_NEVER)

    return fitted


@torch.no_grad()
def _vocabulary(student: PolicyLearner, batch: AgentBatch) -> int:
    part, policy = batch.rows([0]), student.policy
    with policy.computing():
        return int(policy.head()(policy.features(part.prompts, part.messages)[:1]).shape[-1])


def _said(batch: AgentBatch, vocabulary: int, device: torch.device) -> Reference:
    """A teacher that gives every token of the messages probability 1, so that the KL from it is the cross-entropy."""

    def certain(ids_N1: Tensor) -> Tensor:
        logits_NV = torch.full((len(ids_N1), vocabulary), _NEVER, device=ids_N1.device)
        return logits_NV.scatter_(-1, ids_N1.long(), 0.0)

    ids = [torch.as_tensor(m, dtype=torch.int64, device=device)[:, None] for m in batch.messages]
    return Reference(batch, ids, certain, [torch.zeros(len(i), device=device) for i in ids])
