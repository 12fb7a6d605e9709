"""A sweep: variants of a team file, each trained with several seeds, and the table of their runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from teamtr.analysis.figures import Run, read_runs
from teamtr.errors import UserError
from teamtr.session.environment import environment
from teamtr.store import RunFolder
from teamtr.sweep import measures as of
from teamtr.sweep import problems
from teamtr.sweep.cells import Cell, Failed, is_done
from teamtr.sweep.table import FoundLine, Table, Value, drawn, points_above, value_of
from teamtr.sweep.variants import Variant
from teamtr.text import counted

COLUMNS: dict[str, of.Measure] = {
    of.ACCURACY: of.success,
    "best, %": of.best,
    "before, %": of.success_before,
    "kept, %": of.kept,
    "sampled to train, M": of.millions_sampled,
    "seconds to train": of.seconds_to_train,
}
FIGURES = ("learning-curves",)


@dataclass(frozen=True)
class Sweep:
    """Every variant with every seed, in one folder."""

    variants: tuple[Variant, ...]
    seeds: int
    out: Path
    command: str

    def cells(self) -> list[Cell]:
        """The runs to train: all seeds of the first variant, then of the next."""
        if RunFolder(self.out).checkpoints.numbers():
            raise UserError(
                f"{self.out} holds one run, and several would be trained in it: choose another folder with --out"
            )
        return [cell for variant in self.variants for cell in self._cells_of(variant)]

    def _cells_of(self, variant: Variant) -> Iterator[Cell]:
        for seed in range(variant.team_file.seed, variant.team_file.seed + self.seeds):
            folder = f"{variant.folder}seed{seed}"
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{variant.team_file.name}-{folder}")[-200:].lstrip("._-")
            own = variant.team_file.model_copy(update={"name": name, "seed": seed, "seeds": 1})
            yield Cell(variant.name, seed, self.out / folder, own)

    def table(self, cells: Sequence[Cell], failed: Sequence[Failed]) -> Table:
        """The table of the finished runs; the others are listed, with the reason if they failed."""
        done = [cell for cell in cells if is_done(cell)]
        read = read_runs([cell.folder for cell in done]) if done else []
        runs: dict[str, dict[int, Run]] = {variant.name: {} for variant in self.variants}
        for cell, run in zip(done, read, strict=True):
            runs[cell.variant][cell.seed] = run
        first = self.variants[0].name
        columns = [*COLUMNS]
        if len(self.variants) > 1:
            columns.insert(1, f"points above {first}")
            lines = [_line(name, own, runs[first] if name != first else {}, columns) for name, own in runs.items()]
        else:
            lines = [_line(f"seed {seed}", {seed: run}, {}, columns) for seed, run in runs[first].items()]
            lines += [_line(counted(len(read), "seed"), runs[first], {}, columns)] if len(read) > 1 else []
        ended = {(one.cell.variant, one.cell.seed) for one in failed} | {(cell.variant, cell.seed) for cell in done}
        missing = [cell for cell in cells if (cell.variant, cell.seed) not in ended]
        figures, lacking = drawn(read, FIGURES, self.out)
        return Table(
            title=f"{self.variants[0].team_file.name}: {self._told()}",
            about="Mean and standard deviation over seeds of the team at the end of training; in brackets 95 % "
            "intervals over held-out problems.",
            command=self.command,
            columns=tuple(columns),
            lines=tuple(lines),
            notes=(*(f"not finished: {cell.variant}, seed {cell.seed}" for cell in missing), *lacking),
            failed=tuple(one.told for one in failed),
            figures=figures,
            versions=environment(),
        )

    def _told(self) -> str:
        seeds = counted(self.seeds, "seed")
        return seeds if len(self.variants) == 1 else f"{len(self.variants)} settings, {seeds} of each"


def _line(name: str, own: Mapping[int, Run], against: Mapping[int, Run], columns: Sequence[str]) -> FoundLine:
    shares, others = ({seed: problems.at_the_end(run) for seed, run in runs.items()} for runs in (own, against))

    def value(column: str) -> Value | None:
        if column not in COLUMNS:
            return points_above(problems.difference_by_seed(shares, others), problems.paired_seeds(shares, others))
        sure = problems.interval([*shares.values()]) if column == of.ACCURACY else None
        return value_of(of.over_seeds([*own.values()], COLUMNS[column]), sure)

    return FoundLine(name, "", {column: value(column) for column in columns}, {})
