"""The parts of a report section as plain values: facts, text, tables and charts.

The page draws every kind of part with one function of ``assets/parts.js``, and ``markdown.py`` writes every kind as
text; neither depends on sections. Strings may come from models and files, so both treat them only as text.

    Chart(
        "Success over sampled tokens",
        x=Axis("tokens sampled", low=0),
        y=Axis("success", percent=True, low=0, high=1),
        series=(line(rows, "tokens", "success", color="agent-0", label="held-out"),),
        caption="Good: rises.",
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from teamtr.analysis.report.words import finite

Tone = Literal["", "good", "bad"]
MOST_DOTS, MOST_CORNERS = 400, 800
"""Maximum points of a series and vertices of a line, whatever the length of the run."""


class Toned(NamedTuple):
    """A short text, optionally marked as good or bad."""

    text: str
    tone: Tone = ""


Cell: TypeAlias = str | Toned


@dataclass(frozen=True)
class Facts:
    """Short statements side by side."""

    items: tuple[Toned, ...]


@dataclass(frozen=True)
class Text:
    """Sentences that explain the parts above them."""

    text: str


@dataclass(frozen=True)
class Nothing:
    """The reason why there is nothing to show."""

    text: str


@dataclass(frozen=True)
class Code:
    """Preformatted lines. With ``folded`` they are collapsed under that name, and left out of Markdown."""

    text: str
    folded: str = ""


@dataclass(frozen=True)
class Table:
    """Cells are text; in ``numeric`` tables all columns except the first are right-aligned."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    caption: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Axis:
    """``label`` includes the unit. The values of ``percent`` axes are shares. ``low`` and ``high`` fix the ends."""

    label: str
    percent: bool = False
    whole: bool = False
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one color; a series with a label appears in the legend. ``low`` and ``high`` are intervals of y, drawn
    as whiskers or as a band. ``tips`` are the tooltips of the points."""

    kind: Literal["dots", "crosses", "line", "band"]
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    tips: Sequence[str] = ()
    color: str = ""
    label: str = ""
    size: float = 3.0


@dataclass(frozen=True)
class Chart:
    """One pair of axes. ``caption`` describes a good result. ``levels`` are dashed horizontal lines with labels.
    ``nothing`` is shown if no series has a point. ``table`` replaces the chart in Markdown; without it a summary of the
    series does."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    caption: str = ""
    levels: Sequence[tuple[float, str]] = ()
    diagonal: bool = False
    nothing: str = "Nothing of this is in the log."
    table: Table | None = None
    color: str = ""
    height: int | None = None

    @property
    def empty(self) -> bool:
        return not any(len(series.y) for series in self.series)


@dataclass(frozen=True)
class Multiples:
    """Small charts of one kind, side by side, with a common caption and table."""

    charts: Sequence[Chart]
    caption: str
    table: Table


@dataclass(frozen=True)
class Grid:
    """Charts and tables in two columns."""

    parts: Sequence[Chart | Table]


@dataclass(frozen=True)
class Group:
    """Parts under a heading of their own; ``name`` is the first word of the heading, in the agent's color."""

    name: str
    title: str
    color: str
    parts: Sequence[Part]


Part: TypeAlias = Facts | Text | Nothing | Code | Table | Chart | Multiples | Grid | Group


# -- series from rows -------------------------------------------------------------------------------------------------

Value: TypeAlias = str | Callable[[Any], Any]
"""How to get a value from a row: the name of a field, or a function."""


def dots(
    rows: Iterable[Any],
    x: Value,
    y: Value,
    *,
    low: Value | None = None,
    high: Value | None = None,
    tip: Callable[[Any], str] | None = None,
    keep: Value | None = None,
    color: str = "",
    label: str = "",
    size: float = 3.0,
    crosses: bool = False,
) -> Series:
    """A mark for every row whose x and y are numbers. If there are too many, every n-th is kept, plus the last one and
    all rows for which ``keep`` is true."""
    points = _thin(_placed(rows, x, y), keep)
    return Series(
        kind="crosses" if crosses else "dots",
        x=[at for at, _, _ in points],
        y=[value for _, value, _ in points],
        low=[] if low is None else [_number(low, row) for _, _, row in points],
        high=[] if high is None else [_number(high, row) for _, _, row in points],
        tips=[] if tip is None else [tip(row) for _, _, row in points],
        color=color,
        label=label,
        size=size,
    )


def line(rows: Iterable[Any], x: Value, y: Value, *, color: str = "", label: str = "") -> Series:
    """A line through every row whose x and y are numbers. Of a long line, the lowest and the highest point of every
    segment are kept, so that no peak is lost."""
    points = _stretches(_placed(rows, x, y))
    return Series("line", [at for at, _, _ in points], [value for _, value, _ in points], color=color, label=label)


def band(rows: Iterable[Any], x: Value, low: Value, high: Value, *, color: str = "") -> Series:
    """A band between two ends, over every row that has both."""
    ends = [(at, least, _number(high, row)) for at, least, row in _placed(rows, x, low)]
    points = _thin([(at, least, most) for at, least, most in ends if most is not None], None)
    lows = [least for _, least, _ in points]
    return Series("band", [at for at, _, _ in points], lows, lows, [most for _, _, most in points], color=color)


def agent_color(agents: Sequence[str], name: str) -> str:
    """The agent's color: one of eight, in the order of the team."""
    return f"agent-{agents.index(name) % 8}" if name in agents else "agent-none"


_Placed: TypeAlias = list[tuple[float, float, Any]]


def _placed(rows: Iterable[Any], x: Value, y: Value) -> _Placed:
    at, value = _getter(x), _getter(y)
    points = ((at(row), value(row), row) for row in rows)
    return [(a, b, row) for a, b, row in points if finite(a) and finite(b)]


def _getter(value: Value) -> Callable[[Any], Any]:
    return itemgetter(value) if isinstance(value, str) else value


def _number(value: Value, row: Any) -> float | None:
    found = _getter(value)(row)
    return found if finite(found) else None


def _thin(points: _Placed, keep: Value | None) -> _Placed:
    every = -(-len(points) // MOST_DOTS)
    if every <= 1:
        return points
    kept = _getter(keep) if keep is not None else (lambda row: False)
    last = len(points) - 1
    return [point for k, point in enumerate(points) if k % every == 0 or k == last or kept(point[2])]


def _stretches(points: _Placed) -> _Placed:
    every = -(-2 * len(points) // MOST_CORNERS)
    if every <= 2:
        return points
    kept: _Placed = []
    for k in range(0, len(points), every):
        stretch = range(k, min(k + every, len(points)))
        ends = {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return kept


# -- for the page -----------------------------------------------------------------------------------------------------


def as_plain(part: Any) -> Any:
    """The part as JSON values with its kind. The table that replaces a chart in Markdown is left out."""
    if isinstance(part, Series):
        return vars(part)
    if isinstance(part, Axis | Part):
        entries = {field.name: as_plain(getattr(part, field.name)) for field in fields(part) if field.name != "table"}
        return {"part": type(part).__name__.lower(), **entries}
    if isinstance(part, Mapping):
        return {key: as_plain(value) for key, value in part.items()}
    return [as_plain(item) for item in part] if isinstance(part, list | tuple) else part
