"""Team files as stored in run folders: with paths relative to the folder, also from earlier versions.

Only stored copies are upgraded. In a file that a user writes, an old name is a mistake like any other.
"""

from __future__ import annotations

import re
from pathlib import Path

from teamtr.config.file import dump, loads
from teamtr.config.schema import TeamFile

RENAMED = {
    r"^(  )normalise(?=:)": r"\1normalize",
    r"^(  preset: )no_normalisation$": r"\1no_normalization",
    r"^(  preset: )importance_weighted$": r"\1reweighted",
    r"^(  )importance_weighted(?=:)": r"\1reweight",
    r"^(  ratio: )length_normalised$": r"\1length_normalized",
}
"""Patterns of outdated lines in a stored file, which always has the same form, and their replacements."""


HEAD = "# What this run was asked, with every default. Paths are relative to this folder."


def dumps_stored(team_file: TeamFile, folder: Path) -> str:
    """The team file as stored in this run folder. Its paths are relative, so data and models that are moved with the
    run are found."""
    return f"{HEAD}\n{dump(team_file.seen_from(folder))}"


def loads_stored(text: str, name: str, folder: Path) -> TeamFile:
    """Read the team file of this run folder, from this version or an earlier one, which stored absolute paths."""
    for old, new in RENAMED.items():
        text = re.sub(old, new, text, flags=re.MULTILINE)
    return loads(text, name, stored=True).anchored(folder)
