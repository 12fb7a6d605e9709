"""Probes of a stage: how stale rollouts would have judged its updates, and which tokens the updates moved.

Probes do not affect training. A probed stage keeps the batch sampled at its start, on which no update trains. Each
later update is measured on that batch and on rollouts of the team right before it.
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
    """What is logged about an update, and how far the team has moved on each episode of the batch from the stage's
    start."""

    record: dict[str, Any]
    carried: list[float]


class StageProbes:
    """The probes of one stage of a run; their cost is added to the account."""

    def __init__(self, session: Session, run: RunFolder, account: Account, stage: int) -> None:
        self._session, self._account, self._stage = session, account, stage
        self._path = run.episodes / probe_name(stage)
        self._run = run

    def are_due(self, done: int) -> bool:
        """Whether this stage is probed: ``diagnostics.every`` selects it, and it was probed when it began, ``done``
        updates ago."""
        every = self._session.team_file.diagnostics.every
        return every > 0 and self._stage % every == 0 and (done == 0 or self._path.exists())

    def begin(self, team: Team) -> None:
        self._run.write_episodes(probe_name(self._stage), self.play(team, "start"))

    def end(self) -> None:
        self._path.unlink(missing_ok=True)

    def play(self, team: Team, name: str) -> RolloutBatch:
        """Sample the stage's problems with this team."""
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
        """Probe the update that this agent has just made. ``fresh`` was sampled right before it, unless it was the
        stage's first; ``carried`` is how far the updates before it moved the team."""
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
