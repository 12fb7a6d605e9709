"""Tables of ``teamtr eval`` for several evaluations: methods and tasks side by side, and means over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teamtr.reports import EvalReport, Interval, MeanDeviation
    from teamtr.session.comparison import Compared


def told_methods(compared: Sequence[Compared]) -> str:
    """One row per method: accuracy, tokens and seconds per answer, and the difference from the first method."""
    from teamtr.cli.progress import table
    from teamtr.cli.words import percent

    first, report = compared[0], compared[0].reports[0]
    seeds = len(first.runs)
    header = [
        "method",
        "tries",
        f"avg@{report.samples}",
        f"{percent(report.confidence)} interval",
        *([f"± over {seeds} seeds"] if seeds > 1 else []),
        "tokens",
        "prompt tokens",
        "seconds",
        *([f"minus {first.method.name}", "interval"] if len(compared) > 1 else []),
    ]
    rows = []
    for each in compared:
        spent, (mean, deviation) = each.spent, each.success
        seconds = "-" if spent.seconds is None else f"{spent.seconds / spent.answers:.3g}"
        row = [each.method.name, str(each.method.tries), f"{100 * mean:.1f} %", _between(each.interval)]
        row += [] if deviation is None else [f"{100 * deviation:.1f}"]
        row += [f"{spent.sampled_tokens / spent.answers:.1f}", f"{spent.prompt_tokens / spent.answers:.1f}", seconds]
        if each.difference is not None:
            row += [f"{100 * each.difference.value:+.1f}", _between(each.difference.interval)]
        rows.append(row + [""] * (len(header) - len(row)))
    counted = f"{report.problems} problems x {report.samples} samples" + (f" x {seeds} seeds" if seeds > 1 else "")
    return f"{counted}; tokens and seconds per answer\n{table(header, rows)}"


def told_tasks(tasks: Sequence[tuple[str, Compared]]) -> str:
    """One row per task. Tasks differ in their problems and samples."""
    from teamtr.cli.progress import table
    from teamtr.cli.words import percent

    seeds = len(tasks[0][1].runs)
    between = f"{percent(tasks[0][1].reports[0].confidence)} interval"
    deviates = [f"± over {seeds} seeds"] if seeds > 1 else []
    header = ["task", "problems", "K", "avg@K", between, *deviates, "pass@K", "majority@K", "tokens"]
    rows = []
    for name, found in tasks:
        report, spent, (mean, deviation) = found.reports[0], found.spent, found.success
        figures = figures_of(found.reports)
        row = [name, str(report.problems), str(report.samples), f"{100 * mean:.1f} %", _between(found.interval)]
        row += [] if deviation is None else [f"{100 * deviation:.1f}"]
        row += [f"{100 * figure:.1f} %" for figure in figures]
        rows.append([*row, f"{spent.sampled_tokens / spent.answers:.1f}"])
    return f"tokens per answer\n{table(header, rows)}"


def figures_of(reports: Sequence[EvalReport]) -> tuple[float, float]:
    """pass@K and majority@K, averaged over seeds."""
    passed = [report.pass_at_k[report.samples] for report in reports]
    return sum(passed) / len(passed), sum(report.majority_at_k for report in reports) / len(reports)


def told_seeds(reports: Sequence[EvalReport], figures: Mapping[str, MeanDeviation]) -> str:
    """One row per measure: its mean and standard deviation over seeds."""
    from teamtr.cli.progress import table

    rows = [
        (name, f"{100 * mean:.1f} %", "-" if deviation is None else f"{100 * deviation:.1f}")
        for name, (mean, deviation) in figures.items()
    ]
    counted = f"{reports[0].problems} problems x {reports[0].samples} samples x {len(reports)} seeds"
    return f"{counted}\n{table(('measure', 'mean', '± over seeds'), rows)}"


def _between(interval: Interval) -> str:
    return f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"
