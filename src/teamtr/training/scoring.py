"""The old policy on the batch of its update: who scores it, the learner or the sampler that drew the messages, and how
much KL shows that no step made.

Sampling a token computes the very features that its score is made of, with the same weights in the sampler's
arithmetic. An update may take them instead of computing them again; they are then the policy that ratios and KLs are
measured from. Before that the error of it is measured, in the unit of the radius:

- the learner's own law beside theirs, exactly, on the messages of the noise floor (``mismatch_kl``); the floor is then
  measured from them, and has this in it;
- what they say of every token of the batch beside what the sampler said when it drew it: features of another message,
  or spoiled ones, show here.

Where the two together are more than the share of the radius that a noise floor may have, the learner computes its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from teamtr.ports import Learner, Snapshot
from teamtr.presets import Radii
from teamtr.randomness import generator, seed_of
from teamtr.reports import NOTHING_KEPT
from teamtr.theory.kl import kl_k3, pairwise_sum_per_message, per_message_sum
from teamtr.training.batch import TrainingBatch
from teamtr.types import Floats

VERIFIABLE_SHARE = 0.1
"""A noise floor above this share of the radius makes an update unverifiable."""

FLOOR_PERTURBATION = 1e-6
FLOOR_MESSAGES = 16
"""Rounding is alike in all messages of a batch: a few tell."""


@dataclass(frozen=True)
class OldScores:
    """The frozen policy on its batch: log p of each message, and the KL that rounding alone shows.

    ``mismatch_kl``, ``sampler_scored`` and ``own_scores`` are as in ``UpdateReport``. Where a log-probability is not
    finite nothing else was measured.
    """

    logp_M: Floats
    noise_floor: float = float("nan")
    mismatch_kl: float | None = None
    sampler_scored: int = 0
    own_scores: str = ""

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.logp_M).all())


def score_old(
    learner: Learner,
    data: TrainingBatch,
    before: Snapshot,
    radii: Radii,
    radius: float,
    *,
    reference: bool,
    from_sampler: bool,
    seed: int,
) -> OldScores:
    """Freeze the policy on its batch, and measure the floor. ``before`` are its weights, which stay as they were."""
    scores = OldScores(learner.begin(data.messages, reference=reference, from_sampler=from_sampler))
    found = learner.sampler_scored if from_sampler else 0
    if scores.finite:
        apart = _apart(learner, data, radii, floor_rows(data, seed)) if found else None
        scores = replace(scores, noise_floor=noise_floor(learner, data, before, radii, seed=seed), mismatch_kl=apart)
    if not found:
        return replace(scores, own_scores=NOTHING_KEPT if from_sampler else "")
    why = _too_far(learner, data, radii, radius, scores)
    if not why:
        return replace(scores, sampler_scored=found)
    own = score_old(learner, data, before, radii, radius, reference=reference, from_sampler=False, seed=seed)
    return replace(own, mismatch_kl=scores.mismatch_kl, own_scores=why)


def _too_far(learner: Learner, data: TrainingBatch, radii: Radii, radius: float, scores: OldScores) -> str:
    """Why the sampler's features cannot stand for the old policy; empty where they can."""
    if not scores.finite:
        return "the sampler's features give log-probabilities that are not finite"
    floor, astray = scores.noise_floor, _astray(learner, data, radii)
    if floor + astray <= VERIFIABLE_SHARE * radius:
        return ""
    return (
        f"on the sampler's features, unmoved weights have a KL of {floor:.2g}, and what it said of its tokens one of "
        f"{astray:.2g}: together more than a tenth of the radius {radius:.2g}"
    )


def noise_floor(learner: Learner, data: TrainingBatch, before: Snapshot, radii: Radii, *, seed: int) -> float:
    """KL, in the unit of the radius, that rounding alone shows, after a negligible perturbation of the weights.

    Re-batching the same weights shows nothing; a perturbation does (docs/performance.md, "Precision"). Leaves the
    weights as they were, bit for bit.
    """
    learner.perturb(FLOOR_PERTURBATION, seed_of(seed, "perturb"))
    floor = _apart(learner, data, radii, floor_rows(data, seed))
    learner.restore(before)
    return floor


def _apart(learner: Learner, data: TrainingBatch, radii: Radii, rows: np.ndarray) -> float:
    """From the frozen policy to the present one on some messages, in the unit of the radius."""
    return float(data.kl_in_radius_units(learner.measure(rows).full_M, radii, rows).mean())


def floor_rows(data: TrainingBatch, seed: int) -> np.ndarray:
    """The messages that a floor is measured on."""
    return np.sort(generator(seed, "floor").permutation(len(data.messages))[:FLOOR_MESSAGES])


def _astray(learner: Learner, data: TrainingBatch, radii: Radii) -> float:
    """KL from what the sampler said of its tokens to what the frozen policy says of them, over all messages: the
    estimate of ``kl_k3``, which is never negative, so that nothing cancels."""
    said_N: Floats = np.concatenate(data.messages.sampler_logprobs).astype(np.float64)
    apart_N = kl_k3(said_N, np.concatenate(learner.token_logprobs()))
    apart_M = per_message_sum(apart_N, data.messages.lengths_M)
    return float(data.kl_in_radius_units(apart_M, radii).mean())


def mismatch(learner: Learner, data: TrainingBatch) -> dict[str, Any]:
    """How far the log-probabilities of the sampler and of the frozen policy are apart: a diagnostic, never a step."""
    gap_N = np.concatenate(learner.token_logprobs()) - np.concatenate(data.messages.sampler_logprobs)
    tokens_N = np.abs(gap_N)
    return {
        "mismatch_sampler": float(tokens_N.mean()),
        "mismatch_median": float(np.median(tokens_N)),
        "mismatch_largest": float(tokens_N.max()),
        "mismatch_per_message": float(np.median(np.abs(pairwise_sum_per_message(gap_N, data.messages.lengths_M)))),
    }
