"""Probes of an update that need the engine: its surrogate on stale rollouts, and its effect on single tokens.

After an update, the agent's old weights are restored and frozen on the messages in question, then the new weights are
restored. This takes a few scoring passes per probe, which are logged as a phase of their own. Weights, optimizer
moments and state end bit-identical. Probes run in the stages selected by ``diagnostics.every``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from teamtr.answers import TokenShift
from teamtr.batches import AgentBatch
from teamtr.ports import Learner, Snapshot
from teamtr.theory.advantages import Advantages
from teamtr.theory.gain import gain_by_message
from teamtr.theory.intervals import Measured, mean_interval
from teamtr.theory.weights import Degeneracy, weight_degeneracy
from teamtr.types import Floats

PROBED_MESSAGES = 64
SHOWN_POSITIONS = 2048
"""Maximum number of positions with individually logged values, in whole messages, for display in the report."""
STRETCH = 3.0
"""A step three times as long has about nine times the KL; it shows the effect of leaving the trust region."""

SHARES = (0.25, 0.5)
"""Shares of the positions, as in tab:kl-reliability."""
DRAWS = 20


@dataclass(frozen=True)
class Rollouts:
    """One agent's messages in a batch that no update was trained on, and the advantages of that batch."""

    messages: AgentBatch
    advantages: Advantages

    def gain_by_problem(self, log_ratio_M: Floats, problems: NDArray[np.int64]) -> Floats:
        """The surrogate gain of each problem, scaled so that the mean over problems is the mean over messages."""
        advantages_M = self.advantages.values_PG.reshape(-1)[self.messages.episode_M]
        problem_M = np.searchsorted(problems, self.messages.cluster_M)
        sums_P = np.bincount(problem_M, weights=gain_by_message(log_ratio_M, advantages_M), minlength=len(problems))
        return np.asarray(sums_P * len(problems) / len(self.messages))


@dataclass(frozen=True)
class StaleProbe:
    """One update evaluated on rollouts of the team that began the stage (fig:occ-gap, tab:is-degeneracy).

    ``stale`` is the surrogate of the step on a batch of that team, ``fresh`` on a batch of the team just before the
    update. No update was trained on either, so neither is biased towards the step. ``gap`` is fresh minus stale, paired
    by problem, with its interval; its absolute value is one term of Delta_stale. ``weights`` describes the trajectory
    weights that would correct the stale batch to the team before this update.
    """

    fresh: float
    stale: float
    gap: Measured
    weights: Degeneracy


@dataclass(frozen=True)
class Stretched:
    """The same step, ``times`` times as long: its exact KL per message, and the change of log-probabilities by rank."""

    times: float
    kl: float
    moved_R: list[float]
    flipped: float


@dataclass(frozen=True)
class Draws:
    """Sampled KLs per message, each from a random ``share`` of the token positions."""

    share: float
    k1: list[float]
    k3: list[float]


@dataclass(frozen=True)
class TokenKl:
    """The exact KL at each position of one message, the ``turn``-th of its episode."""

    episode: int
    turn: int
    kl: list[float]


@dataclass(frozen=True)
class SampledKl:
    """Sampled KLs per message of the probed messages, from all positions and from random shares, and the exact KL."""

    messages: int
    positions: int
    exact: float
    k1: float
    k3: float
    draws: tuple[Draws, ...]
    tokens: tuple[TokenKl, ...]


@dataclass(frozen=True)
class TokenProbe(TokenShift):
    """The effect of an update on single tokens."""

    stretched: Stretched
    sampled_kl: SampledKl


def log_ratios(learner: Learner, before: Snapshot, after: Snapshot, batch: AgentBatch) -> Floats:
    """log after(m) - log before(m) of every message. Leaves the learner at ``after``."""
    try:
        learner.restore(before)
        learner.begin(batch)
        learner.restore(after)
        return learner.measure().log_ratio_M
    finally:
        learner.restore(after)
        learner.end()  # last, because restoring moves the optimizer moments to the GPU


def stale_probe(
    learner: Learner, before: Snapshot, after: Snapshot, fresh: Rollouts, stale: Rollouts, log_weights_E: Floats
) -> StaleProbe | None:
    """The surrogate of one step on stale and on fresh rollouts; None if the agent is silent or there is one problem.

    Args:
        fresh: this agent's messages, sampled from the team just before the update.
        stale: the same, sampled from the team that began the stage, on the same problems.
        log_weights_E: trajectory log-weights from the stale batch to the team before this update.
    """
    problems = np.unique(np.concatenate([fresh.messages.cluster_M, stale.messages.cluster_M]))
    if len(problems) < 2 or not len(fresh.messages) or not len(stale.messages):
        return None
    fresh_P, stale_P = (
        rollouts.gain_by_problem(log_ratios(learner, before, after, rollouts.messages), problems)
        for rollouts in (fresh, stale)
    )
    gap = mean_interval(fresh_P - stale_P)
    return StaleProbe(float(fresh_P.mean()), float(stale_P.mean()), gap, weight_degeneracy(log_weights_E))


def token_shift(
    learner: Learner, before: Snapshot, after: Snapshot, batch: AgentBatch, rng: np.random.Generator
) -> TokenProbe:
    """The effect of the update on tokens, on a subsample of the messages. Leaves the learner at ``after``.

    Measures the change by rank before the update (fig:logit-vocab), the same for a step ``STRETCH`` times as long, and
    sampled KLs from some or all positions (app:exp:klcal).
    """
    rows = np.sort(rng.permutation(len(batch))[:PROBED_MESSAGES])
    part = batch.rows(rows)
    try:
        learner.restore(before)
        learner.begin(part)
        cur = learner.token_logprobs()
        learner.restore(after)
        shift, kls = learner.token_shift(), learner.token_kls()
        learner.move(before, after, STRETCH)
        longer, beyond = learner.token_shift(), float(learner.measure().full_M.mean())
        learner.restore(after)
        learner.begin(part)
        new = learner.token_logprobs()
    finally:
        learner.restore(after)
        learner.end()
    k1 = [now - then for now, then in zip(cur, new, strict=True)]
    return TokenProbe(
        **vars(shift),
        stretched=Stretched(STRETCH, beyond, longer.moved_R.tolist(), longer.flipped),
        sampled_kl=_sampled_kl(k1, kls, part, rng),
    )


def _sampled_kl(k1: Sequence[Floats], kls: Sequence[Floats], part: AgentBatch, rng: np.random.Generator) -> SampledKl:
    k1_N = np.concatenate(k1)
    k3_N = np.expm1(np.minimum(-k1_N, 50.0)) + k1_N  # clamped so that it stays finite
    draws = tuple(
        Draws(
            share,
            subsampled_means(k1_N, len(k1), share, rng).tolist(),
            subsampled_means(k3_N, len(k1), share, rng).tolist(),
        )
        for share in SHARES
    )
    room = np.cumsum([len(values) for values in k1]) <= SHOWN_POSITIONS
    shown = [int(m) for m in np.flatnonzero(room)]
    return SampledKl(
        messages=len(k1),
        positions=len(k1_N),
        exact=float(np.concatenate(kls).sum() / len(kls)),
        k1=float(k1_N.sum() / len(k1)),
        k3=float(k3_N.sum() / len(k1)),
        draws=draws,
        tokens=tuple(
            TokenKl(int(part.episode_M[m]), int(part.turn_M[m]), [float(f"{x:.4g}") for x in kls[m]]) for m in shown
        ),
    )


def subsampled_means(values_N: ArrayLike, messages: int, share: float, rng: np.random.Generator) -> Floats:
    """``DRAWS`` estimates of the sum per message, each from a random share of the positions, without replacement."""
    values = np.asarray(values_N, dtype=np.float64)
    counted = max(round(share * len(values)), 1)
    if not 0.0 < share <= 1.0 or not values.size or messages < 1:
        raise ValueError(f"subsampled_means needs a share in (0, 1] of at least one position, got {share}")
    drawn = [values[rng.permutation(len(values))[:counted]].mean() for _ in range(DRAWS)]
    return np.asarray(np.array(drawn) * len(values) / messages)
