"""What commands share that train several teams and make one table of them."""

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
    """A line for every team that is trained; those that are done are passed over. With no workers, nothing is."""
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
    """Written, printed, and said where it is; a table from which teams are missing ends with exit code 1."""
    from teamtr.cli.terminal import say
    from teamtr.sweep.table import markdown, write

    write(table, out)
    answer(markdown(table), as_json)
    say(f"table: {out / 'table.md'}, {out / 'table.csv'}, {out / 'index.html'}")
    if as_json:
        emit(table.as_record())
    if table.failed:
        raise typer.Exit(1)
