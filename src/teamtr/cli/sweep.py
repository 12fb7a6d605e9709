"""``teamtr sweep``: one team file over several values of its settings, and over seeds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from teamtr.cli.common import JsonFlag, app, errors, interruptible
from teamtr.cli.complete import dotted_keys
from teamtr.cli.tables import show_table, train_cells

if TYPE_CHECKING:
    from teamtr.sweep.sweep import Sweep

Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Train so many beside each other. [default: as many as cores and memory allow]"),
]
Finished = Annotated[bool, typer.Option("--finished", help="Train nothing: make the table of what is finished.")]


@app.command()
def sweep(
    team_file: Annotated[Path, typer.Argument(help="The team file (YAML).")],
    settings: Annotated[
        list[str],
        typer.Argument(
            help="Settings with their values: `plan.radius_nats_per_message=0.01,0.05,0.1`; several keys give every "
            "combination. A value that holds a comma stands in quotes or brackets.",
            autocompletion=dotted_keys,
        ),
    ],
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Train each with so many seeds. [default: the team file's seeds]")
    ] = None,
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option(help="Folder. [default: `sweeps/NAME`]")] = None,
    finished: Finished = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a team with several values of some settings, and write one table and one page of the results.

    The same command resumes where it was stopped; if values are added, it trains only those. A run that fails is
    reported and left out of the table. Keys are those of the team file; a key with a single value is set in all runs.
    """
    words = ["teamtr", "sweep", str(team_file), *settings, *([] if seeds is None else ["--seeds", str(seeds)])]
    with errors(), interruptible():
        from teamtr.sweep.variants import variants_of

        variants = variants_of(team_file, settings)  # before imports that need torch
        from teamtr.sweep.sweep import Sweep

        first = variants[0].team_file
        folder = out or Path("sweeps") / first.name
        run_sweep(Sweep(variants, seeds or first.seeds, folder, shlex.join(words)), workers, finished, as_json)


def run_sweep(made: Sweep, workers: int | None, finished: bool, as_json: bool) -> None:
    """Train the unfinished runs, in parallel where there is room, and show the table."""
    from teamtr.cli.terminal import say
    from teamtr.sweep.cells import is_done
    from teamtr.sweep.room import room

    cells = made.cells()
    left = sum(not is_done(cell) for cell in cells)
    if finished or not left:
        workers = 0
    elif workers is None:
        found = room(made.variants[0].team_file, left)
        workers = found.workers
        say(f"{workers} at a time: {found.why}; --workers changes it")
    if workers:
        say(f"watch them: teamtr view {shlex.quote(str(made.out))}")
    failed = train_cells(cells, workers, made.out)
    show_table(made.table(cells, failed), made.out, as_json)
