"""Renders a drawing as SVG, PDF or PNG, and its numbers as CSV. matplotlib is imported only when rendering."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from teamtr.analysis.figures.drawing import Drawing, Panel, Series
from teamtr.text import visible

COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#7b3294", "#e08214", "#01665e", "#7f7f7f", "#c51b7d")
WIDTH, HEIGHT = 5.2, 3.9
MOST_IN_A_LEGEND = 12
SLANTED, STEEP, MOST_SLANTED = 20, 55, 10
BELOW = {0: 0.4, SLANTED: 0.7, STEEP: 1.1}
"""Inches between axes and legend, by rotation of the names in degrees."""
# Text stays text, so that a figure can be searched and edited; labels are folder names, never formulas.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "teamtr",
    "pdf.fonttype": 42,  # text that can be searched and copied
    "text.parse_math": False,
    "font.size": 8,
}
Form = Literal["svg", "pdf", "png"]
FORMS: tuple[Form, ...] = get_args(Form)
DOTS_PER_INCH = 200
"""Resolution of a PNG."""
_METADATA: dict[Form, dict[str, Any]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Creator": "teamtr", "Producer": None},
    "png": {"Software": None},
}
"""Metadata without dates and matplotlib versions, for reproducible files."""


def csv_text(drawing: Drawing) -> str:
    """One line for each plotted number. Horizontal levels have no x."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("panel", "series", "x", "y", "low", "high"))
    for panel, series, *numbers in drawing.rows():
        values = ("" if n is None or math.isnan(n) else repr(float(n)) for n in numbers)
        writer.writerow((_cell(panel), _cell(series), *values))
    return out.getvalue()


def _cell(text: str) -> str:
    """The text on one line, with a quote before anything that a spreadsheet would evaluate as a formula."""
    line = _line(text)
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) else line


def _line(text: str) -> str:
    """A name of a folder, log or model on one line, without characters that SVG cannot contain."""
    return visible(" ".join(text.split()))


def _cut(text: str, most: int) -> str:
    line = _line(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def painted(title: str, drawing: Drawing, form: Form = "svg") -> bytes:
    """The rendered file. Equal numbers give equal bytes: no date, no random identifiers."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        columns = min(drawing.across or len(drawing.panels), len(drawing.panels))
        rows = -(-len(drawing.panels) // columns)
        told = textwrap.fill(_line(f"{drawing.caption} Good: {drawing.good}."), 88 * columns)
        foot = 0.16 * (told.count("\n") + 1) + 0.1
        legend = 0.14 * max(min(len(panel.series), MOST_IN_A_LEGEND) for panel in drawing.panels)
        height = rows * (HEIGHT + legend) + foot
        figure = Figure(figsize=(WIDTH * columns, height))
        places = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(places, drawing.panels, strict=False):
            _paint(axes, panel)
        for axes in places[len(drawing.panels) :]:
            axes.set_axis_off()
        figure.suptitle(title, fontsize=10)
        figure.text(0.01, 0.05 / height, told, fontsize=7.5, va="bottom")
        figure.tight_layout(rect=(0.0, foot / height, 1.0, 1.0))
        out = io.BytesIO()
        figure.savefig(out, format=form, dpi=DOTS_PER_INCH, metadata={**_METADATA[form], "Title": title})
    return out.getvalue()


def _paint(axes: Any, panel: Panel) -> None:
    bars = [series for series in panel.series if series.kind == "bars"]
    keys: list[tuple[str, Any]] = []
    for k, series in enumerate(panel.series):
        colour = COLOURS[(k if series.like is None else series.like) % len(COLOURS)]
        if series.kind == "bars":
            width = 0.8 / len(bars)
            offset = width * (bars.index(series) - (len(bars) - 1) / 2)
            drawn = axes.bar(np.array(series.x) + offset, series.y, width=width, color=colour, alpha=0.85)
        else:
            drawn = _curve(axes, series, colour)
        keys.append((series.label, drawn))
    for name, level in panel.levels:
        drawn = axes.axhline(level, color="black", linewidth=0.8, linestyle="--")
        if name:
            keys.append((name, drawn))
    if "y" in panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    if "x" in panel.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    if panel.diagonal:
        ends = [*axes.get_xlim(), *axes.get_ylim()]
        axes.plot(
            [min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.7, scalex=False, scaley=False
        )
    slanted = _slant(panel.names)
    if panel.names:
        shown = range(0, len(panel.names), -(-len(panel.names) // 24))
        names = [_cut(panel.names[k], 40) for k in shown]
        axes.tick_params(axis="x", labelsize=6.5)
        axes.set_xticks(
            list(shown), names, rotation=slanted, ha="right" if slanted else "center", rotation_mode="anchor"
        )
    elif len(places := sorted({x for series in panel.series for x in series.x})) <= 8 and _whole(places):
        axes.set_xticks(places)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(textwrap.fill(_line(panel.title), 60), fontsize=8)
    axes.grid(alpha=0.25, linewidth=0.5)
    if keys:
        _legend(axes, keys, BELOW[slanted])


def _slant(names: Sequence[str]) -> int:
    """Rotation in degrees of the names below an axis, so that they do not overlap."""
    if not any(len(name) > 6 for name in names):
        return 0
    return STEEP if len(names) > MOST_SLANTED else SLANTED


def _legend(axes: Any, keys: Sequence[tuple[str, Any]], below: float) -> None:
    """Places the legend ``below`` inches below the axes, independent of their height."""
    from matplotlib.transforms import ScaledTranslation

    at = axes.transAxes + ScaledTranslation(0, -below, axes.figure.dpi_scale_trans)
    left_out = max(len(keys) - MOST_IN_A_LEGEND, 0)
    labels = [_cut(label, 80) for label, _ in keys[:MOST_IN_A_LEGEND]]
    if left_out:
        labels[-1] = f"… and {left_out + 1} more"
    handles = [handle for _, handle in keys[:MOST_IN_A_LEGEND]]
    places = [str(k) for k in range(len(labels))]
    legend = axes.legend(handles, places, fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=at)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)  # set afterwards, because a label that begins with an underscore would be left out


def _whole(values: Sequence[float]) -> bool:
    return all(float(value).is_integer() for value in values)


def _curve(axes: Any, series: Series, colour: str) -> Any:
    """Draws the series and returns its legend handle."""
    x, y = np.array(series.x), np.array(series.y)
    low, high = series.low, series.high
    if series.kind == "dashed":
        (line,) = axes.plot(x, y, "--", color=colour, linewidth=0.9, alpha=0.8)
    elif series.kind == "stairs":
        (line,) = axes.step(x, y, where="post", color=colour)
    elif series.kind == "points":
        if low is not None and high is not None:
            error = np.abs([y - np.array(low), np.array(high) - y])
            axes.errorbar(x, y, yerr=error, fmt="none", ecolor=colour, alpha=0.3, linewidth=0.7)
        (line,) = axes.plot(x, y, ".", color=colour, markersize=4)
    else:
        (line,) = axes.plot(x, y, ".-", color=colour, markersize=4, linewidth=1.2)
        if low is not None and high is not None:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    return line
