"""Scores the old policy on the batch of its update, and measures the noise floor of scoring.

The learner computes the features (last hidden states) of the batch, or reuses those of the sampler that drew the
messages: sampling a token computes the same features as scoring it, with the same weights in the sampler's arithmetic.
If it reuses them, ratios and KLs are measured from the policy that they define. The error of doing so is measured
first, in the unit of the radius:

- the exact KL between that policy and the learner's own, on the messages of the noise floor (``mismatch_kl``). The
  floor is then measured from the sampler's features, and includes this KL.
- the KL between the log-probabilities from these features and those that the sampler reported when it drew the tokens,
  over every token of the batch. Features of another message, or corrupted ones, show here.

If the two together exceed the share of the radius allowed to a noise floor, the learner computes its own features.
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
"""Rounding is alike in all messages of a batch, so a few are enough."""


@dataclass(frozen=True)
class OldScores:
    """The frozen policy on its batch: log p of each message, and the KL that rounding alone causes.

    ``mismatch_kl``, ``sampler_scored`` and ``own_scores`` are as in ``UpdateReport``. If a log-probability is not
    finite, nothing else is measured.
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
    """Freeze the policy on its batch and measure the noise floor. ``before`` holds its weights, which end unchanged."""
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
    """Why the sampler's features cannot be used for the old policy; empty if they can."""
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
    """KL caused by rounding alone, in the unit of the radius, measured after a negligible perturbation of the weights.

    Re-batching with the same weights does not reveal it; a perturbation does (docs/performance.md, "Precision").
    Restores the weights bit for bit.
    """
    learner.perturb(FLOOR_PERTURBATION, seed_of(seed, "perturb"))
    floor = _apart(learner, data, radii, floor_rows(data, seed))
    learner.restore(before)
    return floor


def _apart(learner: Learner, data: TrainingBatch, radii: Radii, rows: np.ndarray) -> float:
    """Mean KL from the frozen policy to the current one on some messages, in the unit of the radius."""
    return float(data.kl_in_radius_units(learner.measure(rows).full_M, radii, rows).mean())


def floor_rows(data: TrainingBatch, seed: int) -> np.ndarray:
    """The messages on which a noise floor is measured."""
    return np.sort(generator(seed, "floor").permutation(len(data.messages))[:FLOOR_MESSAGES])


def _astray(learner: Learner, data: TrainingBatch, radii: Radii) -> float:
    """KL from the sampler's reported log-probabilities to those of the frozen policy, over all messages. Estimated by
    ``kl_k3``, which is never negative, so that errors do not cancel."""
    said_N: Floats = np.concatenate(data.messages.sampler_logprobs).astype(np.float64)
    apart_N = kl_k3(said_N, np.concatenate(learner.token_logprobs()))
    apart_M = per_message_sum(apart_N, data.messages.lengths_M)
    return float(data.kl_in_radius_units(apart_M, radii).mean())


def mismatch(learner: Learner, data: TrainingBatch) -> dict[str, Any]:
    """Differences between log-probabilities of the sampler and of the frozen policy: a diagnostic, used in no step."""
    gap_N = np.concatenate(learner.token_logprobs()) - np.concatenate(data.messages.sampler_logprobs)
    tokens_N = np.abs(gap_N)
    return {
        "mismatch_sampler": float(tokens_N.mean()),
        "mismatch_median": float(np.median(tokens_N)),
        "mismatch_largest": float(tokens_N.max()),
        "mismatch_per_message": float(np.median(np.abs(pairwise_sum_per_message(gap_N, data.messages.lengths_M)))),
    }
