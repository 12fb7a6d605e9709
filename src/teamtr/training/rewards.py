"""The composition of a batch's rewards: the parts of a shaped reward, and what individual agents earned."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.reports import RewardReport
from teamtr.types import Breakdown, Episode


def rewards_of(batch: RolloutBatch, printed: str = "") -> RewardReport | None:
    """The reward report on the current stage's episodes; None without a breakdown of rewards or grader output."""
    made = [(episode, found) for episode in batch.present if (found := episode.verdict.breakdown) is not None]
    if not made and not printed:
        return None
    names = dict.fromkeys(name for _, found in made for name in found.parts)
    parts = {name: _mean(found.parts[name] for _, found in made if name in found.parts) for name in names}
    personal = [(episode, found) for episode, found in made if found.is_personal]
    agents = dict.fromkeys(turn.agent for episode, _ in personal for turn in episode.turns)
    earned = {name: _mean(_earned(episode, found, name) for episode, found in personal) for name in agents}
    return RewardReport(parts, earned, printed)


def _earned(episode: Episode, made: Breakdown, agent: str) -> float:
    """The reward that this agent earned individually."""
    turns = zip(episode.turns, made.by_turn, strict=bool(made.by_turn))
    return made.by_agent.get(agent, 0.0) + sum(earned for turn, earned in turns if turn.agent == agent)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
