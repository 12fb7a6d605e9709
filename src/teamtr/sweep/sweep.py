"""One team file trained with several seeds and with several values of some settings: which runs, and their table."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from urllib.parse import quote

from teamtr.analysis.figures import Run, read_runs
from teamtr.config import Setting, TeamFile, load_team_file, several
from teamtr.errors import UserError
from teamtr.session.environment import environment
from teamtr.session.resume import differences
from teamtr.store import RunFolder
from teamtr.sweep import measures as of
from teamtr.sweep import problems
from teamtr.sweep.cells import Cell, Failed, is_done
from teamtr.sweep.table import FoundLine, Table, Value, drawn, points_above, value_of
from teamtr.text import counted

LONGEST = 100
"""Characters of a folder's name before the seed."""
NOT_SWEPT = {
    "seed": "seeds are repeats and not settings: `--seeds 3` trains with three, from `seed` on",
    "seeds": "seeds are repeats and not settings: `--seeds 3` trains with three",
    "name": "a name changes nothing that is trained: `--out` says where the runs go",
}
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
class Variant:
    """A team file as it is trained, but for the seed. ``settings`` are the swept ones; none of a team file alone."""

    team_file: TeamFile
    settings: tuple[Setting, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(setting.name for setting in self.settings) or self.team_file.name

    @property
    def folder(self) -> str:
        """Names its settings and nothing else of the sweep: with a value more, what was trained is found again."""
        if not self.settings:
            return ""
        name = quote(",".join(setting.name for setting in self.settings), safe="=.,_+-")
        if len(name) > LONGEST:
            name = f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return f"{name}-"


@dataclass(frozen=True)
class Sweep:
    """Every variant with every seed, in one folder."""

    variants: tuple[Variant, ...]
    seeds: int
    out: Path
    command: str

    @classmethod
    def over_seeds(cls, team_file: TeamFile, seeds: int, out: Path, command: str) -> Sweep:
        return cls((Variant(team_file),), seeds, out, command)

    @classmethod
    def over_settings(
        cls, file: Path, words: Sequence[str], seeds: int | None, out: Path | None, command: str
    ) -> Sweep:
        """The product of all values given; every team file is read, so that a mistake is told before anything is
        trained."""
        given = [several(word) for word in words]
        for k, one in enumerate(given):
            if one.key in NOT_SWEPT and len(one.values) > 1:
                raise UserError(f"{words[k]}: {NOT_SWEPT[one.key]}")
            if one.key in [other.key for other in given[:k]]:
                raise UserError(f"{one.key} is given twice: write its values behind each other, with commas between")
        fixed = [one.settings()[0].override for one in given if len(one.values) == 1]
        swept = [one.settings() for one in given if len(one.values) > 1]
        if not swept:
            raise UserError(
                "no setting has several values: write them with commas between, such as plan.stages=10,20; a team file "
                "as it is trains with `teamtr train`"
            )
        variants = []
        for settings in product(*swept):
            changes = [*fixed, *(setting.override for setting in settings)]
            variants.append(Variant(load_team_file(file, changes), settings))
        _require_different(variants)
        first = variants[0].team_file
        return cls(tuple(variants), seeds or first.seeds, out or Path("sweeps") / first.name, command)

    def cells(self) -> list[Cell]:
        """All seeds of the first variant, then of the next."""
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
        """Of the runs that are finished; the others are named with the reason."""
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
            return points_above(problems.difference_by_seed(shares, others), len(shares))
        sure = problems.interval([*shares.values()]) if column == of.ACCURACY else None
        return value_of(of.over_seeds([*own.values()], COLUMNS[column]), sure)

    return FoundLine(name, "", {column: value(column) for column in columns}, {})


def _require_different(variants: Sequence[Variant]) -> None:
    for k, variant in enumerate(variants):
        for other in variants[:k]:
            if not differences(other.team_file, variant.team_file, ()):
                raise UserError(f"{other.name} and {variant.name} are the same settings: give each value once")
