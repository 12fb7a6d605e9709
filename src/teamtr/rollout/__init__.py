"""Play episodes, turn them into batches, and know when a batch is stale."""

from teamtr.rollout.collect import collect, has_signal_P
from teamtr.rollout.fresh import StaleBatch, require_fresh, stale_agents
from teamtr.rollout.play import Arena, Ledger, StaleWeights, play

__all__ = [
    "Arena",
    "Ledger",
    "StaleBatch",
    "StaleWeights",
    "collect",
    "has_signal_P",
    "play",
    "require_fresh",
    "stale_agents",
]
