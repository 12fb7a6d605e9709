"""Importance weights of episodes written by an older team (app:exp:isdeg): truncation, normalization, effective share.

The weight of an episode is the product, over its messages, of the ratio of the speaker's new probability to its old
one. Different quantities need different parts of the product, which ``RolloutBatch`` provides:

- a return, hence an advantage and a surrogate, needs all of it: earlier messages determine the context in which an
  agent spoke, later messages the outcome;
- a KL needs only the messages before it: later ones do not change it, and would only add noise.

"Per-decision" weights, the past for the baseline and all for the return, are also correct but vary more on average; the
past alone is wrong for a return (tests/statistical/test_kinds_of_weights.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats

MOST = 4.0
"""The largest weight of an episode before normalization. A rare message that an update made a thousand times likelier
would otherwise outweigh all others together: one of 256 messages of a language model did, at a KL of 0.055 nats."""


@dataclass(frozen=True)
class Weights:
    """Truncated weights of mean one. ``cut`` estimates the share of the current team's distribution that truncation
    removes: the bias of the weighted mean of any bounded quantity is at most ``cut`` times its range."""

    values_E: Floats
    cut: float


def truncated_weights(log_weights_E: Floats) -> Weights:
    """Each weight truncated at ``MOST``, then normalized.

    Weights have mean one under the team that wrote the episodes, so the amount missing to one is what was cut.
    """
    bounded_E = np.exp(np.minimum(log_weights_E, math.log(MOST)))
    mean = float(bounded_E.mean())
    if not mean > 0.0:  # the current team never writes any of these
        return Weights(np.ones_like(bounded_E), 1.0)
    return Weights(np.asarray(bounded_E / mean), max(0.0, 1.0 - mean))


def normalized_weights(log_weights_E: Floats) -> Floats:
    """exp(log w) with mean one. Computed relative to the largest weight to avoid overflow."""
    shifted_E = np.exp(log_weights_E - log_weights_E.max())
    return np.asarray(shifted_E / shifted_E.mean())


def effective_sample_share(log_weights_E: Floats) -> float:
    """ESS / B of the weights without truncation."""
    return share_of(normalized_weights(log_weights_E))


def share_of(weights_E: Floats) -> float:
    """ESS / B = (sum w)^2 / (B sum w^2): one when all weights are equal, 1/B when one episode carries all, and one for
    no episodes at all."""
    if len(weights_E) == 0:
        return 1.0
    return float(weights_E.sum() ** 2 / (len(weights_E) * (weights_E**2).sum()))


def share_worth_keeping(price: float) -> float:
    """The effective share above which reusing a batch gains more for its cost than sampling a new one.

    ``price`` is the cost of sampling a new batch, in units of the cost of an update on it. The length of the step is
    fixed (the radius), so its gain depends on its direction. While noise dominates the direction, a batch with the
    effective share s gains at least sqrt(s) times what a fresh one does (closer to 1 with more signal). Reusing is
    better if sqrt(s) / 1 > 1 / (1 + price).
    """
    if not price >= 0.0:
        raise ValueError(f"share_worth_keeping: the price of sampling is at least 0, got {price}")
    return 1.0 / (1.0 + price) ** 2


@dataclass(frozen=True)
class Degeneracy:
    """Statistics of the weights w of B episodes: ESS / B, high percentiles, the largest, and Pr[w > 10].

    ``total_variation`` is D_occ by importance weights, with its standard error: the total variation between the
    distributions of whole conversations under the two teams, E max(0, 1 - w), an upper bound of that of every context
    in them. It does not require contexts to repeat, and each term lies in [0, 1] however heavy the weights' tail is.
    """

    episodes: int
    effective_share: float
    p95: float
    p99: float
    largest: float
    above_ten: float
    total_variation: float
    total_variation_error: float


def weight_degeneracy(log_weights_E: ArrayLike) -> Degeneracy:
    """Computes the statistics from trajectory log-weights; raises if one is not finite."""
    logs = np.asarray(log_weights_E, dtype=np.float64)
    if logs.ndim != 1 or not logs.size or not np.isfinite(logs).all():
        raise ValueError(f"weight_degeneracy needs finite log-weights, one per episode, got shape {logs.shape}")
    weights = np.exp(np.minimum(logs, 700.0))  # a float64 overflows soon beyond that
    lost = np.maximum(-np.expm1(np.minimum(logs, 0.0)), 0.0)
    p95, p99 = np.quantile(weights, [0.95, 0.99])
    return Degeneracy(
        episodes=len(logs),
        effective_share=effective_sample_share(logs),
        p95=float(p95),
        p99=float(p99),
        largest=float(weights.max()),
        above_ten=float((weights > 10.0).mean()),
        total_variation=float(lost.mean()),
        total_variation_error=float(lost.std() / np.sqrt(len(lost))),
    )
