"""The map of staleness: plans compared over many games, at equal updates, equal tokens and equal seconds.

A cell of the map is a game with its number of agents, radius, visibility, number of rounds and message length. In each
cell every plan trains the same teams of tiny models, one per seed (``staleness_runs``). A plan that samples less has
cheaper updates, so success after equal updates is only one of three comparisons. The other two compare plans at the
total cost of the cheapest one, with success interpolated between neighboring measurements. Differences are paired by
seed: the same seed starts from the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

from teamtr.errors import UserError
from teamtr.lab import roles
from teamtr.lab.staleness_cells import AUTO, COSTS, FRESH, STALE, Cell, Cost, Run
from teamtr.theory.intervals import mean_interval

BySeed = Mapping[str, Sequence[float]]
"""Success of each plan, by seed."""

EXACT_TEAMS = 64
"""Teams that train with exact gradients, whose mean is reported next to the sampled teams."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95 % interval (Student's t)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        found = mean_interval(values)
        return cls(found.estimate, found.lower, found.upper)


@dataclass(frozen=True)
class PlanCosts:
    """What a plan cost in a cell, and what it reused: means over seeds."""

    tokens: float
    seconds: float
    samplings: float
    redraws: float
    share: float | None
    kept: float | None
    bias: float | None


@dataclass(frozen=True)
class Comparison:
    """The plans of a cell at one budget.

    ``fresh_minus_stale`` is paired by seed; ``difference`` names the better of the two if the interval excludes 0.
    ``auto_minus_better`` compares auto with whichever of the two has the higher mean; ``auto`` is "ahead" or "below" if
    that interval excludes 0.
    """

    budget: float
    success: Mapping[str, Mean]
    fresh_minus_stale: Mean | None = None
    difference: Literal["fresh", "stale", "none"] | None = None
    auto_minus_better: Mean | None = None
    auto: Literal["ahead", "level", "below"] | None = None


@dataclass(frozen=True)
class CellReport:
    """A cell: its comparisons at equal updates, tokens and seconds, and what its plans cost.

    ``exact_gradients`` is the success of fresh and of stale steps that fill their radius along the exact gradient
    (``teamtr lab roles``), where it can be computed.
    """

    name: str
    cell: Cell
    at_equal: Mapping[Cost, Comparison]
    plans: Mapping[str, PlanCosts]
    exact_gradients: Mapping[str, float] | None


@dataclass(frozen=True)
class StalenessReport:
    """The whole map. ``over_cells`` holds the difference of two plans at a budget, by "PLAN minus PLAN": each seed's
    mean over all cells, averaged over seeds."""

    cells: tuple[CellReport, ...]
    plans: tuple[str, ...]
    seeds: tuple[int, ...]
    over_cells: Mapping[Cost, Mapping[str, Mean]]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def compare(cells: Sequence[Cell], plans: Sequence[str], seeds: Sequence[int], runs: Sequence[Run]) -> StalenessReport:
    """The map, from one run for every cell, plan and seed."""
    if len(seeds) < 2:
        raise UserError("an interval needs at least two seeds")
    found = {(run.cell, run.plan, run.seed): run for run in runs}
    reports, reached = [], []
    for cell in cells:
        by_plan = {plan: [found[cell.name, plan, seed] for seed in seeds] for plan in plans}
        budgets = {cost: _budgets(by_plan, cost) for cost in COSTS}
        success = {cost: _success(by_plan, cost, budgets[cost]) for cost in COSTS}
        reached.append(success)
        reports.append(
            CellReport(
                name=cell.name,
                cell=cell,
                at_equal={cost: _compared(success[cost], sum(budgets[cost]) / len(seeds)) for cost in COSTS},
                plans={plan: _costs(of_plan) for plan, of_plan in by_plan.items()},
                exact_gradients=_exact_gradients(cell),
            )
        )
    over_cells = {cost: _over_cells([success[cost] for success in reached]) for cost in COSTS}
    return StalenessReport(tuple(reports), tuple(plans), tuple(seeds), over_cells)


def _budgets(by_plan: Mapping[str, Sequence[Run]], cost: Cost) -> list[float]:
    """Total cost of the cheapest plan, by seed."""
    return [min(run.total(cost) for run in of_seed) for of_seed in zip(*by_plan.values(), strict=True)]


def _success(by_plan: Mapping[str, Sequence[Run]], cost: Cost, budgets: Sequence[float]) -> BySeed:
    return {
        plan: [run.at(cost, budget) for run, budget in zip(of_plan, budgets, strict=True)]
        for plan, of_plan in by_plan.items()
    }


def _over_cells(cells: Sequence[BySeed]) -> dict[str, Mean]:
    """Differences between fresh, stale and auto, a later one minus an earlier one; all cells have equal weight."""
    shown = [plan for plan in (FRESH, STALE, AUTO) if plan in cells[0]]
    means = {
        plan: [sum(of_seed) / len(cells) for of_seed in zip(*(c[plan] for c in cells), strict=True)] for plan in shown
    }
    return {
        f"{later} minus {earlier}": _paired(means[later], means[earlier]) for earlier, later in combinations(shown, 2)
    }


def _compared(success: BySeed, budget: float) -> Comparison:
    means = {plan: Mean.of(values) for plan, values in success.items()}
    if FRESH not in success or STALE not in success:
        return Comparison(budget, means)
    apart = _paired(success[FRESH], success[STALE])
    difference: Literal["fresh", "stale", "none"] = (
        "fresh" if apart.low > 0.0 else "stale" if apart.high < 0.0 else "none"
    )
    if AUTO not in success:
        return Comparison(budget, means, apart, difference)
    lead = _paired(success[AUTO], success[max((FRESH, STALE), key=lambda plan: means[plan].mean)])
    auto: Literal["ahead", "level", "below"] = "ahead" if lead.low > 0.0 else "below" if lead.high < 0.0 else "level"
    return Comparison(budget, means, apart, difference, lead, auto)


def _paired(one: Sequence[float], other: Sequence[float]) -> Mean:
    return Mean.of([a - b for a, b in zip(one, other, strict=True)])


def _costs(runs: Sequence[Run]) -> PlanCosts:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return PlanCosts(
        tokens=sum(run.total("tokens") for run in runs) / len(runs),
        seconds=sum(run.total("seconds") for run in runs) / len(runs),
        samplings=sum(run.samplings for run in runs) / len(runs),
        redraws=sum(run.redraws for run in runs) / len(runs),
        share=mean([run.share for run in runs]),
        kept=mean([run.kept for run in runs]),
        bias=mean([run.bias for run in runs]),
    )


def _exact_gradients(cell: Cell) -> dict[str, float] | None:
    if not cell.is_exact:
        return None
    curves = roles.roles((cell.agents,), seeds=EXACT_TEAMS, stages=cell.stages, radius=cell.radius).curves
    return {rule: curves[rule][0][-1] for rule in ("fresh", "stale")}
