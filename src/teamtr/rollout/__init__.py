"""Rollouts: play and grade episodes, collect them into batches, and detect stale batches."""

from teamtr.rollout.collect import Collected, collect, has_signal_P
from teamtr.rollout.context import Ledger, RolloutContext
from teamtr.rollout.conversing import StaleWeights, converse
from teamtr.rollout.credit import (
    Credited,
    agent_returns_PG,
    certified_range,
    credited,
    is_crossed,
    with_counterfactuals,
)
from teamtr.rollout.crossing import is_apart, is_unheard
from teamtr.rollout.episode import EpisodeState
from teamtr.rollout.play import play
from teamtr.rollout.shaping import punishments_PG, trained_returns_PG
from teamtr.rollout.staleness import StaleBatch, require_fresh, stale_agents

__all__ = [
    "Collected",
    "Credited",
    "EpisodeState",
    "Ledger",
    "RolloutContext",
    "StaleBatch",
    "StaleWeights",
    "agent_returns_PG",
    "certified_range",
    "collect",
    "converse",
    "credited",
    "has_signal_P",
    "is_apart",
    "is_crossed",
    "is_unheard",
    "play",
    "punishments_PG",
    "require_fresh",
    "stale_agents",
    "trained_returns_PG",
    "with_counterfactuals",
]
