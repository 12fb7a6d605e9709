"""Trains teams, each in its own process: finished runs are kept, and a failure does not stop the others."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from teamtr.analysis.figures import Run, read_runs
from teamtr.baselines import make_methods
from teamtr.config import TeamFile, dump, load_team_file
from teamtr.errors import TeamTRError
from teamtr.session.build import build
from teamtr.session.comparison import Comparison
from teamtr.session.evaluations import Evaluation
from teamtr.session.export import export
from teamtr.session.models import share_cards
from teamtr.session.processes import Died, beside
from teamtr.session.resume import ON_A_MACHINE, differences
from teamtr.session.train import train
from teamtr.store import write_atomic
from teamtr.swap import Request, swap


@dataclass(frozen=True)
class Swapped:
    """The starting point of a team with a swapped agent: the run of the base team, and a run or a model for the
    newcomer."""

    base: Path
    newcomer: Path | str
    request: Request


@dataclass(frozen=True)
class Cell:
    """One team with one seed, and its run folder. ``team_file`` is None if the run continues after a swap; with a
    ``method`` the team is not trained."""

    variant: str
    seed: int
    folder: Path
    team_file: TeamFile | None = None
    swapped: Swapped | None = None
    method: str | None = None

    @property
    def answers(self) -> Path:
        """The file with the results of a method."""
        return self.folder / "answers.json"


@dataclass(frozen=True)
class Failed:
    """A cell that failed, and why."""

    cell: Cell
    why: str

    @property
    def told(self) -> str:
        return f"{self.cell.variant}, seed {self.cell.seed}: {self.why}"


def make_cells(
    cells: Sequence[Cell], workers: int, tell: Callable[[Cell, str | None], None] = lambda cell, why: None
) -> list[Failed]:
    """Train or resume the cells that are not done; returns those that failed. ``tell`` is called when one has ended,
    with the reason if it failed."""
    failed = []
    for part in ([c for c in cells if c.swapped is None], [c for c in cells if c.swapped is not None]):
        left = [cell for cell in part if not is_done(cell)]
        on_a_card = any(cell.team_file is None or cell.team_file.device != "cpu" for cell in left)
        for cell, why in beside(partial(_trained, sharing=workers), left, workers, bear_deaths=True, anew=on_a_card):
            told = f"its process ended by itself (exit code {why.exit_code})" if isinstance(why, Died) else why
            tell(cell, told)
            if told is not None:
                failed.append(Failed(cell, told))
    return failed


def _trained(cell: Cell, sharing: int) -> str | None:
    """Train one cell to its end; returns why it failed, or None. ``sharing`` processes share a card."""
    share_cards(sharing)
    try:
        if cell.method is not None:
            _answer(cell, cell.method)
            return None
        team_file = cell.team_file if cell.team_file is not None else _after_swap(cell)
        for _ in train(team_file, cell.folder):
            pass
    except TeamTRError as error:
        return str(error)
    except Exception as error:
        cell.folder.mkdir(parents=True, exist_ok=True)
        (cell.folder / "error.txt").write_text(traceback.format_exc())
        return f"{type(error).__name__}: {error} (see {cell.folder / 'error.txt'})"
    return None


def _answer(cell: Cell, name: str) -> None:
    """Evaluate the untrained models with a method; what was already played is read from disk."""
    assert cell.team_file is not None
    session = build(cell.team_file)
    (method,) = make_methods([name], {})
    evaluation = partial(Evaluation.of, session, session.current_team(), cell.folder / "evals", stage=0)
    (compared,) = Comparison(evaluation, [method]).run()
    record = {"team_file": dump(cell.team_file), **compared.as_record()}
    write_atomic(cell.answers, json.dumps(record, allow_nan=False).encode())


def _after_swap(cell: Cell) -> TeamFile:
    """The team of the base run with another agent; makes the swap unless that is already done."""
    swapped = cell.swapped
    assert swapped is not None
    made = cell.folder / "team.yaml"
    if not made.exists():
        request = swapped.request
        if isinstance(swapped.newcomer, Path):
            model = cell.folder.with_name(f"{cell.folder.name}-newcomer")  # one per cell: others are made concurrently
            if not model.exists():
                export(swapped.newcomer, model, agent=request.agent)
            request = replace(request, model=str(model))
        for _ in swap(swapped.base, request, cell.folder):
            pass
    return load_team_file(made)


def _is_evaluated(run: Run) -> bool:
    """Whether the last evaluation, if there is any, came after the last stage: a run may end between the two."""
    evals = run.data["evals"]
    return run.data["run"]["stopped_early"] or not evals or evals[-1]["stage"] >= run.data["run"]["stages"]


def is_done(cell: Cell) -> bool:
    """Whether the cell's folder holds this same run, finished on any machine, or all answers of its method."""
    if cell.method is not None:
        assert cell.team_file is not None
        return cell.answers.exists() and json.loads(cell.answers.read_text())["team_file"] == dump(cell.team_file)
    if not (cell.folder / "log.jsonl").exists():
        return False
    (run,) = read_runs([cell.folder])
    if run.data["run"]["state"] != "finished" or not _is_evaluated(run):
        return False
    if cell.team_file is None:
        return bool(run.data["swaps"])
    stored = run.reading.team_file
    return stored is not None and not differences(stored, cell.team_file, ON_A_MACHINE)
