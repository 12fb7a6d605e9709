"""Algorithm 1 of the paper (alg:teamtr), to be read beside it.

The loop knows no engine, no file and no screen. It is handed two functions, ``collect`` (episodes under the team
as it is now) and ``update`` (one agent's), and yields what happened after every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.presets import Order, Plan
from teamtr.reports import UpdateReport
from teamtr.rollout import require_fresh, trained_returns_PG
from teamtr.team import Team
from teamtr.theory.allocation import update_order
from teamtr.theory.weights import normalized_weights
from teamtr.training.batch import TrainingBatch
from teamtr.training.update import Update
from teamtr.types import RolloutBatch

Collect = Callable[[Team, int], RolloutBatch]
UpdateAgent = Callable[[str, TrainingBatch], Update]


@dataclass(frozen=True)
class Slot:
    """One place in a stage's schedule. ``opens`` marks the first agent of a step; the agents of one step are all
    updated from the team as it was when the step opened."""

    step: int
    agent: str
    opens: bool


def schedule(
    order: Order, agents: tuple[str, ...], rng: np.random.Generator, gains: Mapping[str, float] | None = None
) -> tuple[Slot, ...]:
    """The order sigma of a stage; ``gains`` are what each agent may be expected to gain (its last update's)."""
    if order.kind == "together":
        return tuple(Slot(0, name, k == 0) for k, name in enumerate(agents))
    expected_A = [(gains or {}).get(name, 0.0) for name in agents]
    numbers = update_order(order.kind, len(agents), rng=rng, expected_gains_A=expected_A)
    return tuple(Slot(step, agents[number], True) for step, number in enumerate(numbers))


@dataclass(frozen=True)
class Step:
    """One update, the intermediate team after it, and the batch it learned from."""

    index: int
    team: Team
    update: Update
    batch: RolloutBatch

    @property
    def report(self) -> UpdateReport:
        return self.update.report


def run_stage(
    team: Team,
    plan: Plan,
    collect: Collect,
    update: UpdateAgent,
    slots: Sequence[Slot],
    *,
    done: int = 0,
    batch: RolloutBatch | None = None,
) -> Iterator[Step]:
    """Every agent once. A stage that was interrupted goes on after ``done`` updates with the ``batch`` it held."""
    for index, slot in enumerate(slots[done:], start=done):  # line 4: in the order of line 2
        if slot.opens and plan.resample.due(slot.step):
            batch = collect(team, slot.step)  # line 5: under the intermediate team
        assert batch is not None, "a stage that goes on in the middle needs the batch it held"
        if slot.opens:
            require_fresh(batch, team, plan)
        returns_PG = trained_returns_PG(batch, plan, team.limits)  # line 6
        weights_E = None
        if plan.resample.importance_weighted and batch.log_weights_E is not None:
            weights_E = normalized_weights(batch.log_weights_E)
        weights_PG = None if weights_E is None else weights_E.reshape(returns_PG.shape)
        advantages = plan.advantage.estimate(returns_PG, weights_PG)
        fresh = batch.team_version == team.version
        own = batch.of(slot.agent)
        data = TrainingBatch(own, advantages, returns_PG, weights_E, fresh, filter_cut=plan.overlong.filter)
        done_update = update(slot.agent, data)  # line 7: until the KL is within the radius
        team = team.replace(slot.agent, done_update.report.version_after)  # line 8
        if plan.resample.may_be_stale:
            assert done_update.log_ratio_M is not None, "a plan that reuses rollouts measures every message"
            batch = batch.reweighted(data.messages, done_update.log_ratio_M)
        yield Step(index, team, done_update, batch)
