"""Episodes of an older team become episodes of the present one: what it might have said itself stays, the rest is new.

Of every message of an agent that was updated since, verification has said how much may stay (``theory.verification``).
A message that is cut is ended by the agent as it is now. A later message stays where its speaker still reads the same,
and is drawn anew where not: in a blind round everybody else's words stay.

With drafts that no update has learned from, the result is distributed exactly as the present team's own episodes
(tests/statistical/test_redraw.py). Updates that learned from the drafts have moved towards some of them, and more of
those stay than should: ``Redrawn.bias`` measures by how much, on problems that are played twice.
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
    """The batch; the share of its tokens that stayed; and, of the problems that were also played wholly anew, how much
    better the redrawn episodes did (None: fewer than two problems)."""

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

    ``control_P`` marks problems whose episodes are also played wholly anew; those take the place of the redrawn ones.
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
    """One for every episode, with what verification said of its turns."""
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
