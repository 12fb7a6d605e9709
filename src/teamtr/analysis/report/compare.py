"""Compares runs by sampled tokens; the first run is the reference.

The difference in final success is paired by held-out problem, because problems differ in difficulty far more than teams
do. It uses the problems common to the last evaluations of both runs, and states their number. If there are too few, a
note explains why no difference is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.analysis.diagnostics.order import order_of, order_sensitivity
from teamtr.analysis.diagnostics.stability import stability
from teamtr.analysis.report.reading import Reading, read_run
from teamtr.analysis.report.summary import eval_rows, run_facts, update_rows
from teamtr.errors import UserError
from teamtr.evaluation.metrics import paired_difference
from teamtr.presets import Order
from teamtr.randomness import generator
from teamtr.records import Record, number, of_kind
from teamtr.reports import was_kept
from teamtr.text import counted, visible

LEAST_PAIRS = 2
"""Minimum number of common problems: with one there is nothing to resample."""


@dataclass(frozen=True)
class Difference:
    """Final success of run number ``run`` minus that of the first, as shares, with its 95 % interval, over ``pairs``
    common problems. ``solved`` are the shares solved by the first and the other run; ``basis`` states this in words."""

    run: int
    estimate: float
    low: float
    high: float
    pairs: int
    solved: tuple[float, float]
    basis: str


@dataclass(frozen=True)
class Unpaired:
    """The reason why no difference between run number ``run`` and the first is given."""

    run: int
    why: str


def compare_runs(paths: Sequence[Path | str]) -> dict[str, Any]:
    """The data of a comparison, as plain values."""
    if len(paths) < 2:
        raise UserError("compare needs at least two run folders: teamtr compare RUN RUN ...")
    readings = [read_run(path) for path in paths]
    names = labels(readings)
    runs = [_run(label, reading) for label, reading in zip(names, readings, strict=True)]
    alike = [not tasks_differ(readings[0], reading) for reading in readings]
    compared = [difference(readings[0], readings[k], k) for k in range(1, len(runs)) if alike[k]]
    differences = [found for found in compared if isinstance(found, Difference)]
    refused = [found for found in compared if isinstance(found, Unpaired)]
    finals: dict[str, list[float]] = {}
    for run, reading in zip(runs, readings, strict=True):
        if run["final"] is not None and all(alike) and differ_in_order_alone(readings[0], reading):
            finals.setdefault(run["order"], []).append(run["final"]["success"])
    notes = [f"{label}: {note}" for label, r in zip(names, readings, strict=True) for note in r.notes]
    notes += [
        f"{names[k]} and {names[0]} have different tasks ({_task_in_words(readings[k])}; "
        f"{_task_in_words(readings[0])}): their success cannot be compared, and no difference is given"
        for k in range(1, len(runs))
        if not alike[k]
    ]
    notes += [f"{names[found.run]} and {names[0]}: no difference is given: {found.why}" for found in refused]
    return {
        "format": 1,
        "runs": runs,
        "differences": [asdict(d) for d in differences],
        "settings": settings_that_differ(readings),
        "order": asdict(order_sensitivity(finals)) if len(finals) > 1 else None,
        "notes": notes,
    }


def tasks_differ(first: Reading, other: Reading) -> bool:
    """Whether success is not comparable: the tasks have different names, or read different data and have no problems in
    common (a file may have been moved). False if a team file cannot be read."""
    if first.team_file is None or other.team_file is None:
        return False
    if _task_name(first) != _task_name(other):
        return True
    if _sources(first) == _sources(other):
        return False
    return not isinstance(difference(first, other, 1), Difference)


def differ_in_order_alone(first: Reading, other: Reading) -> bool:
    """Whether runs differ in their seed, names and the order of updates at most, so that what lies between their
    results is due to the order or chance. False if a team file cannot be read."""
    settings = [_but_order(reading) for reading in (first, other)]
    return None not in settings and settings[0] == settings[1]


def _but_order(reading: Reading) -> object | None:
    if reading.team_file is None:
        return None
    swaps = [(swap.get("mode"), swap.get("agent")) for swap in of_kind(reading.records, "swap")]
    own = {"seed", "seeds", "name", "trackers", "plan"}
    sizes = reading.team_file.plan.stages, reading.team_file.plan.problems
    plan = replace(reading.team_file.sized_plan(), order=Order("fixed"))
    return reading.team_file.model_dump(exclude=own), sizes, plan, swaps


def _task_name(reading: Reading) -> str:
    """The task's name; for a user's own class without its folder."""
    name = "unknown" if reading.team_file is None else reading.team_file.task.name
    return name.rpartition("/")[2] if name.startswith("python:") else name


def _sources(reading: Reading) -> tuple[str, ...]:
    return () if reading.team_file is None else reading.team_file.task.sources


def _task_in_words(reading: Reading) -> str:
    return " ".join([_task_name(reading), *_sources(reading)])


def difference(first: Reading, other: Reading, run: int) -> Difference | Unpaired:
    """The difference in final success, over the problems common to the last evaluations of both runs."""
    for which, reading in (("the first", first), ("the other", other)):
        if not reading.evals:
            return Unpaired(run, f"{which} was never evaluated; see eval.every")
    sides = [success_by_problem(reading.evals[-1]) for reading in (first, other)]
    asked = [len(side) for side in sides]
    if not all(asked):
        return Unpaired(run, "an evaluation does not say which problems were solved, as in logs of old versions")
    shared = [problem for problem in sides[0] if problem in sides[1]]
    if len(shared) < LEAST_PAIRS:
        some = "no problem" if not shared else "one problem alone"
        why = f"their last evaluations, of {asked[0]} and {asked[1]} problems, share {some}. Both must hold out the "
        return Unpaired(run, f"{why}same: by the same data, and in games by the same task settings and seed")
    first_P, other_P = (np.array([side[problem] for problem in shared]) for side in sides)
    apart = paired_difference(other_P, first_P, rng=generator(0, "compare", run))
    solved = float(first_P.mean()), float(other_P.mean())
    basis = counted(len(shared), "held-out problem")
    if asked != [len(shared)] * 2:
        on_them = " and ".join(f"{100 * share:.1f} %" for share in solved)
        basis += f" that both were asked, of {asked[0]} and {asked[1]}: {on_them} of them solved"
    return Difference(run, apart.value, *apart.interval, len(shared), solved, basis)


def success_by_problem(record: Record) -> dict[str, float]:
    """The success of an evaluation by problem; empty if the record does not have it for every problem."""
    names, values = record.get("problem_ids"), record.get("success_P")
    if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
        return {}
    pairs = [(str(name), number({"x": value}, "x")) for name, value in zip(names, values, strict=True)]
    return {name: value for name, value in pairs if value is not None}


def settings_that_differ(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """Each setting that differs between runs, with its value in each (None: missing, or the file was not read)."""
    flat = [_flatten({} if r.team_file is None else r.team_file.model_dump()) for r in readings]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = [{"key": key, "values": [settings.get(key) for settings in flat]} for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1]


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {path: str(value)}
    return {k: v for key, item in items for k, v in _flatten(item, f"{path}.{key}" if path else str(key)).items()}


def labels(readings: Sequence[Reading]) -> list[str]:
    """Folder names, safe to display; numbered if several are equal."""
    names = [visible(reading.folder.resolve().name) for reading in readings]
    return [f"{name} ({k + 1})" if names.count(name) > 1 else name for k, name in enumerate(names)]


def _run(label: str, reading: Reading) -> dict[str, Any]:
    facts, updates, evals = run_facts(reading), update_rows(reading.updates), eval_rows(reading.records)
    kept = [u for u in updates if was_kept(u["outcome"])]
    return {
        "label": label,
        "evals": evals,
        "rewards": [(u["sampled_tokens_total"], u["reward"]) for u in updates],
        "final": evals[-1] if evals else None,
        "stages_done": facts["stages_done"],
        "updates": len(updates),
        "sampled_tokens": updates[-1]["sampled_tokens_total"] if updates else 0,
        "seconds": facts["seconds"],
        "kept": len(kept),
        "outside": sum(u["outside"] for u in kept),
        "stability": stability(reading.updates, reading.evals).deviation,
        "order": order_of(reading.updates),
    }
