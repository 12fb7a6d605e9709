"""Algorithm 1 of the paper (alg:teamtr), to be read next to it.

The loop does not depend on engines, files or the terminal. It takes two functions, ``collect`` (samples episodes of the
current team) and ``update`` (updates one agent), and yields a ``Step`` after every update. Where the paper always
samples, a plan may reuse the existing episodes, with or without reweighting them to the current team (``reuse``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.batches import AgentBatch, RolloutBatch
from teamtr.presets import Order, Plan
from teamtr.reports import UpdateReport
from teamtr.rollout import agent_returns_PG, require_fresh
from teamtr.team import Team
from teamtr.theory.allocation import update_order
from teamtr.training.batch import TrainingBatch
from teamtr.training.lesson import lesson
from teamtr.training.reuse import Choice, choose
from teamtr.training.update import Update

Collect = Callable[[Team, int, RolloutBatch | None], RolloutBatch]
"""Samples a batch of this team before this step. Given a batch of an older team, keeps the parts that may be kept."""
Price = Callable[[RolloutBatch, AgentBatch], float | None]
"""The cost of sampling such a batch, in units of the cost of updating an agent on these messages."""
UpdateAgent = Callable[[str, TrainingBatch], Update]


@dataclass(frozen=True)
class Slot:
    """One place in a stage's schedule. ``opens`` marks the first agent of a step. All agents of a step are updated from
    the batch that the step begins with, which the team as it was then wrote, unless the plan reuses older episodes."""

    step: int
    agent: str
    opens: bool


def schedule(
    order: Order, agents: tuple[str, ...], rng: np.random.Generator, gains: Mapping[str, float] | None = None
) -> tuple[Slot, ...]:
    """The order sigma of a stage. ``gains`` are the agents' expected gains: ``gain_of_episode`` of their last
    updates."""
    if order.kind == "together":
        return tuple(Slot(0, name, k == 0) for k, name in enumerate(agents))
    expected_A = [(gains or {}).get(name, 0.0) for name in agents]
    numbers = update_order(order.kind, len(agents), rng=rng, expected_gains_A=expected_A)
    return tuple(Slot(step, agents[number], True) for step, number in enumerate(numbers))


def gain_of_episode(report: UpdateReport, group_size: int) -> float:
    """The surrogate of an update, summed over the agent's messages of an episode. Its mean over messages says how good
    one of them is, and agents may speak several times in an episode, or seldom."""
    return report.surrogate * report.messages / (report.groups * group_size) if report.messages else 0.0


@dataclass(frozen=True)
class Step:
    """One update, the intermediate team after it, its batch, and the reason for that batch. ``cut`` is the share of the
    batch's weight removed by truncation."""

    index: int
    team: Team
    update: Update
    batch: RolloutBatch
    choice: Choice
    cut: float = 0.0

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
    price: Price = lambda batch, own: None,
) -> Iterator[Step]:
    """Updates every agent once. An interrupted stage resumes after ``done`` updates with the ``batch`` it held."""
    for index, slot in enumerate(slots[done:], start=done):  # line 4: in the order of line 2
        choice = Choice("reuse", "updated together with the agent before")
        if slot.opens:
            choice = _choose(plan, batch, team, slot, price)
            if choice.action != "reuse":  # line 5: under the intermediate team
                batch = collect(team, slot.step, batch if choice.action == "redraw" else None)
        assert batch is not None, "a stage that goes on in the middle needs the batch it held"
        if slot.opens:
            require_fresh(batch, team, plan)
        learned = lesson(batch, slot.agent, plan, team)  # line 6
        done_update = update(slot.agent, learned.data)  # line 7: until the KL is within the radius
        team = team.replace(slot.agent, done_update.report.version_after)  # line 8
        if plan.resample.may_be_stale:
            assert done_update.log_ratio_M is not None, "a plan that reuses rollouts measures every message"
            batch = batch.after(learned.data.messages, done_update.log_ratio_M, team.version, done_update.verified)
        yield Step(index, team, done_update, batch, choice, learned.cut)


def _choose(plan: Plan, batch: RolloutBatch | None, team: Team, slot: Slot, price: Price) -> Choice:
    if batch is None or not plan.resample.may_be_stale:  # returns and price are not needed
        return choose(plan.resample, None, slot.step, None, None)
    returns_PG = agent_returns_PG(batch, slot.agent, plan, team.limits)
    return choose(plan.resample, batch, slot.step, returns_PG, price(batch, batch.of(slot.agent)))
