"""What one update is given: the agent's messages with their advantages, and how to optimize."""

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
    """How an update parts. The radius sets the step's size; ``learning_rate`` only its starting guess.

    ``gate_share`` is the share of every problem's episodes that the gate looks at first; 1 is all of them at once.
    ``certify_share`` is the share of problems that are not trained on, so that certificates from them hold.
    ``cross_fit``: every problem is trained on, and none judges the steps that were made from it
    (``TrainingBatch.folds``). ``value_learning_rate`` is the critic's, in plans that have one. ``score``: who computes
    the old policy's features, the learner or the sampler that drew the messages (``training.scoring``).
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
    """One part of an update: the messages that are trained on, and those that judge whether it gains."""

    train_M: NDArray[np.bool_]
    judge_M: NDArray[np.bool_]
    opens: bool = True
    """Whether the update begins with it."""
    radius_share: float = 1.0
    """How much of the radius the update may have used at the end of this fold."""


@dataclass(frozen=True)
class TrainingBatch:
    """What one agent learns from: its messages, and the advantages and weights of the episodes they stand in.

    ``weights_E`` are the weights of whole episodes, for what they were worth, and ``contexts_M`` those of what came
    before each message, for how far it moves; None where the present team wrote them (``theory.weights``). ``fresh``:
    the team as it is wrote them, and nobody learned from any of them before. ``holdout_M`` marks messages that are not
    learnt from, whole problems each.
    ``filter_cut``: no step is made from messages that were cut at the token limit (``presets.Overlong``).
    ``tokens``: what a critic made of the messages, once it was asked (``with_values``); None in plans without one.
    """

    messages: AgentBatch
    advantages: Advantages
    returns_PG: Floats
    weights_E: Floats | None = None
    contexts_M: Floats | None = None
    fresh: bool = True
    holdout_M: NDArray[np.bool_] | None = None
    filter_cut: bool = False
    tokens: TokenAdvantages | None = None

    def with_values(self, values: Sequence[Floats], critic: CriticAdvantage, gamma: float) -> TrainingBatch:
        """The same batch with a critic's values of every message: it is trained on advantages per token."""
        assert self.weights_E is None, "a critic learns from episodes as they are: a plan with one does not reweight"
        return replace(self, tokens=critic.of_tokens(values, self.messages, self.returns_PG, gamma))

    def hold_out(self, share: float, rng: np.random.Generator) -> TrainingBatch:
        """The same batch with a share of its problems set aside, two at least; nothing where none would be left to
        learn from. A problem that stands in it twice goes as one."""
        clusters = np.unique(self.messages.cluster_M)
        count = max(math.ceil(share * len(clusters)), 2)
        if count >= len(clusters):
            return self
        return replace(self, holdout_M=np.isin(self.messages.cluster_M, rng.permutation(clusters)[:count]))

    def holdout(self) -> tuple[TrainingBatch, NDArray[np.int64]]:
        """What was set aside, as a batch of its own, and which messages of this one it holds."""
        assert self.holdout_M is not None
        rows = np.flatnonzero(self.holdout_M)
        group = self.returns_PG.shape[1]
        problems, problem_M = np.unique(self.messages.problem_M[rows], return_inverse=True)
        episode_M = problem_M * group + self.messages.episode_M[rows] % group
        a = self.advantages
        advantages = Advantages(
            a.values_PG[problems], a.raw_PG[problems], a.clip_rate, a.informative_P[problems], a.non_finite_P[problems]
        )
        batch = replace(self.messages.rows(rows), episode_M=episode_M, problem_M=problem_M)
        return TrainingBatch(batch, advantages, self.returns_PG[problems], fresh=self.fresh), rows

    def folds(self, objective: Objective, *, cross_fit: bool, rng: np.random.Generator) -> tuple[Fold, ...]:
        """All at once; or, cross-fitted, two halves of the problems, each judged by the other.

        Steps look good on the problems that they were made from. Cross-fitted, the update parts on one half first and
        asks the other whether that gained, then goes on with the halves exchanged: every problem is learned from and
        no step is judged by its own. The KL grows with the square of the way, so the first half of it may use a quarter
        of the radius.
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
    def train_M(self) -> NDArray[np.bool_]:
        """The messages that the update may look at for what they were worth."""
        return np.ones(len(self.messages), dtype=np.bool_) if self.holdout_M is None else ~self.holdout_M

    def mean(self, values_M: Floats, rows: np.ndarray | None = None) -> float:
        """The mean over messages (those of ``rows``) in the contexts of the team as it is: weighted where another
        wrote them."""
        weights_M = self.contexts_M
        if weights_M is None:
            return float(values_M.mean())
        weights_M = weights_M if rows is None else weights_M[rows]
        total = weights_M.sum()
        return float((weights_M * values_M).sum() / total) if total > 0.0 else math.inf

    def step_advantages(self, rows: NDArray[np.int64]) -> Floats | list[Floats]:
        """What a step on these messages climbs: one number for each, or one for each of their tokens."""
        return self.advantages_M[rows] if self.tokens is None else [self.tokens.advantages[m] for m in rows]

    @property
    def advantages_M(self) -> Floats:
        """What each message was worth beside what was to be expected of its group, or by its critic."""
        if self.tokens is not None:
            return self.tokens.message_M
        values_E = self.advantages.values_PG.reshape(-1)
        if self.weights_E is not None:
            values_E = values_E * self.weights_E
        return np.asarray(values_E[self.messages.episode_M])

    def kl_in_radius_units(self, kl_M: Floats, radii: Radii, rows: np.ndarray | None = None) -> Floats:
        """Messages' KLs in the unit of the radius: per message, or divided by each one's tokens (lem:avgvssum)."""
        if not radii.per_token:
            return kl_M
        lengths_M = self.messages.lengths_M
        return np.asarray(kl_M / (lengths_M if rows is None else lengths_M[rows]))

    @property
    def informative_M(self) -> NDArray[np.bool_]:
        """The messages that there is something to learn from."""
        return np.asarray(self.advantages.informative_P[self.messages.problem_M] & self.train_M)

    @property
    def finite_M(self) -> NDArray[np.bool_]:
        """The messages of groups with finite rewards."""
        return ~self.advantages.non_finite_P[self.messages.problem_M]

    def gradient_M(self, objective: Objective) -> NDArray[np.bool_]:
        """The messages that steps are made of: those of groups with a signal; with a reference policy those of all
        groups with finite rewards, for each of them pulls towards it."""
        gradient_M = self.informative_M
        if objective.has_reference:
            gradient_M = self.finite_M & self.train_M
        return gradient_M & ~self.messages.cut_M if self.filter_cut else gradient_M
