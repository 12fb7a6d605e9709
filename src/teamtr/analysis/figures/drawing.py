"""Figures as plain values, which can be read, written as a table and tested without drawing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["line", "points", "bars", "stairs", "dashed"]


class Lacking(Exception):
    """The runs lack the data of this figure. ``remedy`` says what to set or to run."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


@dataclass(frozen=True)
class Series:
    """Points (x, y), with an interval of y if ``low`` and ``high`` are given. ``like``: the index in the panel of the
    series whose color it uses; None: its own."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    kind: Kind = "line"
    like: int | None = None

    @classmethod
    def of(cls, label: str, pairs: Iterable[tuple[float, float]], kind: Kind = "line") -> Series:
        """From points, without intervals."""
        rows = tuple(pairs)
        return cls(label, tuple(x for x, _ in rows), tuple(y for _, y in rows), kind=kind)

    def __post_init__(self) -> None:
        columns = [column for column in (self.x, self.y, self.low, self.high) if column is not None]
        if len({len(column) for column in columns}) != 1:
            raise ValueError(f"series {self.label!r} has columns of different lengths")


@dataclass(frozen=True)
class Panel:
    """One pair of axes, units in the labels. ``levels`` are named horizontal lines; ``names`` label x = 0, 1, ..."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    levels: tuple[tuple[str, float], ...] = ()
    names: tuple[str, ...] = ()
    logarithmic: Literal["", "y", "xy"] = ""
    diagonal: bool = False


@dataclass(frozen=True)
class Drawing:
    """Panels side by side, at most ``across`` in a row (0: all). ``good`` describes a good result; ``notes`` list what
    is missing."""

    panels: tuple[Panel, ...]
    caption: str
    good: str
    notes: tuple[str, ...] = ()
    across: int = 0

    def rows(self) -> Iterator[tuple[str, str, float, float, float | None, float | None]]:
        """Every plotted number: panel, series, x, y, and the interval of y."""
        for panel in self.panels:
            for series in panel.series:
                blank: Sequence[float | None] = [None] * len(series.x)
                columns = zip(series.x, series.y, series.low or blank, series.high or blank, strict=True)
                yield from ((panel.title, series.label, *row) for row in columns)
            yield from ((panel.title, name, float("nan"), level, None, None) for name, level in panel.levels)
