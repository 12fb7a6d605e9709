"""Partial resampling: keeps what the present team might have written of an older team's episodes, samples the rest.

For every message of an agent that was updated since, verification decides how many tokens are kept
(``theory.verification``). A message that is cut is completed with the agent's current weights. A later message is kept
if its speaker's context is unchanged, and sampled again otherwise; in a blind round, all other agents' messages stay.

If no update was trained on the drafts, the result is distributed exactly as the present team's own episodes
(tests/statistical/test_redraw.py). Updates that were trained on them have moved towards some of them, and more of
those are kept than should be. ``Redrawn.bias`` measures the effect on problems that are played twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.rollout.context import Ledger, RolloutContext
from teamtr.rollout.episode import Draft, EpisodeState
from teamtr.rollout.play import play, play_out
from teamtr.team import Team
from teamtr.theory.intervals import Measured, mean_interval
from teamtr.types import Problem


@dataclass(frozen=True)
class Redrawn:
    """The batch; the share of its tokens that were kept; and how much higher the mean reward of redrawn episodes is
    than that of fresh ones, on the control problems (None: fewer than two, or a reward that is not finite)."""

    batch: RolloutBatch
    kept: float
    bias: Measured | None


def redraw(
    context: RolloutContext,
    team: Team,
    batch: RolloutBatch,
    *,
    seed: int,
    end_ids: Mapping[str, frozenset[int]],
    control_P: np.ndarray | None = None,
    ledger: Ledger | None = None,
) -> Redrawn:
    """The batch as the present team would have written it.

    ``control_P`` marks the control problems, which are also played from scratch; those episodes replace the redrawn
    ones in the batch.
    """
    assert batch.carried is not None, "nobody was updated since this batch was written"
    ledger = ledger or Ledger()
    problems = [problem for problem in batch.problems for _ in range(batch.group_size)]
    states = [EpisodeState(problem, draft) for problem, draft in zip(problems, drafts(batch), strict=True)]
    drawn = play_out(
        context,
        team,
        batch.problems,
        batch.group_size,
        states,
        seed=seed,
        temperature=None,
        ledger=ledger,
        end_ids=end_ids,
    )
    total = sum(len(turn.token_ids) for episode in drawn.episodes for turn in episode.turns)
    kept = 1.0 - sum(ledger.sampled_tokens.values()) / total if total else 1.0
    bias = None
    if control_P is not None and control_P.any():
        drawn, bias = _with_control(context, team, drawn, np.flatnonzero(control_P), seed, ledger)
    return Redrawn(replace(drawn, redrawn=True), max(kept, 0.0), bias)


def drafts(batch: RolloutBatch) -> list[Draft]:
    """One draft per episode, with the verification results of its turns."""
    carried = batch.carried
    assert carried is not None
    whole = np.full(int(batch.first_U[-1]), -1, dtype=np.int64)
    kept_U = whole if carried.kept_U is None else carried.kept_U
    next_U = whole if carried.next_U is None else carried.next_U
    return [
        Draft(episode, kept_U[first:end].tolist(), next_U[first:end].tolist())
        for episode, first, end in zip(batch.episodes, batch.first_U[:-1], batch.first_U[1:], strict=True)
    ]


def _with_control(
    context: RolloutContext, team: Team, drawn: RolloutBatch, where: np.ndarray, seed: int, ledger: Ledger
) -> tuple[RolloutBatch, Measured | None]:
    problems: list[Problem] = [drawn.problems[p] for p in where]
    fresh = play(context, team, problems, drawn.group_size, seed=seed + 1, ledger=ledger)
    group = drawn.group_size
    rewards_PG = np.array([episode.reward for episode in drawn.episodes]).reshape(-1, group)[where]
    fresh_PG = np.array([episode.reward for episode in fresh.episodes]).reshape(-1, group)
    apart_P = rewards_PG.mean(axis=1) - fresh_PG.mean(axis=1)
    episodes = list(drawn.episodes)
    for source, target in enumerate(where):
        episodes[target * group : (target + 1) * group] = fresh.episodes[source * group : (source + 1) * group]
    measurable = len(apart_P) > 1 and np.isfinite(apart_P).all()
    return replace(drawn, episodes=tuple(episodes)), mean_interval(apart_P) if measurable else None
