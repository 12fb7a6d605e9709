"""``teamtr lab``: experiments on small teams, most of them exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from teamtr.cli.common import JsonFlag, answer, app, emit, errors, fail, interruptible
from teamtr.cli.late import LateApp

lab = LateApp(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Experiments on small teams. All but `staleness` are exact: nothing is sampled, so any violation is real.",
)
app.add_typer(lab, name="lab")


def _drawable(figure: Path | None) -> Path | None:
    """Check the suffix before anything is computed."""
    if figure is not None and figure.suffix not in (".png", ".pdf", ".svg"):
        fail(f"--figure: {figure} must end in .png, .pdf or .svg, which is the form that it gets", 2)
    return figure


Figure = Annotated[
    Path | None,
    typer.Option("--figure", callback=_drawable, help="Where to draw the figure: a `.png`, `.pdf` or `.svg` file."),
]
Seed = Annotated[int, typer.Option(help="Random seed.")]


def _finish_lab(
    record: dict[str, Any], draw: Callable[..., Any], report: Any, figure: Path | None, as_json: bool
) -> None:
    from teamtr.cli.terminal import say

    if figure is not None:
        try:
            draw(report, figure)
        except ImportError:
            fail("figures need matplotlib: pip install 'teamtr[plot]'", 2)
        say(f"figure: {figure}")
    if as_json:
        emit(record)


@lab.command()
def verify(
    teams: Annotated[int, typer.Option(min=1, help="Number of random teams.")] = 10000,
    seed: Seed = 0,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Check every statement of the paper, and our own, on exactly solved random teams; exit code 1 on a violation."""
    from teamtr.cli.progress import table
    from teamtr.lab import figures
    from teamtr.lab import verify as labs

    with errors():
        report = labs.verify(teams=teams, seed=seed)
    record = report.as_json()
    rows = [
        (name, str(c["tested"]), str(c["violations"]), _figure(c["median_ratio"]), _figure(c["p99_ratio"]))
        for name, c in record["checks"].items()
    ]
    violations = sum(c["violations"] for c in record["checks"].values())
    shown = table(("statement", "tested", "violations", "median bound/true", "99th percentile"), rows)
    answer(f"{shown}\n{teams} teams, {len(rows)} statements, {violations} violations", as_json)
    _finish_lab(record, figures.draw_verify, report, figure, as_json)
    if violations:
        raise typer.Exit(1)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _exponent(fit: dict[str, float] | None) -> str:
    return "zero" if fit is None else f"{fit['exponent']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]"


@lab.command()
def roles(
    seeds: Annotated[int, typer.Option(min=2, help="Teams per size.")] = 8,
    stages: Annotated[int, typer.Option(min=10, help="Stages per run.")] = 40,
    radius: Annotated[float, typer.Option(help="KL of every update, in nats per message.")] = 0.01,
    largest: Annotated[int, typer.Option(min=2, help="Largest team size; the smallest is 2.")] = 12,
    seed: Seed = 0,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare exact updates from fresh and stale state distributions: exactly one of n blind agents must volunteer."""
    from teamtr.cli.progress import table
    from teamtr.lab import figures
    from teamtr.lab import roles as labs

    with errors():
        report = labs.roles(ns=range(2, largest + 1), seeds=seeds, stages=stages, radius=radius, seed=seed)
    rows = labs.table(report, sizes=report.n)
    answer(table(list(rows[0]), [[_figure(value) for value in row.values()] for row in rows]), as_json)
    _finish_lab(report.as_record(), figures.draw_roles, report, figure, as_json)


@lab.command()
def scaling(seed: Seed = 0, figure: Figure = None, as_json: JsonFlag = False) -> None:
    """Show how stale gaps and drift grow with the number of agents, in several families of games, with fitted
    exponents."""
    from teamtr.cli.progress import table
    from teamtr.lab import figures
    from teamtr.lab import scaling as labs

    with errors():
        report = labs.scaling(seed=seed)
    record = report.as_record()
    header = ("family", "rule", "order", "gap ~ n^", "as claimed", "drift ~ n^", "as claimed")
    rows = [
        (
            f["family"],
            f["rule"],
            f["order"],
            _exponent(f["tail"]["gap"]),
            str(f["verdicts"]["gap"]),
            _exponent(f["tail"]["drift"]),
            str(f["verdicts"]["drift"]),
        )
        for f in record["families"]
    ]
    answer(f"{table(header, rows)}\n\n{record['note']}", as_json)
    _finish_lab(record, figures.draw_scaling, report, figure, as_json)


@lab.command()
def tightness(
    teams: Annotated[int, typer.Option(min=10, help="Random teams of each kind.")] = 2000,
    seed: Seed = 0,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Show how often a certificate, the paper's or ours, is positive for a step that truly improves."""
    from teamtr.cli.progress import table
    from teamtr.cli.words import percent
    from teamtr.lab import figures
    from teamtr.lab import tightness as labs

    with errors():
        report = labs.tightness(teams=teams, seed=seed)
    record = report.as_record()
    kinds = list(record["rows"][0]["certified"])
    rows = [
        (
            str(r["turns"]),
            r["direction"],
            str(r["improving"]),
            *(percent(r["certified"][k]) for k in kinds),
            str(sum(r["violated"].values())),
        )
        for r in record["rows"]
    ]
    title = "share of truly improving steps whose certified lower bound is positive"
    answer(f"{title}\n{table(('turns', 'direction', 'improving', *kinds, 'violations'), rows)}", as_json)
    _finish_lab(record, figures.draw_tightness, report, figure, as_json)


@lab.command()
def staleness(
    cells: Annotated[str, typer.Option(help="Only these cells, with commas, such as `roles-8-0.1,roles-3-0.5`.")] = "",
    plans: Annotated[str, typer.Option(help="Only these plans, with commas, such as `teamtr,auto`.")] = "",
    seeds: Annotated[int | None, typer.Option(min=2, help="Runs per cell and plan; 6, or 2 with --quick.")] = None,
    seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one for each core.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep every finished run here; the same command goes on where it stopped.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two small cells, two seeds: shows that it works.")] = False,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Show where stale rollouts fail: train tiny teams with every plan, over games, team sizes and radii.

    Compares fresh, stale, reweighted, automatic and partial sampling at equal updates, equal tokens and equal seconds.
    The whole experiment takes hours on one core. `--cells`, `--plans`, `--seed` and `--out` split it into several calls
    or over several machines: put the files of their `--out` folders into one.
    """
    from teamtr.lab import staleness_cells as catalogue

    with errors(), interruptible():
        chosen = catalogue.chosen(_names(cells), catalogue.QUICK if quick else catalogue.MAP)
        chosen_plans = catalogue.chosen_plans(_names(plans) or (catalogue.QUICK_PLANS if quick else ()))

        from teamtr.cli.staleness import show_run, tables
        from teamtr.lab import figures
        from teamtr.lab import staleness as labs
        from teamtr.lab.staleness_runs import Job, make_runs
        from teamtr.session.processes import usable_cores

        numbers = range(seed, seed + (seeds or (2 if quick else 6)))
        jobs = [Job(cell, plan, number) for cell in chosen for plan in chosen_plans for number in numbers]
        runs = make_runs(jobs, workers or usable_cores(), out, show_run(len(jobs)))
        report = labs.compare(chosen, chosen_plans, numbers, runs)
    answer(tables(report), as_json)
    _finish_lab(report.as_record(), figures.draw_staleness, report, figure, as_json)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
