"""Builds one agent's training batch from rollouts: its messages, their advantages and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teamtr.batches import AgentBatch, RolloutBatch
from teamtr.presets import Plan
from teamtr.rollout import credited, is_crossed, stale_agents
from teamtr.team import Team
from teamtr.theory.weights import truncated_weights
from teamtr.training.batch import TrainingBatch
from teamtr.types import Floats


@dataclass(frozen=True)
class Lesson:
    """The data of an update, and the share of the batch's weight removed by truncation."""

    data: TrainingBatch
    cut: float = 0.0


def lesson(batch: RolloutBatch, agent: str, plan: Plan, team: Team) -> Lesson:
    """This agent's training data from this batch, reweighted to the current team if the plan says so."""
    own = batch.of(agent)
    weights = _Weights()
    if plan.resample.reweight and batch.carried is not None:
        weights = _crossed(batch, own) if is_crossed(batch, agent, plan) else _of_episodes(batch, own)
    found = credited(batch, agent, plan, team.limits, weights.others_E)
    fresh = not batch.redrawn and not stale_agents(batch, team)
    data = TrainingBatch(
        own,
        found.advantages,
        found.returns_PG,
        weights.episodes_E,
        weights.contexts_M,
        fresh,
        filter_cut=plan.overlong.filter,
        cluster_P=batch.cluster_P,
    )
    return Lesson(data, weights.cut)


@dataclass(frozen=True)
class _Weights:
    """Importance weights: ``others_E`` of returns and their baseline, ``episodes_E`` of advantages, ``contexts_M`` of
    each message's KL; None where nothing is weighted. ``cut`` is the share of ``others_E`` removed by truncation."""

    others_E: Floats | None = None
    episodes_E: Floats | None = None
    contexts_M: Floats | None = None
    cut: float = 0.0


def _of_episodes(batch: RolloutBatch, own: AgentBatch) -> _Weights:
    """Weights of whole episodes for advantages, and of the messages before each message for its context."""
    log_weights_E, log_contexts_M = batch.log_weights_E, batch.log_weights_before_M(own)
    assert log_weights_E is not None, "somebody was updated since"
    assert log_contexts_M is not None, "and so it is for contexts"
    found = truncated_weights(log_weights_E)
    contexts_M = truncated_weights(log_contexts_M).values_E if len(own) else log_contexts_M
    return _Weights(found.values_E, found.values_E, contexts_M, found.cut)


def _crossed(batch: RolloutBatch, own: AgentBatch) -> _Weights:
    """Weights for crossed credit. The other agents' messages weight only the returns: the agent does not read them, and
    its baseline is part of the returns. Its own messages have weights other than one only in episodes of an earlier
    stage."""
    log_weights_E = batch.log_weights_E
    assert batch.carried is not None, "somebody was updated since"
    assert log_weights_E is not None, "so that episodes weigh differently"
    log_own_M = batch.carried.log_ratio_U[batch.place_M(own)]
    log_own_E: Floats = np.bincount(own.episode_M, log_own_M, len(batch.episodes)).astype(np.float64)
    others = truncated_weights(log_weights_E - log_own_E)
    if not log_own_M.any():
        return _Weights(others.values_E, cut=others.cut)
    spoken_M: Floats = np.cumsum(log_own_M) - log_own_M  # summed over this agent's earlier messages in the batch
    began_M = spoken_M[np.searchsorted(own.episode_M, own.episode_M)]
    contexts_M = truncated_weights(spoken_M - began_M).values_E
    return _Weights(others.values_E, truncated_weights(log_own_E).values_E, contexts_M, others.cut)
