"""What only the engine can tell of an update: would stale rollouts have fooled it, and which tokens did it move?

After an update the agent is put back to its old weights, frozen there on the messages in question, and brought forward
again: two scoring passes per probe, booked under their own phase. Weights, moments and state end as they were, to the
bit. Probes run on the stages that ``diagnostics.every`` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from teamtr.diagnostics.degeneracy import Degeneracy, weight_degeneracy
from teamtr.ports import Learner
from teamtr.theory.advantages import Advantages
from teamtr.theory.surrogate import surrogate_gain
from teamtr.types import AgentBatch, Floats, TokenShift

SHIFT_MESSAGES = 64


@dataclass(frozen=True)
class StaleProbe:
    """One update seen from the stage's first rollouts (fig:occ-gap, tab:is-degeneracy).

    ``stale`` is the surrogate of the step on the stage's first batch, ``fresh`` on the batch it learned from; their
    distance is one term of Delta_stale. ``weights`` are the trajectory weights that would carry the first batch to the
    team *before* this update; None at the first step, where there is nothing to carry.
    """

    fresh: float
    stale: float
    weights: Degeneracy | None

    @property
    def gap(self) -> float:
        return abs(self.fresh - self.stale)


def log_ratios(learner: Learner, before: Any, after: Any, batch: AgentBatch) -> Floats:
    """log after(m) - log before(m) of every message, the learner left at ``after``."""
    learner.restore(before)
    learner.begin(batch)
    try:
        learner.restore(after)
        return learner.measure().log_ratio_M
    finally:
        learner.end()
        learner.restore(after)


def stale_probe(
    learner: Learner,
    before: Any,
    after: Any,
    first: AgentBatch,
    advantages: Advantages,
    fresh: float,
    log_weights_E: Floats,
) -> tuple[StaleProbe, Floats]:
    """The probe of one update, and the trajectory log-weights that carry the first batch past it.

    Args:
        first: this agent's messages in the stage's first batch.
        advantages: of that batch.
        fresh: the surrogate of the step on the batch that it learned from.
        log_weights_E: what carries the first batch to the team before this update (zeros at the first step).
    """
    ratio_M = log_ratios(learner, before, after, first)
    values_M = advantages.values_PG.reshape(-1)[first.episode_M]
    known = np.isfinite(values_M)
    stale = surrogate_gain(ratio_M[known], values_M[known]) if known.any() else float("nan")
    weights = weight_degeneracy(log_weights_E) if log_weights_E.any() else None
    carried_E = log_weights_E + np.bincount(first.episode_M, weights=ratio_M, minlength=len(log_weights_E))
    return StaleProbe(fresh, stale, weights), carried_E


def token_shift(learner: Learner, before: Any, after: Any, batch: AgentBatch, rng: np.random.Generator) -> TokenShift:
    """By rank before the update, what the update did to tokens (fig:logit-vocab), on some of the messages."""
    rows = np.sort(rng.permutation(len(batch))[:SHIFT_MESSAGES])
    learner.restore(before)
    learner.begin(batch.rows(rows))
    try:
        learner.restore(after)
        return learner.token_shift()
    finally:
        learner.end()
        learner.restore(after)
