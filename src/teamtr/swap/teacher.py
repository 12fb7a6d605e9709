"""The old agent as a frozen reference that a learner of the new one can follow (app:align)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from teamtr.engines.learner import PolicyLearner, Reference
from teamtr.engines.policy import Head
from teamtr.swap.probes import Probes

_NEVER = -1e4
"""A logit whose probability is exactly 0. Not minus infinity: the fused kernel reads logits block by block, and a whole
block of minus infinity has no largest."""


def reference_of(teacher: PolicyLearner, student: PolicyLearner, probes: Probes) -> Reference:
    """What the student is measured from: the teacher's policy, or, where the two spell differently, what it said."""
    vocabulary = _vocabulary(student, probes)
    if not probes.exact:
        return _said(probes, vocabulary, student.policy.device)
    frozen = teacher.freeze(probes.old)
    return replace(frozen, batch=probes.new, head=fitted_head(frozen.head, vocabulary))


def fitted_head(head: Head, vocabulary: int) -> Head:
    """The teacher's logits over the student's ids: models pad their output layers to different sizes.

    What the teacher lacks it never says; what the student lacks no tokenizer writes, and its mass is left out.
    """

    def fitted(features_NH: Tensor) -> Tensor:
        logits_NV = head(features_NH)
        missing = vocabulary - logits_NV.shape[-1]
        if missing <= 0:
            return logits_NV[:, :vocabulary]
        return torch.nn.functional.pad(logits_NV, (0, missing), value=_NEVER)

    return fitted


@torch.no_grad()
def _vocabulary(student: PolicyLearner, probes: Probes) -> int:
    part, policy = probes.new.rows([0]), student.policy
    with policy.computing():
        return int(policy.head()(policy.features(part.prompts, part.messages)[:1]).shape[-1])


def _said(probes: Probes, vocabulary: int, device: torch.device) -> Reference:
    """A teacher that says each message for certain: the KL from it is the cross-entropy."""

    def certain(ids_N1: Tensor) -> Tensor:
        logits_NV = torch.full((len(ids_N1), vocabulary), _NEVER, device=ids_N1.device)
        return logits_NV.scatter_(-1, ids_N1.long(), 0.0)

    ids = [torch.as_tensor(m, dtype=torch.int64, device=device)[:, None] for m in probes.new.messages]
    return Reference(probes.new, ids, certain, [torch.zeros(len(i), device=device) for i in ids])
