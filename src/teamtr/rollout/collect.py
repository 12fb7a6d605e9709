"""Collects the batch for an update, and replaces groups without a signal by other problems (dynamic sampling)."""

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
    """A batch after ``rounds`` rounds of replacing groups. ``without_signal`` counts the groups that still have none.
    ``ended``: every group has a signal, all problems were tried, or the limit of rounds was reached."""

    batch: RolloutBatch
    rounds: int
    without_signal: int
    ended: Literal["signal", "all_tried", "limit"]


def has_signal_P(batch: RolloutBatch) -> np.ndarray:
    """Whether the rewards of each group are all finite and not all equal."""
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
    """Play the problems, then replace groups without a signal by problems of the ``reserve``, in order and each at most
    once, until every group has a signal: DAPO's dynamic sampling (arXiv 2503.14476).

    Stops early when the reserve is used up, or after ``limit`` rounds (0: no limit), with the batch as it is then.
    ``seed(r)`` is the seed of round r. Whether a group has a signal depends on the task's rewards alone, not on message
    lengths.
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
