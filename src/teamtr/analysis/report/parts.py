"""What a section shows, as plain values: statements, sentences, tables and charts.

The page draws every kind of part with one function of ``assets/parts.js``, and ``markdown.py`` writes every kind as
text; neither knows any section. Strings may come from models and files: both show them as text and nothing else.

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
"""Points of one series, and corners of one line: what a plot can show, whatever the length of the run."""


class Toned(NamedTuple):
    """A short text that may be good or bad news."""

    text: str
    tone: Tone = ""


Cell: TypeAlias = str | Toned


@dataclass(frozen=True)
class Facts:
    """Short statements side by side."""

    items: tuple[Toned, ...]


@dataclass(frozen=True)
class Text:
    """Sentences that explain what stands above them."""

    text: str


@dataclass(frozen=True)
class Nothing:
    """Why there is nothing to show."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines as they are. With ``folded`` they stand under that name until they are asked for, and not in Markdown."""

    text: str
    folded: str = ""


@dataclass(frozen=True)
class Table:
    """Cells are text; of ``numeric`` tables all columns but the first are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    caption: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Axis:
    """``label`` holds the unit. Of ``percent`` axes values are shares. ``low`` and ``high`` fix its ends."""

    label: str
    percent: bool = False
    whole: bool = False
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one color; a series with a label stands in the legend. ``low`` and ``high`` are intervals of y, drawn
    as whiskers or as a band. ``tips`` are shown over the points."""

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
    """One pair of axes. ``caption`` says what is good. ``levels`` are dashed lines across, with their labels.
    ``nothing`` is said where no series has a point. ``table`` stands for the chart in Markdown, else a summary of its
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
    """Small charts of one kind, side by side, with a caption and a table of them all."""

    charts: Sequence[Chart]
    caption: str
    table: Table


@dataclass(frozen=True)
class Grid:
    """Charts and tables in two columns."""

    parts: Sequence[Chart | Table]


@dataclass(frozen=True)
class Group:
    """Parts under a heading of their own; ``name`` is its first word, in the agent's color."""

    name: str
    title: str
    color: str
    parts: Sequence[Part]


Part: TypeAlias = Facts | Text | Nothing | Code | Table | Chart | Multiples | Grid | Group


# -- making series of rows --------------------------------------------------------------------------------------------

Value: TypeAlias = str | Callable[[Any], Any]
"""Of a row: the name of its field, or a function."""


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
    """A mark for every row of which x and y are numbers. Of more than can be drawn every n-th is taken, the last one
    and all of which ``keep`` holds."""
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
    """Through every row of which x and y are numbers. Of a long line the lowest and the highest point of every stretch
    are kept, so that no peak is lost."""
    points = _stretches(_placed(rows, x, y))
    return Series("line", [at for at, _, _ in points], [value for _, value, _ in points], color=color, label=label)


def band(rows: Iterable[Any], x: Value, low: Value, high: Value, *, color: str = "") -> Series:
    """Between two ends, over every row that has both."""
    ends = [(at, least, _number(high, row)) for at, least, row in _placed(rows, x, low)]
    points = _thin([(at, least, most) for at, least, most in ends if most is not None], None)
    lows = [least for _, least, _ in points]
    return Series("band", [at for at, _, _ in points], lows, lows, [most for _, _, most in points], color=color)


def agent_color(agents: Sequence[str], name: str) -> str:
    """Eight colors, in the order of the team."""
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
    """Values that JSON holds; every part says its kind. The table that stands for a chart in Markdown is left out."""
    if isinstance(part, Series):
        return vars(part)
    if isinstance(part, Axis | Part):
        entries = {field.name: as_plain(getattr(part, field.name)) for field in fields(part) if field.name != "table"}
        return {"part": type(part).__name__.lower(), **entries}
    if isinstance(part, Mapping):
        return {key: as_plain(value) for key, value in part.items()}
    return [as_plain(item) for item in part] if isinstance(part, list | tuple) else part
