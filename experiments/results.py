"""Methods side by side on GSM8K: one table of runs that were made on different days.

    python experiments/results.py --runs reproduced/main-results-small      # adds its finished runs to the store
    python experiments/results.py --figure docs/figures/results.svg         # the table and a figure
    python experiments/results.py --table ablation --runs reproduced/ablation-small

A GPU is not always available for as long as a whole table takes. ``teamtr reproduce main-results --scale small``
resumes where it stopped, but only on a machine that still has its folders. This script keeps what the table needs of
every run in one small file (``--store``, docs/gsm8k.json): which held-out problems were answered right, tokens,
seconds. Runs whose folders are lost are stored with the numbers that remain.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.analysis.figures import Run, read_runs
from teamtr.analysis.figures.drawing import Drawing, Panel, Series
from teamtr.analysis.figures.paint import painted
from teamtr.reproduce import find
from teamtr.reproduce.recipe import Line
from teamtr.sweep import measures as of
from teamtr.sweep.problems import at_the_end, interval, of_answers

STORE = Path(__file__).resolve().parent.parent / "docs" / "gsm8k.json"
SAME = {
    "teamtr-full": "teamtr",
    "no-resampling-naive-sequential": "naive-once-a-stage",
    "importance-weighting-no-resampling": "reweighted",
    "auto-not-in-the-paper": "auto",
    "fixed-order": "teamtr",
    "no-hard-clipping": "teamtr",
}
"""Rows of the ablation that equal a row of the main table: agents are updated in a fixed order there too, and in groups
of eight no advantage reaches the clip (PAPER.md, note 12)."""


@dataclass(frozen=True)
class Result:
    """One run, or one evaluation of a method that trains nothing.

    ``problems``: the share of right answers by problem, where it is known. ``told``: the 95 % interval of the mean over
    all seeds of this variant, for runs whose results by problem are not known.
    """

    variant: str
    seed: int
    accuracy: float
    before: float | None = None
    tokens_per_answer: float | None = None
    seconds_per_answer: float | None = None
    millions_sampled: float | None = None
    seconds_to_train: float | None = None
    coordination: float | None = None
    largest_kl: float | None = None
    problems: Mapping[str, float] | None = None
    told: tuple[float, float] | None = None


def results_of(runs: Path) -> Iterator[Result]:
    """Finished runs, evaluated at their end, in a folder that ``teamtr reproduce main-results`` wrote."""
    for folder in sorted(runs.glob("runs/*-seed*")):
        variant, seed = folder.name.rsplit("-seed", 1)
        if (folder / "answers.json").exists():
            answers = json.loads((folder / "answers.json").read_text())
            told = {column: measure(answers) for column, measure in of.ANSWERED.items()}
            yield Result(
                variant, int(seed), told[of.ACCURACY], None, told[of.TOKENS], told[of.SECONDS],
                problems=dict(of_answers(answers)),
            )  # fmt: skip
        elif (folder / "log.jsonl").exists():
            (run,) = read_runs([folder])
            if _is_whole(run):
                yield Result(
                    variant, int(seed), of.success(run) or 0.0, of.success_before(run), of.tokens_per_answer(run),
                    of.seconds_per_answer(run), of.millions_sampled(run), of.seconds_to_train(run),
                    of.coordination(run),
                    max((row["kl_full"] for row in run.kept), default=None),
                    problems=dict(at_the_end(run)),
                )  # fmt: skip


def _is_whole(run: Run) -> bool:
    evals, facts = run.data["evals"], run.data["run"]
    return facts["state"] == "finished" and bool(evals) and evals[-1]["stage"] >= facts["stages"]


def load(store: Path) -> dict[tuple[str, int], Result]:
    if not store.exists():
        return {}
    stored = json.loads(store.read_text())
    found = {}
    for row in stored["results"]:
        right = row.pop("right", None)
        problems = None if right is None else dict(zip(stored["problems"], map(float, right), strict=True))
        told = tuple(row["told"]) if "told" in row else None
        result = Result(**{**row, "problems": problems, "told": told})
        found[result.variant, result.seed] = result
    return found


def save(results: Mapping[tuple[str, int], Result], store: Path) -> None:
    """Writes one line per result, with a 0 or 1 for each problem."""
    asked = {tuple(sorted(result.problems)) for result in results.values() if result.problems is not None}
    if len(asked) > 1:
        raise SystemExit("the runs were evaluated on different problems: they do not belong into one table")
    ids = next(iter(asked), ())
    rows = []
    for place in sorted(results):
        result = results[place]
        row = {name: value for name, value in asdict(result).items() if name != "problems" and value is not None}
        if result.problems is not None:
            if set(result.problems.values()) - {0.0, 1.0}:
                raise SystemExit(
                    f"{result.variant}, seed {result.seed}: one answer for each problem is stored, not more"
                )
            row["right"] = "".join(f"{result.problems[name]:.0f}" for name in ids)
        rows.append(json.dumps(row))
    listed = ",\n".join(rows)
    store.write_text(f'{{"problems": {json.dumps(ids)}, "results": [\n{listed}\n]}}\n')


@dataclass(frozen=True)
class Row:
    """A line of the table: the mean of its seeds."""

    line: Line
    results: tuple[Result, ...]

    @property
    def accuracy(self) -> float:
        return float(np.mean([result.accuracy for result in self.results]))

    @property
    def sure(self) -> tuple[float, float] | None:
        """The 95 % interval, over problems where they are known, else as stored with the runs."""
        known = [result.problems for result in self.results if result.problems is not None]
        if len(known) == len(self.results) and (found := interval(known)) is not None:
            return 100.0 * found.low, 100.0 * found.high
        told = {result.told for result in self.results}
        return told.pop() if len(told) == 1 else None  # it holds for exactly these seeds

    def mean(self, name: str) -> float | None:
        known = [value for result in self.results if (value := getattr(result, name)) is not None]
        return float(np.mean(known)) if known else None


def rows_of(results: Mapping[tuple[str, int], Result], table: str) -> list[Row]:
    """Rows in the order of the paper's table, without lines that have no run."""
    found = []
    for line in find(table).lines:
        wanted = SAME.get(line.variant, line.variant) if table == "ablation" else line.variant
        own = tuple(result for (variant, _), result in sorted(results.items()) if variant == wanted)
        found += [Row(line, own)] if own else []
    return found


Column = tuple[str, Callable[[Row], str]]
BEFORE: Column = ("before", lambda row: _text(row.mean("before"), ".1f"))
SAMPLED: Column = ("sampled to train", lambda row: _text(row.mean("millions_sampled"), ".2f", "M"))
COLUMNS: dict[str, tuple[Column, ...]] = {
    "main-results": (
        BEFORE,
        ("tokens per answer", lambda row: _text(row.mean("tokens_per_answer"), ",.0f")),
        ("seconds per answer", lambda row: _text(row.mean("seconds_per_answer"), ".3f")),
        SAMPLED,
        ("seconds to train", lambda row: _text(row.mean("seconds_to_train"), ",.0f")),
    ),
    "ablation": (
        BEFORE,
        ("coordination, %", lambda row: _text(row.mean("coordination"), ".1f")),
        ("largest KL", lambda row: _text(row.mean("largest_kl"), ".2g")),
        SAMPLED,
    ),
}


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    header = ("", "accuracy, %", "by seed", *(name for name, _ in columns))
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    part = ""
    for row in rows:
        if row.line.part != part:
            part = row.line.part
            lines.append(f"| *{part}* |" + " |" * (len(header) - 1))
        seeds = ", ".join(f"{result.accuracy:.1f}" for result in row.results) if len(row.results) > 1 else ""
        sure = "" if row.sure is None else " ({:.1f} to {:.1f})".format(*row.sure)
        cells = [row.line.name, f"{row.accuracy:.1f}{sure}", seeds, *(told(row) for _, told in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def drawing(rows: Sequence[Row]) -> Drawing:
    """Two panels: accuracy of every row with its interval, colored by part of the table, and tokens per answer."""
    names = tuple(row.line.name for row in rows)
    series = []
    for part in dict.fromkeys(row.line.part for row in rows):
        own = [(place, row) for place, row in enumerate(rows) if row.line.part == part]
        sure = [row.sure or (row.accuracy, row.accuracy) for _, row in own]
        places, values = tuple(float(place) for place, _ in own), tuple(row.accuracy for _, row in own)
        bounds = tuple(low for low, _ in sure), tuple(high for _, high in sure)
        series.append(Series(part.split(" (")[0], places, values, *bounds, "points"))
    costs = [
        (float(place), tokens)
        for place, row in enumerate(rows)
        if (tokens := row.mean("tokens_per_answer")) is not None
    ]
    return Drawing(
        (
            Panel("200 held-out questions of GSM8K", "", "right answers, %", tuple(series), names=names),
            Panel(
                "What an answer costs",
                "",
                "sampled tokens",
                (Series.of("tokens per answer", costs, "bars"),),
                names=names,
            ),
        ),
        "Lines are 95 % intervals over problems.",
        "high on the left, low on the right",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, action="append", default=[], help="a folder of `teamtr reproduce`")
    parser.add_argument("--table", choices=tuple(COLUMNS), default="main-results")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--figure", type=Path, help="SVG; needs matplotlib")
    a = parser.parse_args(arguments)
    results: dict[tuple[str, int], Any] = load(a.store)
    for folder in a.runs:
        for result in results_of(folder):
            results[result.variant, result.seed] = result
    if a.runs:
        save(results, a.store)
    rows = rows_of(results, a.table)
    print(markdown(rows, COLUMNS[a.table]))
    if a.figure is not None:
        a.figure.write_bytes(painted("Methods side by side", drawing(rows)))


if __name__ == "__main__":
    main()
