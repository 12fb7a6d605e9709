"""The runs that figures are drawn from, each with the summary of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teamtr.analysis.figures.drawing import Lacking
from teamtr.analysis.report import Reading, read_run
from teamtr.analysis.report.compare import labels
from teamtr.analysis.report.summary import summarise
from teamtr.presets import Order
from teamtr.reports import was_kept


@dataclass(frozen=True)
class Run:
    """``data`` is the report's summary, so that figures and report always agree."""

    label: str
    reading: Reading
    data: Mapping[str, Any]

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The numbered rows of updates, in order."""
        return [row for row in self.data["updates"] if row["update"] is not None]

    @property
    def kept(self) -> list[dict[str, Any]]:
        return [row for row in self.updates if was_kept(row["outcome"])]

    @property
    def probes(self) -> list[dict[str, Any]]:
        return list((self.data["probes"] or {"updates": []})["updates"])

    @property
    def size(self) -> int:
        """The number of agents."""
        return len(self.data["run"]["agents"])


def read_runs(folders: Sequence[Path | str]) -> list[Run]:
    readings = [read_run(folder) for folder in folders]
    return [Run(label, reading, summarise(reading)) for label, reading in zip(labels(readings), readings, strict=True)]


def seeds_together(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs that differ only in seed, name and trackers, under the first one's label."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        settings = run.reading.team_file
        key = run.label
        if settings is not None:
            swaps = [(swap["mode"], swap["agent"], swap["stage"]) for swap in run.data["swaps"]]
            key = f"{settings.model_dump(exclude={'seed', 'name', 'trackers'})} {swaps}"
        seeds = [other.data["run"]["seed"] for other in groups.get(key, ())]
        groups.setdefault(run.label if run.data["run"]["seed"] in seeds else key, []).append(run)
    return {
        group[0].label if len(group) == 1 else f"{group[0].label} ({len(group)} seeds)": group
        for group in groups.values()
    }


def alike(runs: Sequence[Run], but: str) -> tuple[list[Run], tuple[str, ...]]:
    """The runs that differ from the first only in ``but`` ("order" of updates, or the "team") and the seed, so that
    differences have a single cause; and a note on each run left out."""
    keys = [_key(run, but) for run in runs]
    notes = tuple(
        f"{run.label} is left out: it differs from {runs[0].label} in more than the {but}"
        for run, key in zip(runs, keys, strict=True)
        if key != keys[0]
    )
    return [run for run, key in zip(runs, keys, strict=True) if key == keys[0]], notes


def _key(run: Run, but: str) -> object:
    settings, plan = run.reading.team_file, run.reading.plan
    if settings is None or plan is None:
        return run.label
    left_out = {"seed", "name", "trackers", "plan"} | ({"team"} if but == "team" else set())
    steps = (
        settings.plan.stages,
        settings.plan.problems,
        plan if but == "team" else replace(plan, order=Order("fixed")),
    )
    return settings.model_dump(exclude=left_out), steps, [swap["mode"] for swap in run.data["swaps"]]


def need(found: Any, what: str, remedy: str) -> None:
    """Raise ``Lacking`` unless something was found."""
    if not found:
        raise Lacking(what, remedy)
