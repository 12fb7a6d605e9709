"""A table of trained teams: means over seeds with deviations and intervals, as Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.analysis.figures import Run, hang
from teamtr.analysis.figures.gallery import PAGE
from teamtr.reports import Interval, MeanInterval
from teamtr.store import write_atomic
from teamtr.text import visible


@dataclass(frozen=True)
class Value:
    """A number over the seeds that have it: mean, standard deviation if there are several seeds, and for accuracies an
    interval."""

    mean: float
    deviation: float | None
    seeds: int
    interval: tuple[float, float] | None = None
    """95 % interval over problems."""

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


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, its notes and its figures. ``about`` says what the numbers are, ``command`` what made them; ``failed``
    lists teams that are missing, with the reason."""

    title: str
    about: str
    command: str
    columns: tuple[str, ...]
    lines: tuple[FoundLine, ...]
    notes: tuple[str, ...]
    failed: tuple[str, ...]
    figures: tuple[str, ...]
    versions: dict[str, str]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def value_of(numbers: Sequence[float], sure: Interval | None = None) -> Value | None:
    """The value of one number per seed; ``sure`` is the interval, as shares."""
    if not numbers:
        return None
    deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
    return Value(float(np.mean(numbers)), deviation, len(numbers), None if sure is None else _points(sure))


def points_above(apart: MeanInterval | None, seeds: int) -> Value | None:
    """How many points an accuracy is above another; None if they share no problem."""
    return None if apart is None else Value(100.0 * apart.value, None, seeds, _points(apart.interval))


def drawn(runs: Sequence[Run], names: Sequence[str], out: Path) -> tuple[tuple[str, ...], list[str]]:
    """Draw figures; returns the names of those drawn, and a note for each that could not be."""
    if not (runs and names):
        return (), []
    gallery = hang(runs, out / "figures", names)
    lacking = [f"figure {figure.name} is not drawn: {why}" for figure, why in gallery.lacking]
    return tuple(figure.name for figure, _ in gallery.drawn), lacking


def _points(interval: Interval) -> tuple[float, float]:
    return 100.0 * interval.low, 100.0 * interval.high


# -- formats ---------------------------------------------------------------------------------------------------------


def rows(found: Table) -> list[list[str]]:
    """A header, and a row for each line: our numbers, with the paper's next to them if it has any."""
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


def markdown(found: Table) -> str:
    header, *body = rows(found)
    table = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *body)]
    parts = [
        f"# {found.title}",
        f"{found.about}\n\n```\n{found.command}\n```",
        "\n".join(table),
        *(["\n".join(f"- {note}" for note in found.notes)] if found.notes else []),
        *(["Failed:\n\n" + "\n".join(f"- {visible(one)}" for one in found.failed)] if found.failed else []),
        *(f"![{name}](figures/{name}.svg)" for name in found.figures),
        "Table made with " + ", ".join(f"{name} {version}" for name, version in found.versions.items()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def comma_separated(found: Table) -> str:
    """The table as CSV, a row per number: part, line, column, mean, deviation, seeds, interval, and the paper's
    number."""
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


def page(found: Table) -> str:
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
        body=f"<h1>{safe(found.title)}</h1><p>{safe(found.about)}</p><pre>{safe(found.command)}</pre>"
        f"<table><tr>{head}</tr>{told}</table><ul>{notes}</ul>{figures}<p>Table made with {safe(made)}.</p>",
    )


def write(found: Table, out: Path) -> None:
    """Write ``table.md``, ``table.csv``, ``index.html`` and ``result.json``."""
    write_atomic(out / "table.md", markdown(found).encode())
    write_atomic(out / "table.csv", comma_separated(found).encode())
    write_atomic(out / "index.html", page(found).encode())
    write_atomic(out / "result.json", (json.dumps(found.as_record(), ensure_ascii=False) + "\n").encode())
