"""Renders the report and the comparison as Markdown, for terminals, pull requests and notebooks.

Every kind of part is rendered here, for all sections; every text is escaped.
"""

from __future__ import annotations

from teamtr.analysis.report.comparison import comparison_tables
from teamtr.analysis.report.parts import (
    Axis,
    Cell,
    Chart,
    Code,
    Facts,
    Grid,
    Group,
    Multiples,
    Nothing,
    Part,
    Series,
    Table,
    Text,
    Toned,
)
from teamtr.analysis.report.section import Data, Shown, shown
from teamtr.analysis.report.words import num, percent
from teamtr.text import counted, in_markdown, visible


def report_text(data: Data) -> str:
    """The report of one run."""
    run = data["run"]
    parts = [
        f"# {in_markdown(run['name'])}",
        f"{run['state']}, {run['stages_done']} of {run['stages'] or '?'} stages, "
        f"{counted(len(data['updates']), 'update')}, agents {in_markdown(', '.join(run['agents']))}, "
        f"plan {in_markdown(str(run['preset']))}, seed {run['seed']}.",
        *(f"> {in_markdown(note)}" for note in data["notes"]),
        "## At a glance",
        *(f"- **{a['question']}** {in_markdown(a['headline'])}. {in_markdown(a['text'])}" for a in data["headlines"]),
        *(text for section in shown(data) for text in _section(section)),
    ]
    return "\n\n".join(parts) + "\n"


def comparison_text(comparison: Data) -> str:
    """The comparison of several runs."""
    tables = [_table(Table(*lines)) for lines in comparison_tables(comparison)]
    return "\n\n".join([*tables, *(f"> {in_markdown(note)}" for note in comparison["notes"])]) + "\n"


def _section(section: Shown) -> list[str]:
    """The lines of a section; none if only its script draws it."""
    if not section.parts:
        return []
    lead = [in_markdown(section.lead)] if section.lead else []
    return [f"## {in_markdown(section.title)}", *lead, *(text for part in section.parts for text in _part(part))]


def _part(part: Part) -> list[str]:
    match part:
        case Facts(items):
            return ["; ".join(in_markdown(item.text) for item in items) + "."]
        case Text(text) | Nothing(text):
            return [in_markdown(text)]
        case Code(text, folded):
            return [] if folded else ["```\n" + visible(text).replace("```", "'''") + "\n```"]
        case Table(title=title, caption=caption):
            return [*_heading(title), _table(part), *_caption(caption)]
        case Chart(title=title, caption=caption):
            if part.empty:
                return [*_heading(title), in_markdown(part.nothing)]
            heading = f"**{in_markdown(title)}** ({in_markdown(f'{part.y.label}, over {part.x.label}')})"
            return [heading, _table(part.table or _summary(part)), *_caption(caption)]
        case Multiples(caption=caption, table=table):
            return [_table(table), *_caption(caption)]
        case Grid(parts):
            return [text for inner in parts for text in _part(inner)]
        case Group(name, title, _, parts):
            return [
                f"### {in_markdown(name)} {in_markdown(title)}",
                *(text for inner in parts for text in _part(inner)),
            ]


def _heading(title: str) -> list[str]:
    return [f"**{in_markdown(title)}**"] if title else []


def _caption(text: str) -> list[str]:
    return [in_markdown(text)] if text else []


def _summary(chart: Chart) -> Table:
    """A table of a chart's series with their ends and extremes: those with a label, or the first that has points."""
    drawn = [series for series in chart.series if len(series.y)]
    told = [series for series in drawn if series.label] or drawn[:1]
    rows = [(series.label or chart.y.label, num(len(series.y)), *_extremes(series, chart.y)) for series in told]
    return Table(("", "points", "first", "last", "lowest", "highest"), rows)


def _extremes(series: Series, axis: Axis) -> list[str]:
    values = (series.y[0], series.y[-1], min(series.y), max(series.y))
    return [percent(value, 1) if axis.percent else num(value) for value in values]


def _table(table: Table) -> str:
    if not table.rows:
        return "Nothing of this is in the log."
    cells = [[in_markdown(_text(cell)) for cell in row] for row in (table.header, *table.rows)]
    widths = [max(len(row[c]) for row in cells) for c in range(len(table.header))]
    lines = ["| " + " | ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _text(cell: Cell) -> str:
    return cell.text if isinstance(cell, Toned) else cell
