"""Importance weights of episodes that an older team wrote, app:exp:isdeg: how to weigh by them, and what is left.

An episode weighs as much as the present team is likelier to say it: the product, over its messages, of the speaker's
new probability to its old one. Which part of the product a quantity needs, ``RolloutBatch`` tells apart:

- a return, and so an advantage and a surrogate, needs all of it: the messages before decide in which context an agent
  spoke, those after it what came of it;
- a KL needs the messages before it alone: what comes later does not change it, and would only add noise.

"Per-decision" weights, the past for the baseline and all for the return, are as right and vary more on average; the
past alone is wrong for a return (tests/statistical/test_kinds_of_weights.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats

MOST = 4.0
"""No episode counts more than this many times. A rare message that an update has made a thousand times likelier would
otherwise outweigh all others together: one in 256 messages of a language model did, at a KL of 0.055 nats."""


@dataclass(frozen=True)
class Weights:
    """Truncated weights of mean one. ``cut`` estimates the share of the present team's conversations that they leave
    out: the weighted mean of any quantity with values in an interval is wrong by at most ``cut`` times its length, but
    for chance."""

    values_E: Floats
    cut: float


def truncated_weights(log_weights_E: Floats) -> Weights:
    """The smaller of each weight and ``MOST``, normalized.

    Weights have mean one under the team that wrote the episodes, so that what is missing to one was cut off.
    """
    bounded_E = np.exp(np.minimum(log_weights_E, math.log(MOST)))
    mean = float(bounded_E.mean())
    if not mean > 0.0:  # the present team never says any of these
        return Weights(np.ones_like(bounded_E), 1.0)
    return Weights(np.asarray(bounded_E / mean), max(0.0, 1.0 - mean))


def normalized_weights(log_weights_E: Floats) -> Floats:
    """exp(log w) with mean one. Computed relative to the largest, so that nothing overflows."""
    shifted_E = np.exp(log_weights_E - log_weights_E.max())
    return np.asarray(shifted_E / shifted_E.mean())


def effective_sample_share(log_weights_E: Floats) -> float:
    """ESS / B of the weights as they are, not truncated."""
    return share_of(normalized_weights(log_weights_E))


def share_of(weights_E: Floats) -> float:
    """ESS / B = (sum w)^2 / (B sum w^2): one when all weights are equal, 1/B when one episode carries all, and one for
    no episodes at all."""
    if len(weights_E) == 0:
        return 1.0
    return float(weights_E.sum() ** 2 / (len(weights_E) * (weights_E**2).sum()))


def share_worth_keeping(price: float) -> float:
    """The effective share from which on a batch gains more for its cost than a new one would.

    ``price`` is what sampling a new batch costs, in units of the update that is made from it. The step has a given
    length (the radius), so what it gains depends on its direction; while noise rules that, a batch that is worth a
    share s of a fresh one gains at least sqrt(s) as much (the more signal there is, the nearer to 1). Keeping it is the
    better buy where sqrt(s) / 1 > 1 / (1 + price).
    """
    if not price >= 0.0:
        raise ValueError(f"share_worth_keeping: the price of sampling is at least 0, got {price}")
    return 1.0 / (1.0 + price) ** 2


@dataclass(frozen=True)
class Degeneracy:
    """Of the weights w of B episodes: ESS / B, high percentiles, the largest, and Pr[w > 10].

    ``total_variation`` is D_occ by importance weights, with its standard error: the total variation between the laws of
    whole conversations under the two teams, E max(0, 1 - w), which bounds that of every context in them from above.
    It needs no context to repeat, and each term lies in [0, 1] however heavy the weights' tail is.
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
    """From trajectory log-weights; one that is not finite is an error, never a figure."""
    logs = np.asarray(log_weights_E, dtype=np.float64)
    if logs.ndim != 1 or not logs.size or not np.isfinite(logs).all():
        raise ValueError(f"weight_degeneracy needs finite log-weights, one per episode, got shape {logs.shape}")
    weights = np.exp(np.minimum(logs, 700.0))  # beyond that a float64 overflows, and nothing is left to tell apart
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
