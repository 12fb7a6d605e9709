"""A batch for an update: episodes of the stage's problems, and of others in the place of those that teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.rollout.context import Ledger, RolloutContext
from teamtr.rollout.play import play
from teamtr.team import Team
from teamtr.types import Problem


@dataclass(frozen=True)
class Collected:
    """A batch, after so many ``rounds`` of redrawing. ``ended``: every group has a signal, all problems were tried, or
    the limit of rounds was reached."""

    batch: RolloutBatch
    rounds: int
    without_signal: int
    ended: Literal["signal", "all_tried", "limit"]


def has_signal_P(batch: RolloutBatch) -> np.ndarray:
    """Which groups hold different, finite rewards."""
    rewards_PG = np.array([e.reward for e in batch.episodes]).reshape(len(batch.problems), batch.group_size)
    return np.asarray(np.isfinite(rewards_PG).all(axis=1) & (np.ptp(rewards_PG, axis=1) > 0))


def collect(
    context: RolloutContext,
    team: Team,
    problems: Sequence[Problem],
    group_size: int,
    *,
    seed: Callable[[int], int],
    reserve: Sequence[Problem] = (),
    limit: int = 0,
    ledger: Ledger | None = None,
) -> Collected:
    """Play the problems; put those of the ``reserve``, in its order and each once, in the place of groups without
    signal until every group has one: DAPO's dynamic sampling (arXiv 2503.14476).

    It ends early when the reserve is used up, or after ``limit`` rounds (0: no limit); the batch is then taken as it
    is. ``seed(r)`` names round r's randomness. A group of equal rewards of the task has no signal, however long its
    messages are.
    """
    batch = play(context, team, problems, group_size, seed=seed(0), ledger=ledger)
    rounds, left = 0, list(reserve)
    while True:
        empty = np.flatnonzero(~has_signal_P(batch))
        if len(empty) == 0:
            return Collected(batch, rounds, 0, "signal")
        if not left:
            return Collected(batch, rounds, len(empty), "all_tried")
        if rounds == limit > 0:
            return Collected(batch, rounds, len(empty), "limit")
        rounds += 1
        others, left = left[: len(empty)], left[len(empty) :]
        fresh = play(context, team, others, group_size, seed=seed(rounds), ledger=ledger)
        batch = _replace_groups(batch, fresh, empty[: len(others)])


def _replace_groups(batch: RolloutBatch, fresh: RolloutBatch, where: np.ndarray) -> RolloutBatch:
    problems, episodes, g = list(batch.problems), list(batch.episodes), batch.group_size
    for source, target in enumerate(where):
        problems[target] = fresh.problems[source]
        episodes[target * g : (target + 1) * g] = fresh.episodes[source * g : (source + 1) * g]
    return RolloutBatch(tuple(problems), tuple(episodes), g)
