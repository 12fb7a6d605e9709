"""The team files of a sweep: every combination of the values given for some keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from urllib.parse import quote

from teamtr.config import Setting, TeamFile, load_team_file, several
from teamtr.errors import UserError

LONGEST = 100
"""Maximum number of characters of a folder's name before the seed."""
NOT_SWEPT = {
    "seed": "seeds are repeats and not settings: `--seeds 3` trains with three, from `seed` on",
    "seeds": "seeds are repeats and not settings: `--seeds 3` trains with three",
    "name": "a name changes nothing that is trained: `--out` says where the runs go",
}


@dataclass(frozen=True)
class Variant:
    """A team file to train, except for its seed. ``settings`` are the swept ones; empty for a single team file."""

    team_file: TeamFile
    settings: tuple[Setting, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(setting.name for setting in self.settings) or self.team_file.name

    @property
    def folder(self) -> str:
        """Prefix of the run folders. It depends on this variant's settings only, so that finished runs are found again
        when a value is added to the sweep."""
        if not self.settings:
            return ""
        name = quote(",".join(setting.name for setting in self.settings), safe="=.,_+-")
        if len(name) > LONGEST:
            name = f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return f"{name}-"


def variants_of(file: Path, words: Sequence[str]) -> tuple[Variant, ...]:
    """The product of all given values. Every team file is loaded, so that mistakes are reported before anything is
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
    return tuple(variants)


def _require_different(variants: Sequence[Variant]) -> None:
    for k, variant in enumerate(variants):
        for other in variants[:k]:
            if other.team_file == variant.team_file:
                raise UserError(f"{other.name} and {variant.name} are the same settings: give each value once")
