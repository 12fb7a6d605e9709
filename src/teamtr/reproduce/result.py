"""The result of a recipe: its table, with the paper's numbers next to ours, and its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr.analysis.figures import Run, read_runs
from teamtr.reproduce.recipe import Line, Recipe
from teamtr.reproduce.scales import Setting
from teamtr.session.environment import environment
from teamtr.sweep import problems
from teamtr.sweep.cells import Cell, Failed, is_done
from teamtr.sweep.measures import ACCURACY, ANSWERED, over_seeds
from teamtr.sweep.table import FoundLine, Table, Value, drawn, points_above, value_of


@dataclass(frozen=True, kw_only=True)
class Found(Table):
    """A recipe's table at one of the scales."""

    recipe: str
    label: str
    scale: str


def collect(
    recipe: Recipe, setting: Setting, cells: Sequence[Cell], failed: Sequence[Failed], out: Path, command: str
) -> Found:
    """The table of the finished runs; their figures are drawn into ``out``."""
    names = {variant.name for variant in recipe.variants}
    done = [cell for cell in cells if cell.variant in names and is_done(cell)]
    trained = [cell for cell in done if cell.method is None]
    read = read_runs([cell.folder for cell in trained]) if trained else []
    runs: dict[str, list[Run]] = {variant.name: [] for variant in recipe.variants}
    answers: dict[str, list[Any]] = {variant.name: [] for variant in recipe.variants}
    shares: dict[str, dict[int, problems.Shares]] = {name: {} for name in names}
    for cell, run in zip(trained, read, strict=True):
        runs[cell.variant].append(run)
        shares[cell.variant][cell.seed] = problems.at_the_end(run)
    for cell in done:
        if cell.method is not None:
            answers[cell.variant].append(json.loads(cell.answers.read_text()))
            shares[cell.variant][cell.seed] = problems.of_answers(answers[cell.variant][-1])
    against = next((line.variant for line in recipe.lines if line.name == recipe.reference), None)
    columns = [*recipe.columns]
    if against is not None:
        columns.insert(1, f"points above {recipe.reference}")

    def value(line: Line, column: str) -> Value | None:
        own = shares[line.variant]
        if column not in line.measures:
            return _points_above(own, shares[against] if against not in (None, line.variant) else {})
        told = [ANSWERED[column](one) for one in answers[line.variant]] if column in ANSWERED else []
        numbers = [number for number in told if number is not None]
        sure = problems.interval([*own.values()]) if column == ACCURACY else None
        return value_of(numbers or over_seeds(runs[line.variant], line.measures[column]), sure)

    lines = tuple(
        FoundLine(line.name, line.part, {column: value(line, column) for column in columns}, dict(line.paper))
        for line in recipe.lines
    )
    figures, lacking = drawn(read, recipe.figures, out)
    return Found(
        recipe=recipe.name,
        label=recipe.label,
        scale=setting.scale,
        title=f"{recipe.title} ({recipe.label})",
        about=f"Scale: {setting.scale}. Mean and standard deviation over seeds, in brackets 95 % intervals over "
        'problems; "the paper" is what it prints for its own models and benchmark.',
        command=command,
        columns=tuple(columns),
        lines=lines,
        notes=(*(text for note in recipe.notes if (text := note(runs)) is not None), *lacking),
        failed=tuple(one.told for one in failed),
        figures=figures,
        versions=environment(),
    )


def _points_above(own: Mapping[int, problems.Shares], others: Mapping[int, problems.Shares]) -> Value | None:
    """Over all seeds of both lines, which may differ in number, if all hold out the same problems; otherwise, as in
    games, over the seeds that both have."""
    if problems.are_of_the_same_problems([*own.values(), *others.values()]):
        return points_above(problems.difference([*own.values()], [*others.values()]), len(own))
    return points_above(problems.difference_by_seed(own, others), problems.paired_seeds(own, others))
