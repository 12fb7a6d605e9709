"""The returns that a plan trains on: the task's rewards plus the plan's length punishments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.presets import Plan
from teamtr.theory.overlong import soft_punishment
from teamtr.types import Episode, Floats


def punishments_PG(batch: RolloutBatch, plan: Plan, limits: Mapping[str, int], *, without: str | None = None) -> Floats:
    """The overlong punishment of each episode: that of its worst message. For one agent with one turn it is exactly
    DAPO's (arXiv 2503.14476). ``limits``: maximum tokens of a message, by agent. ``without``: an agent whose messages
    do not count."""
    flat = [_punishment(episode, plan.overlong.cache, limits, without) for episode in batch.episodes]
    return np.array(flat, dtype=np.float64).reshape(len(batch.problems), batch.group_size)


def trained_returns_PG(batch: RolloutBatch, plan: Plan, limits: Mapping[str, int]) -> Floats:
    """The team's discounted return of each episode, including its punishment, which is discounted as the last turn's
    reward is. Measured gains use these returns; so do advantages and certificates, unless the plan credits agents
    otherwise (``credit.py``). Their range is ``Plan.return_range``."""
    returns_PG = batch.returns_PG(plan.gamma)
    if not plan.overlong.punishes:
        return returns_PG
    return returns_PG + punishments_PG(batch, plan, limits) * batch.discounts_PG(plan.gamma)


def _punishment(episode: Episode, cache: float, limits: Mapping[str, int], without: str | None) -> float:
    turns = [turn for turn in episode.turns if turn.agent != without]
    if cache == 0.0 or not turns:
        return 0.0
    lengths = [len(turn.token_ids) for turn in turns]
    cut = [turn.finish == "length" for turn in turns]
    return float(soft_punishment(lengths, [limits[turn.agent] for turn in turns], cut, cache).min())
