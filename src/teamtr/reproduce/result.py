"""What came out: the table with the paper's numbers beside ours, as Markdown, CSV and a page, and the figures."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.analysis.figures import Run, hang, read_runs
from teamtr.analysis.figures.gallery import PAGE
from teamtr.reports import Interval
from teamtr.reproduce import problems
from teamtr.reproduce.cells import Cell, Failed, is_done
from teamtr.reproduce.measures import ACCURACY, ANSWERED, over_seeds
from teamtr.reproduce.recipe import Line, Recipe
from teamtr.reproduce.scales import Setting
from teamtr.session.environment import environment
from teamtr.store import write_atomic
from teamtr.text import visible


@dataclass(frozen=True)
class Value:
    """Of the seeds that have it: their mean, their standard deviation where there are several, and for accuracies an
    interval."""

    mean: float
    deviation: float | None
    seeds: int
    interval: tuple[float, float] | None = None
    """At 95 %, over problems."""

    def text(self) -> str:
        size = abs(self.mean)
        digits = 0 if size >= 1000.0 else 1 if size >= 10.0 or self.interval else 2 if size >= 1.0 else 3
        shown = f"{self.mean:,.{digits}f}"
        if self.deviation is not None:
            shown += f" ± {self.deviation:.{digits}f}"
        return shown if self.interval is None else f"{shown} ({self.interval[0]:.1f} to {self.interval[1]:.1f})"


@dataclass(frozen=True)
class FoundLine:
    name: str
    part: str
    values: dict[str, Value | None]
    paper: dict[str, str]


@dataclass(frozen=True)
class Found:
    """A recipe's table. ``failed`` are teams that are missing in it, with the reason."""

    recipe: str
    title: str
    label: str
    scale: str
    command: str
    columns: tuple[str, ...]
    lines: tuple[FoundLine, ...]
    notes: tuple[str, ...]
    failed: tuple[str, ...]
    figures: tuple[str, ...]
    versions: dict[str, str]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def collect(
    recipe: Recipe, setting: Setting, cells: Sequence[Cell], failed: Sequence[Failed], out: Path, command: str
) -> Found:
    """The table of the runs that are finished, and the figures of them, which are drawn into ``out``."""
    names = {variant.name for variant in recipe.variants}
    done = [cell for cell in cells if cell.variant in names and is_done(cell)]
    trained = [cell for cell in done if cell.method is None]
    read = read_runs([cell.folder for cell in trained]) if trained else []
    runs: dict[str, list[Run]] = {variant.name: [] for variant in recipe.variants}
    answers: dict[str, list[Any]] = {variant.name: [] for variant in recipe.variants}
    for cell, run in zip(trained, read, strict=True):
        runs[cell.variant].append(run)
    for cell in done:
        if cell.method is not None:
            answers[cell.variant].append(json.loads(cell.answers.read_text()))
    shares = {
        name: [problems.of_answers(one) for one in answers[name]] or [problems.at_the_end(run) for run in runs[name]]
        for name in names
    }
    against = next((line.variant for line in recipe.lines if line.name == recipe.reference), None)
    columns = [*recipe.columns]
    if against is not None:
        columns.insert(1, f"points above {recipe.reference}")

    def value(line: Line, column: str) -> Value | None:
        if column not in line.measures:
            others = shares[against] if against not in (None, line.variant) else []
            apart = problems.difference(shares[line.variant], others)
            return apart and Value(100.0 * apart.value, None, len(shares[line.variant]), _points(apart.interval))
        found = _value(
            [ANSWERED[column](one) for one in answers[line.variant] if column in ANSWERED]
            or over_seeds(runs[line.variant], line.measures[column])
        )
        sure = problems.interval(shares[line.variant]) if column == ACCURACY else None
        return found if found is None or sure is None else replace(found, interval=_points(sure))

    lines = tuple(
        FoundLine(line.name, line.part, {column: value(line, column) for column in columns}, dict(line.paper))
        for line in recipe.lines
    )
    notes = [text for note in recipe.notes if (text := note(runs)) is not None]
    drawn: tuple[str, ...] = ()
    if recipe.figures and read:
        gallery = hang(read, out / "figures", recipe.figures)
        drawn = tuple(figure.name for figure, _ in gallery.drawn)
        notes += [f"figure {figure.name} is not drawn: {why}" for figure, why in gallery.lacking]
    return Found(
        recipe.name,
        recipe.title,
        recipe.label,
        setting.scale,
        command,
        tuple(columns),
        lines,
        tuple(notes),
        tuple(f"{one.cell.variant}, seed {one.cell.seed}: {one.why}" for one in failed),
        drawn,
        environment(),
    )


def _value(values: Sequence[float]) -> Value | None:
    if not values:
        return None
    return Value(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def _points(interval: Interval) -> tuple[float, float]:
    return 100.0 * interval.low, 100.0 * interval.high


# -- forms -----------------------------------------------------------------------------------------------------------


def rows(found: Found) -> list[list[str]]:
    """A header, and a row for each line: ours, and the paper's beside it where it has one."""
    printed = [column for column in found.columns if any(column in line.paper for line in found.lines)]
    header = ["", *(name for column in found.columns for name in _heads(column, column in printed))]
    body, part = [], ""
    for line in found.lines:
        if line.part and line.part != part:
            body.append([line.part, *[""] * (len(header) - 1)])
        part = line.part
        cells = [line.name]
        for column in found.columns:
            value = line.values[column]
            cells.append("-" if value is None else value.text())
            if column in printed:
                cells.append(line.paper.get(column, ""))
        body.append(cells)
    return [header, *body]


def _heads(column: str, printed: bool) -> list[str]:
    return [column, "the paper"] if printed else [column]


def markdown(found: Found) -> str:
    header, *body = rows(found)
    table = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *body)]
    parts = [
        f"# {found.title} ({found.label})",
        f"Scale: {found.scale}. Mean and standard deviation over seeds, in brackets 95 % intervals over problems; "
        f'"the paper" is what it prints for its own models and benchmark.\n\n```\n{found.command}\n```',
        "\n".join(table),
        *(["\n".join(f"- {note}" for note in found.notes)] if found.notes else []),
        *(["Failed:\n\n" + "\n".join(f"- {visible(one)}" for one in found.failed)] if found.failed else []),
        *(f"![{name}](figures/{name}.svg)" for name in found.figures),
        "Table made with " + ", ".join(f"{name} {version}" for name, version in found.versions.items()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def comma_separated(found: Found) -> str:
    """A row for every number: line, column, mean, deviation, seeds, interval, and what the paper prints."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", "line", "column", "mean", "deviation", "seeds", "low", "high", "paper"])
    for line in found.lines:
        for column in found.columns:
            value = line.values[column]
            ours = ["", "", 0] if value is None else [value.mean, value.deviation, value.seeds]
            between = ["", ""] if value is None or value.interval is None else [*value.interval]
            writer.writerow([line.part, line.name, column, *ours, *between, line.paper.get(column, "")])
    return text.getvalue()


def page(found: Found) -> str:
    def safe(text: str) -> str:
        return html.escape(visible(text))

    header, *body = rows(found)
    head = "".join(f"<th>{safe(cell)}</th>" for cell in header)
    told = "".join("<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in row) + "</tr>" for row in body)
    notes = "".join(f"<li>{safe(note)}</li>" for note in (*found.notes, *(f"failed: {one}" for one in found.failed)))
    figures = "".join(f'<p><img src="figures/{name}.svg" alt="{name}"></p>' for name in found.figures)
    made = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return PAGE.format(
        title=safe(found.title),
        body=f"<h1>{safe(found.title)} ({safe(found.label)})</h1><pre>{safe(found.command)}</pre>"
        f"<table><tr>{head}</tr>{told}</table><ul>{notes}</ul>{figures}<p>Table made with {safe(made)}.</p>",
    )


def write(found: Found, out: Path) -> None:
    """``table.md``, ``table.csv``, ``index.html`` and ``result.json``."""
    write_atomic(out / "table.md", markdown(found).encode())
    write_atomic(out / "table.csv", comma_separated(found).encode())
    write_atomic(out / "index.html", page(found).encode())
    write_atomic(out / "result.json", (json.dumps(found.as_record(), ensure_ascii=False) + "\n").encode())
