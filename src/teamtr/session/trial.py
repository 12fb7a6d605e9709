"""Samples a few episodes with the team before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass

from teamtr.batches import RolloutBatch
from teamtr.randomness import generator, seed_of
from teamtr.rollout import Ledger, play, with_counterfactuals
from teamtr.session.build import Session

PROBLEMS = 8
GROUP = 4


@dataclass(frozen=True)
class Trial:
    """The episodes, and their cost."""

    batch: RolloutBatch
    ledger: Ledger


def try_out(session: Session) -> Trial:
    """Sample episodes of a few problems with the current team."""
    problems, seed, ledger = session.task.problems("train"), session.team_file.seed, Ledger()
    pick = generator(seed, "preflight").permutation(len(problems))[:PROBLEMS]
    team = session.current_team()
    batch = play(
        session.context,
        team,
        [problems[i] for i in pick],
        GROUP,
        seed=seed_of(seed, "preflight", "play"),
        ledger=ledger,
    )
    return Trial(with_counterfactuals(session.context, team, batch, session.plan, ledger), ledger)
