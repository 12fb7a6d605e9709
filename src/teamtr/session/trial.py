"""A few episodes of the real team before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass

from teamtr.randomness import generator, seed_of
from teamtr.rollout import Ledger, play
from teamtr.session.build import Session
from teamtr.types import RolloutBatch

PROBLEMS = 8
GROUP = 4


@dataclass(frozen=True)
class Trial:
    """What was played, and what it took."""

    batch: RolloutBatch
    ledger: Ledger


def try_out(session: Session) -> Trial:
    """Episodes of a few problems by the team as it is."""
    problems, seed, ledger = session.task.problems("train"), session.team_file.seed, Ledger()
    pick = generator(seed, "preflight").permutation(len(problems))[:PROBLEMS]
    batch = play(
        session.context,
        session.current_team(),
        [problems[i] for i in pick],
        GROUP,
        seed=seed_of(seed, "preflight", "play"),
        ledger=ledger,
    )
    return Trial(batch, ledger)
