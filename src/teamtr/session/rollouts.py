"""The rollouts of a stage: newly sampled, partly redrawn, or reused from the last stage.

Every random number is named by (seed, purpose, stage, step), so that a stage that is restarted has the same rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.randomness import generator, seed_of
from teamtr.records import MeasuredBias, PartlyRedrawn, Redrawn
from teamtr.rollout import Ledger, collect, play, with_counterfactuals
from teamtr.rollout.redraw import redraw
from teamtr.session.build import Session
from teamtr.team import Team
from teamtr.training.reuse import still_worth
from teamtr.types import Problem


@dataclass(frozen=True)
class Gathered:
    """A batch, its cost, and what to log about dynamic sampling or about redrawing in part."""

    batch: RolloutBatch
    ledger: Ledger
    dynamic: Redrawn | None = None
    partly: PartlyRedrawn | None = None


Sample = Callable[[Team, int, RolloutBatch | None], Gathered]


class Ahead:
    """Samples a stage's batches, one of them early if the caller is certain that it will be needed."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._of: tuple[str, int] | None = None
        self._early: Future[Gathered] = Future()

    def sample_early(self, team: Team, step: int) -> None:
        """Sample a new batch before it is needed by this step. Exceptions are raised when the batch is requested, as if
        it were sampled then; interrupts at once."""
        self._of, self._early = (team.version, step), Future()
        try:
            self._early.set_result(self._sample(team, step, None))
        except Exception as error:
            self._early.set_exception(error)

    def __call__(self, team: Team, step: int, worn: RolloutBatch | None) -> Gathered:
        of, self._of = self._of, None
        if of is None:
            return self._sample(team, step, worn)
        assert of == (team.version, step), "another team's batch was sampled early"
        assert worn is None, "and it is all new"
        return self._early.result()


class StageRollouts:
    """Rollouts of one stage's problems, played by the team that is passed."""

    def __init__(self, session: Session, stage: int) -> None:
        self.session = session
        self.stage = stage
        self.seed = session.team_file.seed
        self.problems, self._others = self._draw()

    def _draw(self) -> tuple[list[Problem], list[Problem]]:
        """The stage's problems, drawn without replacement as far as the split allows, and all others in random
        order."""
        count, problems = self.session.plan.problems, self.session.task.problems("train")
        rng = generator(self.seed, "problems", self.stage, 0)
        repeats = -(-count // len(problems))
        order = np.concatenate([rng.permutation(len(problems)) for _ in range(repeats)])
        drawn = [problems[i] for i in order]
        return drawn[:count], drawn[count : len(problems)]

    def gather(self, team: Team, step: int, worn: RolloutBatch | None) -> Gathered:
        """The batch for this step: newly sampled, or redrawn from a ``worn`` batch, keeping what the team might have
        said itself."""
        return self._credited(team, self._sample(team, step) if worn is None else self._redraw(team, step, worn))

    def _credited(self, team: Team, found: Gathered) -> Gathered:
        """Add what the plan needs to credit each agent."""
        context, plan = self.session.context, self.session.plan
        return replace(found, batch=with_counterfactuals(context, team, found.batch, plan, found.ledger))

    def _sample(self, team: Team, step: int) -> Gathered:
        sampling, ledger = self.session.plan.dynamic_sampling, Ledger()
        found = collect(
            self.session.context,
            team,
            self.problems,
            self.session.plan.group_size,
            seed=lambda r: seed_of(self.seed, "rollout", self.stage, step, r),
            reserve=self._others if sampling.on else (),
            limit=sampling.limit,
            ledger=ledger,
        )
        told = Redrawn(found.rounds, found.without_signal, found.ended) if sampling.on else None
        return Gathered(found.batch, ledger, dynamic=told)

    def _redraw(self, team: Team, step: int, worn: RolloutBatch) -> Gathered:
        engine, ledger = self.session.engine, Ledger()
        count = math.ceil(self.session.plan.resample.control * len(worn.problems))
        rng = generator(self.seed, "control", self.stage, step)
        found = redraw(
            self.session.context,
            team,
            worn,
            seed=seed_of(self.seed, "rollout", self.stage, step, 0),
            end_ids={name: engine.info(name).end_ids for name in team.names},
            control_P=np.isin(np.arange(len(worn.problems)), rng.permutation(len(worn.problems))[:count]),
            ledger=ledger,
        )
        bias = None
        if (told := found.bias) is not None:
            bias = MeasuredBias(told.estimate, told.lower, told.upper, told.problems)
        return Gathered(found.batch, ledger, partly=PartlyRedrawn(found.kept, bias))

    def for_probes(self, team: Team, name: str) -> Gathered:
        """Sample rollouts for probes only: no update trains on them."""
        ledger, seed = Ledger(), seed_of(self.seed, "probe rollout", self.stage, name)
        batch = play(self.session.context, team, self.problems, self.session.plan.group_size, seed=seed, ledger=ledger)
        return self._credited(team, Gathered(batch, ledger))

    def drawn_again(self, last: RolloutBatch | None) -> tuple[RolloutBatch | None, Sequence[int]]:
        """The episodes of the last stage's batch on which this stage trains once more, and the numbers of their
        problems."""
        resample = self.session.plan.resample
        if not resample.across_stages or last is None or last.carried is None:
            return None, ()
        drawn = {problem.id for problem in self.problems}
        own = last.problems[: len(last.problems) - last.past]
        numbers = [p for p, problem in enumerate(own) if problem.id in drawn]
        return still_worth(last, numbers, resample.min_effective_share), numbers
