"""The contents of a comparison of runs: for the page, Markdown and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from teamtr.analysis.report.parts import Axis, Chart, Nothing, Part, Series, Table, Text, band, dots, line
from teamtr.analysis.report.section import Data, Shown
from teamtr.analysis.report.words import NONE, clock, num, percent
from teamtr.text import visible

TOKENS = Axis("tokens sampled for training", low=0)


class Lines(NamedTuple):
    """A table with every cell as one line of text without hidden characters; not yet escaped for Markdown."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def comparison_tables(comparison: Data) -> list[Lines]:
    """The results of the runs, and the settings that differ, if any."""
    tables = [_differences(comparison), *([_settings(comparison)] if comparison["settings"] else [])]
    lines = [[[_on_one_line(str(cell)) for cell in row] for row in (t.header, *t.rows)] for t in tables]
    return [Lines(header, rows) for header, *rows in lines]


def comparison_sections(comparison: Data) -> list[Shown]:
    runs = comparison["runs"]
    settings = _settings(comparison) if comparison["settings"] else Nothing("None of the settings that are known.")
    sections: list[tuple[str, str, str, list[Part]]] = [
        (
            "learning",
            "Learning",
            "On an axis of sampled tokens: what counts is success for the same cost.",
            [_success(runs), _rewards(runs)],
        ),
        ("difference", "Difference in final success", "", [_differences(comparison), Text(PAIRED)]),
        ("settings", "Settings that differ", "", [settings]),
        ("numbers", "Other numbers", "", [_numbers(runs), *_order(comparison["order"])]),
        ("notes", "What is missing", "", [Text(note) for note in comparison["notes"]]),
    ]
    return [Shown(key, title, lead, parts) for key, title, lead, parts in sections if parts]


PAIRED = (
    "Good for a run: an interval wholly above zero. Paired bootstrap over the held-out problems that the last "
    "evaluations of both runs asked; where they share none, no difference is given."
)


def _color(k: int) -> str:
    return f"agent-{k % 8}"


def _success(runs: Sequence[Data]) -> Chart:
    bands = [band(run["evals"], "sampled_tokens", "low", "high", color=_color(k)) for k, run in enumerate(runs)]
    lines = [line(run["evals"], "sampled_tokens", "success", color=_color(k)) for k, run in enumerate(runs)]
    return Chart(
        "Held-out success over sampled tokens",
        TOKENS,
        Axis("success, %", percent=True, low=0, high=1),
        [*bands, *lines, *(_evals(run, _color(k)) for k, run in enumerate(runs))],
        caption="Good: a line above and to the left of the others, with bands that do not overlap.",
        height=320,
    )


def _evals(run: Data, color: str) -> Series:
    return dots(
        run["evals"],
        "sampled_tokens",
        "success",
        low="low",
        high="high",
        tip=lambda e: (
            f"{run['label']}, stage {e['stage']}: {percent(e['success'], 1)}\n{num(e['sampled_tokens'])} sampled tokens"
        ),
        color=color,
        label=run["label"],
    )


def _rewards(runs: Sequence[Data]) -> Chart:
    return Chart(
        "Reward of training batches over sampled tokens",
        TOKENS,
        Axis("mean reward"),
        [
            line(run["rewards"], lambda r: r[0], lambda r: r[1], color=_color(k), label=run["label"])
            for k, run in enumerate(runs)
        ],
        caption="Mean reward of each batch. Good: rises early and does not fall back.",
        height=290,
    )


def _differences(comparison: Data) -> Table:
    found = {d["run"]: d for d in comparison["differences"]}
    header = ("run", "sampled tokens", "final success", "difference, points", "95 % interval", "paired over")
    rows = []
    for k, run in enumerate(comparison["runs"]):
        final = NONE if run["final"] is None else percent(run["final"]["success"], 1)
        compared = "reference" if k == 0 else NONE
        told = (compared if found else "", "", "")
        if k in found:
            gained, low, high = (f"{100 * found[k][value]:+.1f}" for value in ("estimate", "low", "high"))
            told = (gained, f"{low} to {high}", found[k]["basis"])
        rows.append((run["label"], num(run["sampled_tokens"]), final, *told))
    return Table(header, rows)


def _settings(comparison: Data) -> Table:
    header = ("setting that differs", *(run["label"] for run in comparison["runs"]))
    rows = [(s["key"], *(NONE if v is None else v for v in s["values"])) for s in comparison["settings"]]
    return Table(header, rows, numeric=False)


def _numbers(runs: Sequence[Data]) -> Table:
    return Table(
        ("run", "stages", "updates", "sampled tokens", "time", "kept", "outside", "stability", "order"),
        [
            (
                run["label"],
                *(num(run[key]) for key in ("stages_done", "updates", "sampled_tokens")),
                clock(run["seconds"]),
                *(num(run[key]) for key in ("kept", "outside", "stability")),
                run["order"],
            )
            for run in runs
        ],
    )


def _order(order: Data | None) -> list[Part]:
    if order is None:
        return []
    means = "; ".join(f"{name}: {percent(mean, 1)}" for name, mean in order["means"].items())
    within = order["within"]
    alike = "an unknown amount (no order was run twice)" if within is None else f"{num(100 * within)} points"
    told = (
        f"Order of updates: means {means}. Spread {num(100 * order['spread'])} points, runs of one order differ by "
        f"{alike}: only a spread well above it means that order matters."
    )
    return [Text(told)]


def _on_one_line(text: str) -> str:
    return visible(" ".join(text.split()))
