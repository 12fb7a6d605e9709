"""Code shared by commands that train several teams and make one table of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from teamtr.cli.common import answer, emit

if TYPE_CHECKING:
    from teamtr.sweep.cells import Cell, Failed
    from teamtr.sweep.table import Table


def train_cells(cells: Sequence[Cell], workers: int, out: Path) -> list[Failed]:
    """Train all cells that are not done, with a line for each; with no workers, train none."""
    from teamtr.cli.terminal import say
    from teamtr.sweep.cells import make_cells

    ended = 0

    def tell(cell: Cell, why: str | None) -> None:
        nonlocal ended
        ended += 1
        say(f"{ended:>4}  {cell.variant}, seed {cell.seed}: {'done' if why is None else f'failed: {why}'}")

    say(f"{len(cells)} runs in {out}")
    return make_cells(cells, workers, tell) if workers else []


def show_table(table: Table, out: Path, as_json: bool) -> None:
    """Write and print the table and its path; exits with code 1 if any team failed."""
    from teamtr.cli.terminal import say
    from teamtr.sweep.table import markdown, write

    write(table, out)
    answer(markdown(table), as_json)
    say(f"table: {out / 'table.md'}, {out / 'table.csv'}, {out / 'index.html'}")
    if as_json:
        emit(table.as_record())
    if table.failed:
        raise typer.Exit(1)
