"""The input of one update: the agent's messages with their advantages, and the optimization settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from teamtr.batches import AgentBatch
from teamtr.presets import Radii
from teamtr.theory.advantages import Advantages
from teamtr.theory.estimators import CriticAdvantage
from teamtr.theory.gae import TokenAdvantages
from teamtr.theory.objective import Objective
from teamtr.types import Floats


@dataclass(frozen=True)
class Optimization:
    """How an update is optimized. The radius sets the size of the step; ``learning_rate`` is only its initial guess.

    ``gate_share`` is the share of every problem's episodes that the gate checks first; with 1 it checks all at once.
    ``certify_share`` is the share of problems held out from training, so that certificates computed on them hold.
    ``cross_fit``: every problem is trained on, and none judges the steps that were trained on it
    (``TrainingBatch.folds``). ``value_learning_rate`` is the critic's, in plans that have one. ``score``: whether the
    old policy's features come from the learner or from the sampler that drew the messages (``training.scoring``).
    """

    learning_rate: float = 1e-3
    value_learning_rate: float = 1e-2
    epochs: int = 2
    minibatches: int = 4
    confidence: float = 0.95
    max_backtracks: int = 6
    gate_share: float = 0.25
    certify_share: float = 0.0
    cross_fit: bool = False
    score: Literal["own", "sampler"] = "own"


@dataclass(frozen=True)
class Fold:
    """One part of an update: the messages to train on, and the messages that judge whether the step gains."""

    train_M: NDArray[np.bool_]
    judge_M: NDArray[np.bool_]
    opens: bool = True
    """Whether this is the first fold of the update."""
    radius_share: float = 1.0
    """Share of the radius that the update may have used by the end of this fold."""


@dataclass(frozen=True)
class TrainingBatch:
    """The data that one agent is trained on: its messages, and the advantages and weights of their episodes.

    ``weights_E`` are importance weights of episodes, which multiply advantages. ``contexts_M`` are importance weights
    of what preceded each message, for averages of KLs. Either is None where nothing is reweighted (``theory.weights``).
    ``fresh``: the current team wrote all messages, and no update was trained on any part of them. ``holdout_P`` marks
    problems that are not trained on. ``cluster_P`` is equal for equal problems (default: those of ``messages``, and a
    problem in which the agent is silent equals no other).
    ``filter_cut``: messages cut at the token limit are not trained on (``presets.Overlong``).
    ``tokens``: advantages per token from a critic, set by ``with_values``; None in plans without one.
    """

    messages: AgentBatch
    advantages: Advantages
    returns_PG: Floats
    weights_E: Floats | None = None
    contexts_M: Floats | None = None
    fresh: bool = True
    holdout_P: NDArray[np.bool_] | None = None
    filter_cut: bool = False
    tokens: TokenAdvantages | None = None
    cluster_P: NDArray[np.int64] | None = None

    def with_values(self, values: Sequence[Floats], critic: CriticAdvantage, gamma: float) -> TrainingBatch:
        """The same batch with per-token advantages computed from a critic's values of every message."""
        assert self.weights_E is None, "a critic learns from episodes as they are: a plan with one does not reweight"
        return replace(self, tokens=critic.of_tokens(values, self.messages, self.returns_PG, gamma))

    def hold_out(self, share: float, rng: np.random.Generator) -> TrainingBatch:
        """The same batch with a share of its problems held out, at least two and never all; unchanged if it has fewer
        than three. A problem that occurs twice in the batch counts as one.

        They are drawn from all problems, also those in which the agent is silent. So the same generator gives the same
        ones to every agent, and they are a sample of the problems and not of those in which this agent speaks.
        """
        cluster_P = self.clusters_P
        clusters = np.unique(cluster_P)
        count = min(max(math.ceil(share * len(clusters)), 2), len(clusters) - 1)
        if count < 2:
            return self
        return replace(self, holdout_P=np.isin(cluster_P, rng.permutation(clusters)[:count]))

    def holdout(self) -> tuple[TrainingBatch, NDArray[np.int64]]:
        """The held-out problems as a batch of their own, and the indices of its messages in this one."""
        assert self.holdout_P is not None
        problems, rows = np.flatnonzero(self.holdout_P), np.flatnonzero(~self.train_M)
        group = self.returns_PG.shape[1]
        problem_M = np.searchsorted(problems, self.messages.problem_M[rows])
        episode_M = problem_M * group + self.messages.episode_M[rows] % group
        a = self.advantages
        advantages = Advantages(
            a.values_PG[problems], a.raw_PG[problems], a.clip_rate, a.informative_P[problems], a.non_finite_P[problems]
        )
        batch = replace(self.messages.rows(rows), episode_M=episode_M, problem_M=problem_M)
        returns_PG, cluster_P = self.returns_PG[problems], self.clusters_P[problems]
        return TrainingBatch(batch, advantages, returns_PG, fresh=self.fresh, cluster_P=cluster_P), rows

    def folds(self, objective: Objective, *, cross_fit: bool, rng: np.random.Generator) -> tuple[Fold, ...]:
        """One fold of all messages or, when cross-fitted, one for each half of the problems, judged by the other half.

        Steps look good on the problems they were trained on. With cross-fitting, the update first trains on one half
        and the other half judges whether that gained; then the halves are exchanged. Every problem is trained on, and
        no step is judged by its own data. The KL grows with the square of the distance moved, so the first of two folds
        may use a quarter of the radius.
        """
        gradient_M = self.gradient_M(objective)
        if not cross_fit:
            return (Fold(gradient_M, self.train_M),)
        clusters = np.unique(self.messages.cluster_M[self.train_M])
        first_M = np.isin(self.messages.cluster_M, rng.permutation(clusters)[: (len(clusters) + 1) // 2])
        halves = (first_M & self.train_M, ~first_M & self.train_M)
        useful = [
            (train_M & gradient_M, judge_M)
            for train_M, judge_M in (halves, halves[::-1])
            if (train_M & gradient_M).any() and judge_M.any()
        ]
        return tuple(Fold(*parts, k == 0, ((k + 1) / len(useful)) ** 2) for k, parts in enumerate(useful))

    @property
    def clusters_P(self) -> NDArray[np.int64]:
        """``cluster_P``, or its default."""
        if self.cluster_P is not None:
            return self.cluster_P
        cluster_P = np.arange(len(self.returns_PG))
        cluster_P[self.messages.problem_M] = self.messages.cluster_M
        return cluster_P

    @property
    def train_M(self) -> NDArray[np.bool_]:
        """The messages that are not held out."""
        if self.holdout_P is None:
            return np.ones(len(self.messages), dtype=np.bool_)
        return ~self.holdout_P[self.messages.problem_M]

    def mean(self, values_M: Floats, rows: np.ndarray | None = None) -> float:
        """The mean over messages (those of ``rows``) in the current team's contexts: weighted by ``contexts_M``, if
        there are such weights."""
        weights_M = self.contexts_M
        if weights_M is None:
            return float(values_M.mean())
        weights_M = weights_M if rows is None else weights_M[rows]
        total = weights_M.sum()
        return float((weights_M * values_M).sum() / total) if total > 0.0 else math.inf

    def step_advantages(self, rows: NDArray[np.int64]) -> Floats | list[Floats]:
        """The advantages for a step on these messages: one per message or, with a critic, one per token."""
        return self.advantages_M[rows] if self.tokens is None else [self.tokens.advantages[m] for m in rows]

    @property
    def advantages_M(self) -> Floats:
        """Each message's advantage: its episode's, relative to the group and weighted, or the critic's."""
        if self.tokens is not None:
            return self.tokens.message_M
        values_E = self.advantages.values_PG.reshape(-1)
        if self.weights_E is not None:
            values_E = values_E * self.weights_E
        return np.asarray(values_E[self.messages.episode_M])

    def kl_in_radius_units(self, kl_M: Floats, radii: Radii, rows: np.ndarray | None = None) -> Floats:
        """KLs of messages in the unit of the radius: per message, or divided by its number of tokens (lem:avgvssum)."""
        if not radii.per_token:
            return kl_M
        lengths_M = self.messages.lengths_M
        return np.asarray(kl_M / (lengths_M if rows is None else lengths_M[rows]))

    @property
    def informative_M(self) -> NDArray[np.bool_]:
        """The messages of groups with a signal that are not held out."""
        return np.asarray(self.advantages.informative_P[self.messages.problem_M] & self.train_M)

    @property
    def finite_M(self) -> NDArray[np.bool_]:
        """The messages of groups with finite rewards."""
        return ~self.advantages.non_finite_P[self.messages.problem_M]

    def gradient_M(self, objective: Objective) -> NDArray[np.bool_]:
        """The messages that steps are computed from: those of groups with a signal; with a reference policy those of
        all groups with finite rewards, since each of them contributes to the reference KL."""
        gradient_M = self.informative_M
        if objective.has_reference:
            gradient_M = self.finite_M & self.train_M
        return gradient_M & ~self.messages.cut_M if self.filter_cut else gradient_M
