"""Probes of a stage: what stale rollouts would have said of its updates, and which tokens they moved.

Nothing that is learned changes by them. A stage that is probed keeps the batch that its team played at its start, of
which no update learns; later updates are compared on it with rollouts of the team as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.ports import Snapshot
from teamtr.randomness import generator
from teamtr.rollout import credited
from teamtr.rollout.cost import Account
from teamtr.session.build import Session
from teamtr.session.rollouts import StageRollouts
from teamtr.store import RunFolder, probe_name, read_episodes
from teamtr.team import Team
from teamtr.training.batch import TrainingBatch
from teamtr.training.probe import Rollouts, log_ratios, stale_probe, token_shift


@dataclass(frozen=True)
class Probed:
    """What is logged of an update, and how far the team has moved from each episode that the stage began with."""

    record: dict[str, Any]
    carried: list[float]


class StageProbes:
    """Of one stage of a run; what they spend is booked."""

    def __init__(self, session: Session, run: RunFolder, account: Account, stage: int) -> None:
        self._session, self._account, self._stage = session, account, stage
        self._path = run.episodes / probe_name(stage)
        self._run = run

    def are_due(self, done: int) -> bool:
        """Whether this stage is probed: it is due, and was when it began, ``done`` updates ago."""
        every = self._session.team_file.diagnostics.every
        return every > 0 and self._stage % every == 0 and (done == 0 or self._path.exists())

    def begin(self, team: Team) -> None:
        self._run.write_episodes(probe_name(self._stage), self.play(team, "start"))

    def end(self) -> None:
        self._path.unlink(missing_ok=True)

    def play(self, team: Team, name: str) -> RolloutBatch:
        """The stage's problems, played by this team."""
        found = StageRollouts(self._session, self._stage).for_probes(team, name)
        self._account.probed(found.ledger)
        return found.batch

    def of_update(
        self,
        agent: str,
        team: Team,
        before: Snapshot,
        data: TrainingBatch,
        fresh: RolloutBatch | None,
        carried: Sequence[float] | None,
    ) -> Probed:
        """Of the update that this agent has just made. ``fresh`` was played right before it, unless it was the stage's
        first; ``carried`` is how far those before it moved the team."""
        started, learner = time.perf_counter(), self._session.engine.learner(agent)
        spent, after = dict(learner.tokens), learner.snapshot()
        stale = read_episodes(self._path)
        carried_E = np.zeros(len(stale.episodes)) if carried is None else np.array(carried)
        found = None
        if fresh is not None:
            now, then = self._rollouts(agent, team, fresh), self._rollouts(agent, team, stale)
            found = stale_probe(learner, before, after, now, then, carried_E)
        own = stale.of(agent)
        if len(own):
            ratio_M = log_ratios(learner, before, after, own)
            carried_E += np.bincount(own.episode_M, weights=ratio_M, minlength=len(carried_E))
        rng = generator(self._session.team_file.seed, "probe", self._stage, agent)
        shift = token_shift(learner, before, after, data.messages, rng)
        seconds = time.perf_counter() - started
        self._account.updated(agent, {k: learner.tokens[k] - spent[k] for k in spent}, {"probe": seconds})
        record = {
            **({} if found is None else asdict(found)),
            "token_shift": {key: np.asarray(value).tolist() for key, value in asdict(shift).items()},
            "seconds": seconds,
        }
        return Probed(record, carried_E.tolist())

    def _rollouts(self, agent: str, team: Team, batch: RolloutBatch) -> Rollouts:
        return Rollouts(batch.of(agent), credited(batch, agent, self._session.plan, team.limits).advantages)
