"""Output of ``teamtr lab staleness``: a line for every finished run, and tables of the results."""

from __future__ import annotations

import time
from collections.abc import Callable

from teamtr.cli.progress import table
from teamtr.cli.terminal import say
from teamtr.cli.words import clock
from teamtr.lab.staleness import CellReport, Comparison, Mean, StalenessReport
from teamtr.lab.staleness_cells import COSTS, Run

WORDS = {"fresh": "fresh is better", "stale": "stale is better", "none": "no difference"}


def show_run(count: int) -> Callable[[Run, int], None]:
    """Return a function that reports each of ``count`` runs when it is finished, with the expected time left."""
    started, made = time.monotonic(), 0

    def show(run: Run, left: int) -> None:
        nonlocal made
        made += 1
        eta = clock((time.monotonic() - started) / made * left)
        last = run.points[-1]
        reached = f"success {last.success:.3f}, {last.tokens:,} tokens, {last.seconds:.0f} s"
        say(f"{count - left:>4}/{count}  {run.cell}, {run.plan}, seed {run.seed}: {reached}  ETA {eta}")

    return show


def tables(report: StalenessReport) -> str:
    """Tables of success and costs for every cell and plan, of the verdicts for each cell, and of means over all
    cells."""
    costs = [_row(cell, plan) for cell in report.cells for plan in report.plans]
    header = ("cell", "plan", "success", "at equal tokens", "at equal seconds", "tokens", "s", "batches", "share")
    verdicts = [_verdict(cell) for cell in report.cells]
    said = ("cell", "exact gradients: fresh, stale", *(f"at equal {cost}" for cost in COSTS))
    seeds = f"{len(report.seeds)} seeds; in brackets 95 % intervals"
    pairs = [
        (pair, *(_interval(report.over_cells[cost][pair], "+") for cost in COSTS))
        for pair in report.over_cells["updates"]
    ]
    over = table(("mean over all cells", *(f"at equal {cost}" for cost in COSTS)), pairs) if pairs else ""
    return f"{table(header, costs)}\n{seeds}\n\n{table(said, verdicts)}\n\n{over}"


def _row(cell: CellReport, plan: str) -> tuple[str, ...]:
    spent = cell.plans[plan]
    batches = f"{spent.samplings:.4g}" + (f" + {spent.redraws:.4g} in part" if spent.redraws else "")
    return (
        cell.name,
        plan,
        *(_interval(cell.at_equal[cost].success[plan]) for cost in COSTS),
        f"{spent.tokens:,.0f}",
        f"{spent.seconds:.0f}",
        batches,
        "-" if spent.share is None else f"{spent.share:.2f}",
    )


def _verdict(cell: CellReport) -> tuple[str, ...]:
    exact = cell.exact_gradients
    shown = "-" if exact is None else f"{exact['fresh']:.3f}, {exact['stale']:.3f}"
    return (cell.name, shown, *(_said(cell.at_equal[cost]) for cost in COSTS))


def _said(found: Comparison) -> str:
    if found.difference is None:
        return "-"
    return WORDS[found.difference] + ("" if found.auto is None else f", auto {found.auto}")


def _interval(mean: Mean, sign: str = "") -> str:
    return f"{mean.mean:{sign}.3f} [{mean.low:{sign}.3f}, {mean.high:{sign}.3f}]"
