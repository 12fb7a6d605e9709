"""Tables and a figure of the measurements of bench/growth.py: growth exponents, bends and predictions.

A file of JSON lines holds the points of one grid on one device: a middle point, and points that differ from it in one
size. Predictions are computed when the page is drawn, by the throughput model of that time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.analysis.figures.drawing import Drawing, Panel, Series
from teamtr.analysis.figures.paint import painted
from teamtr.planning.cards import card_named
from teamtr.planning.setup import Cluster, Learning, Sampling, Setup
from teamtr.planning.stage import Prediction, predict
from teamtr.ports import GB
from teamtr.randomness import generator
from teamtr.theory.power_law import find_bend, fit_power_law, slope
from throughput import shape_of, team

AXES = {"agents": "agents", "episodes": "episodes", "length": "tokens", "model": "shape"}
"""The field of a point that each axis varies."""
WORDS = {"agents": "agents", "episodes": "episodes", "length": "tokens of a message", "model": "parameters, millions"}
PHASES = ("sample", "score", "train", "gate")
ON_A_CPU, ON_A_CARD = "cpu", "card"


@dataclass(frozen=True)
class Point:
    """The sizes of one stage: ``episodes`` in groups of ``group``, one message of ``tokens`` per agent, one epoch."""

    shape: str
    agents: int
    episodes: int
    tokens: int
    group: int
    prompt: int
    micro_batch: int

    @property
    def problems(self) -> int:
        return self.episodes // self.group

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.prompt + self.agents * self.tokens

    def at(self, axis: str) -> float:
        """The point's position on an axis; for the model axis, its parameters in millions."""
        if axis == "model":
            return shape_of(self.shape).parameters / 1e6
        return float(getattr(self, AXES[axis]))


@dataclass(frozen=True)
class Measured:
    """The measurements of a point: seconds by phase of each round (a stage), peak memory in GB, the reason if it was
    cut off (then it has no rounds), and ``core``, the share of a CPU core that it had (on a CPU). ``planned_gb``: the
    memory plan of the loaded models with the micro-batch and recomputation that the rehearsal chose; None on a CPU and
    for points that were measured before it was recorded."""

    point: Point
    middle: Point
    card: str
    device: str
    limit_s: float
    rounds: tuple[Mapping[str, float], ...]
    peak_gb: float | None
    cut: str | None
    core: float | None
    versions: Mapping[str, str | None]
    pieces: int | None = None
    """Number of pieces in which a turn's sampling was timed; None: the whole turn."""
    planned_gb: float | None = None

    def seconds(self, phase: str) -> list[float]:
        """Seconds of a phase in every round; of the whole stage if the phase is ``stage``."""
        return [sum(one[p] for p in PHASES) if phase == "stage" else one[phase] for one in self.rounds]

    def as_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read(file: Path) -> dict[Point, Measured]:
    """Reads the points of a file. A point's last line counts: it may have been retried with a larger limit."""
    found: dict[Point, Measured] = {}
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), start=1):
        try:
            row = json.loads(line)
            points = {name: Point(**row.pop(name)) for name in ("point", "middle")}
            one = Measured(**points, **{**row, "rounds": tuple(row["rounds"])})
        except (ValueError, TypeError, KeyError) as error:
            raise SystemExit(f"{file}, line {number} is no point of bench/growth.py ({error}): delete it") from error
        found[one.point] = one
    for what in ("middle", "card"):
        if len({getattr(one, what) for one in found.values()}) > 1:
            raise SystemExit(f"{file} holds points of more than one {what}: a file is for one grid on one device")
    return found


def on_axis(points: Mapping[Point, Any], middle: Point, axis: str) -> list[Point]:
    """The points that differ from the middle only on this axis, in order."""
    size = AXES[axis]
    own = [point for point in points if replace(point, **{size: getattr(middle, size)}) == middle]
    return sorted(own, key=lambda point: point.at(axis))


# -- predictions --------------------------------------------------------------------------------------------------


def setup_of(point: Point, card: str) -> Setup:
    """The setup as bench/growth.py runs it: half precision and the paged sampler on a card, one core on a CPU."""
    found = team(
        shape_of(point.shape), point.agents, point.problems, point.group, point.prompt, point.tokens,
        micro_batch=point.micro_batch,
    )  # fmt: skip
    found = replace(found, cluster=Cluster(card_named(card)))
    if not found.cluster.card.is_cpu:
        return found
    learning = Learning(epochs=1, micro_batch=point.micro_batch, precision="fp32")
    return replace(found, learning=learning, sampling=Sampling(paged=False, precision="fp32"))


def predicted(point: Point, card: str) -> Prediction:
    return predict(setup_of(point, card))


def predicted_gb(one: Measured, found: Prediction) -> float:
    """The memory plan recorded with the measurement, else one from the card's data sheet, whose micro-batch may differ
    from the one that was used."""
    return found.memory.plan.total / GB if one.planned_gb is None else one.planned_gb


def predicted_seconds(found: Prediction, phase: str) -> float:
    """Predicted seconds of a phase or of the stage, without the checkpoint, which the benchmark does not write."""
    return sum(found.phases[p].seconds for p in (PHASES if phase == "stage" else (phase,)))


# -- growth -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """Growth exponents of one phase (or of memory) along an axis, measured and predicted; ``bend`` is text."""

    what: str
    measured: str
    predicted: str
    bend: str


def growths(whole: Sequence[Measured], axis: str) -> list[Growth]:
    """Growth along an axis, from points that were not cut off; empty for fewer than two."""
    if len(whole) < 2:
        return []
    n = [one.point.at(axis) for one in whole]
    plans = [predicted(one.point, one.card) for one in whole]
    repeats = min(len(one.rounds) for one in whole)
    found = []
    for phase in (*PHASES, "stage"):
        values_NR = np.array([one.seconds(phase)[:repeats] for one in whole])
        law = fit_power_law(n, values_NR, generator(0, "growth", axis, phase))
        told = "-" if law is None else law.text() if repeats > 1 else f"{law.exponent:.2f}"
        means = np.array([np.mean(one.seconds(phase)) for one in whole])
        plan = slope(n, np.array([predicted_seconds(one, phase) for one in plans]))
        found.append(Growth(phase, told, f"{plan:z.2f}", _bend(n, means)))
    if all(one.peak_gb for one in whole):
        peaks = np.array([one.peak_gb for one in whole])
        plan = slope(n, np.array([predicted_gb(one, plan) for one, plan in zip(whole, plans, strict=True)]))
        found.append(Growth("memory", f"{slope(n, peaks):z.2f}", f"{plan:z.2f}", _bend(n, peaks)))
    return found


def _bend(n: Sequence[float], values_N: Any) -> str:
    bend = find_bend(n, values_N)
    return "" if bend is None else f"at {_number(bend.at)}: {bend.before:z.2f}, then {bend.after:z.2f}"


# -- the page -----------------------------------------------------------------------------------------------------


def markdown(measured: Mapping[Point, Measured]) -> str:
    """Tables of every axis that has points besides the middle, with the growth of each phase."""
    middle = next(iter(measured.values())).middle
    lines = []
    for axis in AXES:
        points = on_axis(measured, middle, axis)
        if len(points) < 2:
            continue
        rows = [measured[point] for point in points]
        lines += [f"**By {WORDS[axis]}**", "", *_points(rows, axis), ""]
        grown = growths([one for one in rows if one.cut is None], axis)
        header = (f"grows with {axis} to the power of", "measured", "predicted", "measured bends")
        cells = [(one.what, one.measured, one.predicted, one.bend) for one in grown]
        lines += [*_table(header, cells), ""] if grown else []
    return "\n".join(lines).rstrip() + "\n"


def _points(rows: Sequence[Measured], axis: str) -> list[str]:
    header = (
        WORDS[axis], *(f"{phase}, s" for phase in PHASES), "stage, s", "predicted, s", "predicted / measured",
        "peak, GB", "predicted, GB",
    )  # fmt: skip
    cells = []
    for one in rows:
        plan = predicted(one.point, one.card)
        stage, memory = predicted_seconds(plan, "stage"), _number(predicted_gb(one, plan))
        place = _number(one.point.at(axis)) + (f" ({one.point.shape})" if axis == "model" else "")
        if one.cut is not None:
            cells.append((place, one.cut, "", "", "", "", _number(stage), "", "", memory))
            continue
        phases = [float(np.mean(one.seconds(phase))) for phase in (*PHASES, "stage")]
        ratio = f"{stage / phases[-1]:.2f}"
        peak = "" if one.peak_gb is None else _number(one.peak_gb)
        cells.append((place, *map(_number, phases), _number(stage), ratio, peak, memory))
    return _table(header, cells)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def part(measured: Mapping[Point, Measured], file: str, figure: str | None) -> str:
    """The part of the page for one device: the conditions of the measurement, the figure and the tables."""
    first = next(iter(measured.values()))
    middle, rounds = first.middle, [len(one.rounds) for one in measured.values() if one.cut is None]
    limits = sorted({one.limit_s for one in measured.values()})
    most = " to ".join(f"{limit:g}" for limit in dict.fromkeys((limits[0], limits[-1])))
    told = ", ".join(f"{name} {version}" for name, version in first.versions.items() if version)
    lines = [
        f"Measured on {first.device}, predicted for the card `{first.card}` ({told}); kept in `{file}`. In the middle: "
        f"shape `{middle.shape}`, {middle.agents} agents, {middle.episodes} episodes in groups of {middle.group}, "
        f"messages of {middle.tokens} tokens behind prompts of {middle.prompt}, micro-batches of "
        f"{middle.micro_batch}. Means of {_range(rounds)} rounds; limit of a point: {most} s.",
        "",
    ]
    shares = [one.core for one in measured.values() if one.core is not None]
    if shares:
        lines += [
            "Seconds are the processor's: beside other work on the machine, the process had "
            f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % of a core.",
            "",
        ]
    for one in measured.values():
        if one.pieces and one.cut is None:
            place = ", ".join(f"{getattr(one.point, size):,} {WORDS[axis]}" for axis, size in AXES.items()
                              if getattr(one.point, size) != getattr(middle, size))  # fmt: skip
            lines += [f"With {place or 'the middle'}, sampling was timed in {one.pieces} pieces of every turn.", ""]
    if figure is not None:
        lines += [f"![seconds of a stage by phase, measured and predicted, along each axis]({figure})", ""]
    return "\n".join(lines) + "\n" + markdown(measured)


def _range(values: Sequence[int]) -> str:
    return " to ".join(str(value) for value in sorted({min(values, default=0), max(values, default=0)}))


def write_page(page: Path, measured: Mapping[Point, Measured], file: str, figure: Path | None) -> None:
    """Replace the part of this device between its two marks, and leave the rest of the page unchanged."""
    name = ON_A_CPU if next(iter(measured.values())).card == "cpu" else ON_A_CARD
    begin, end = f"<!-- growth on a {name}: begin -->", f"<!-- growth on a {name}: end -->"
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{page}: put one line {begin} and one line {end} where the part belongs")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    shown = None if figure is None else Path(os.path.relpath(figure, page.parent)).as_posix()
    page.write_text(f"{before}{begin}\n\n{part(measured, file, shown)}\n{end}{after}")


def drawing(measured: Mapping[Point, Measured]) -> Drawing:
    """A panel for each axis: seconds by phase as points with their range, predictions as dashed lines."""
    first = next(iter(measured.values()))
    panels = []
    for axis in AXES:
        points = on_axis(measured, first.middle, axis)
        if len(points) < 2:
            continue
        plans = [(point.at(axis), predicted(point, first.card)) for point in points]
        own: list[Series] = []
        for phase in PHASES:
            rows = [(one.point.at(axis), one.seconds(phase)) for p in points if (one := measured[p]).cut is None]
            x, y = tuple(place for place, _ in rows), tuple(float(np.mean(values)) for _, values in rows)
            low, high = (tuple(pick(values) for _, values in rows) for pick in (min, max))
            own.append(Series(phase, x, y, low, high, "points"))
        for place, phase in enumerate(PHASES):
            line = [(x, predicted_seconds(plan, phase)) for x, plan in plans]
            own.append(replace(Series.of(f"{phase}, predicted", line, "dashed"), like=place))
        panels.append(Panel(f"by {axis}", WORDS[axis], "seconds of a stage", tuple(own), logarithmic="xy"))
    if not panels:
        raise SystemExit("no axis has two points: there is nothing to draw yet")
    return Drawing(
        tuple(panels),
        f"{first.device}. Points are means of rounds, with the least and the most; what was cut off is left out.",
        "points on the dashed lines",
        across=2,
    )


def draw(file: Path, figure: Path | None, page: Path | None) -> None:
    """Draws the figure and the page, or prints the tables, from the stored lines."""
    measured = read(file)
    if not measured:
        raise SystemExit(f"{file} holds no point: run bench/growth.py --out {file} first")
    if figure is not None:
        figure.write_bytes(painted("How a stage grows", drawing(measured)))
    if page is not None:
        write_page(page, measured, file.name, figure)
    else:
        print(markdown(measured))
