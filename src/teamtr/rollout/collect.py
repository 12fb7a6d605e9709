"""A batch for an update: episodes of the stage's problems, with problems that teach nothing redrawn on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from teamtr.rollout.play import Arena, Ledger, play
from teamtr.team import Team
from teamtr.types import Problem, RolloutBatch


def has_signal_P(batch: RolloutBatch) -> np.ndarray:
    """Which groups hold different, finite rewards."""
    rewards_PG = np.array([e.reward for e in batch.episodes]).reshape(len(batch.problems), batch.group_size)
    return np.asarray(np.isfinite(rewards_PG).all(axis=1) & (np.ptp(rewards_PG, axis=1) > 0))


def collect(
    arena: Arena,
    team: Team,
    problems: Sequence[Problem],
    group_size: int,
    *,
    seed: Callable[[int], int],
    redraw: Callable[[int, int], Sequence[Problem]],
    rounds: int = 0,
    ledger: Ledger | None = None,
) -> RolloutBatch:
    """Play the problems; for up to ``rounds`` times put new problems in the place of groups without signal.

    ``seed(r)`` names round r's randomness, ``redraw(r, n)`` gives n other problems. Rounds are DAPO's dynamic
    sampling; with 0 the batch is what was played.
    """
    batch = play(arena, team, problems, group_size, seed=seed(0), ledger=ledger)
    for r in range(1, rounds + 1):
        empty = np.flatnonzero(~has_signal_P(batch))
        if len(empty) == 0:
            break
        fresh = play(arena, team, redraw(r, len(empty)), group_size, seed=seed(r), ledger=ledger)
        batch = _replace_groups(batch, fresh, empty)
    return batch


def _replace_groups(batch: RolloutBatch, fresh: RolloutBatch, where: np.ndarray) -> RolloutBatch:
    problems, episodes, g = list(batch.problems), list(batch.episodes), batch.group_size
    for source, target in enumerate(where):
        problems[target] = fresh.problems[source]
        episodes[target * g : (target + 1) * g] = fresh.episodes[source * g : (source + 1) * g]
    return RolloutBatch(tuple(problems), tuple(episodes), g)
