"""Trains the teams of a recipe, each in a process of its own: what is finished stays, and what fails stops nobody."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from teamtr.analysis.figures import read_runs
from teamtr.config import TeamFile
from teamtr.errors import TeamTRError
from teamtr.reproduce.recipe import Recipe
from teamtr.reproduce.scales import Setting
from teamtr.session.processes import Died, beside
from teamtr.session.train import train


@dataclass(frozen=True)
class Cell:
    """One team of one seed, and the folder of its run."""

    variant: str
    seed: int
    team_file: TeamFile
    folder: Path


@dataclass(frozen=True)
class Failed:
    """A team that could not be trained, and why."""

    cell: Cell
    why: str


def cells_of(recipe: Recipe, setting: Setting, out: Path) -> list[Cell]:
    """All seeds of the first team, then of the next."""
    return [
        Cell(variant.name, seed, setting.team_file(recipe, variant, seed), out / "runs" / f"{place:02}-seed{seed}")
        for place, variant in enumerate(recipe.variants)
        for seed in setting.seed_numbers
    ]


def make_cells(
    cells: Sequence[Cell], workers: int, tell: Callable[[Cell, str | None], None] = lambda cell, why: None
) -> list[Failed]:
    """Train those that are not done, or go on with them; ``tell`` is called when one has ended, with the reason if it
    failed."""
    failed = []
    for cell, why in beside(_trained, [cell for cell in cells if not is_done(cell)], workers, bear_deaths=True):
        told = f"its process ended by itself (exit code {why.exit_code})" if isinstance(why, Died) else why
        tell(cell, told)
        if told is not None:
            failed.append(Failed(cell, told))
    return failed


def _trained(cell: Cell) -> str | None:
    """Why it failed; None when it is trained to its end."""
    try:
        for _ in train(cell.team_file, cell.folder):
            pass
    except TeamTRError as error:
        return str(error)
    except Exception as error:
        cell.folder.mkdir(parents=True, exist_ok=True)
        (cell.folder / "error.txt").write_text(traceback.format_exc())
        return f"{type(error).__name__}: {error} (see {cell.folder / 'error.txt'})"
    return None


def is_done(cell: Cell) -> bool:
    """Whether its folder holds this very run, trained to its end."""
    if not (cell.folder / "log.jsonl").exists():
        return False
    (run,) = read_runs([cell.folder])
    return run.data["run"]["state"] == "finished" and run.reading.team_file == cell.team_file
