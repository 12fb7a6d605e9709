"""The composition of a batch's rewards: the parts of a shaped reward, and what individual agents earned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from teamtr.batches import RolloutBatch
from teamtr.reports import RewardReport
from teamtr.types import Breakdown, Episode


def rewards_of(batch: RolloutBatch, printed: str = "") -> RewardReport | None:
    """The reward report on the current stage's episodes; None without a breakdown of rewards or grader output.

    Means are over the episodes with a finite reward, as the record's mean reward is, so that the parts sum to it. An
    episode on which the grader failed has no breakdown, and earned 0 in every part.
    """
    counted = [episode for episode in batch.present if math.isfinite(episode.reward)]
    made = [(episode, found) for episode in counted if (found := episode.verdict.breakdown) is not None]
    if not made and not printed:
        return None
    names = tuple(dict.fromkeys(name for _, found in made for name in found.parts))
    parts = {name: sum(_part(episode, name, names) for episode in counted) / len(counted) for name in names}
    agents = dict.fromkeys(turn.agent for episode, found in made if found.is_personal for turn in episode.turns)
    earned = {name: sum(_earned(episode, found, name) for episode, found in made) / len(counted) for name in agents}
    return RewardReport(parts, earned, printed)


def _part(episode: Episode, name: str, names: Sequence[str]) -> float:
    """What this episode earned in a part. A single function that gave the team one number left no breakdown here, even
    if it gives rewards of agents or turns elsewhere."""
    made = episode.verdict.breakdown
    if made is None:
        return episode.reward if len(names) == 1 else 0.0
    return made.parts.get(name, 0.0)


def _earned(episode: Episode, made: Breakdown, agent: str) -> float:
    """The reward that this agent earned individually."""
    turns = zip(episode.turns, made.by_turn, strict=True) if made.by_turn else ()
    return made.by_agent.get(agent, 0.0) + sum(earned for turn, earned in turns if turn.agent == agent)
