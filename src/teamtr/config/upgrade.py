"""Team files as run folders hold them: with paths as seen from the folder, and of earlier versions too.

Only a stored copy is brought up to date. In a file that someone writes, an old name is a mistake like any other.
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
"""Lines of a stored file, which is always written in the same form, and what they are now."""


HEAD = "# What this run was asked, with every default. Paths are relative to this folder."


def dumps_stored(team_file: TeamFile, folder: Path) -> str:
    """The team file as the run in this folder keeps it: wherever data and models move with the run, they are found."""
    return f"{HEAD}\n{dump(team_file.seen_from(folder))}"


def loads_stored(text: str, name: str, folder: Path) -> TeamFile:
    """The team file of this run folder, of this version or an earlier one, whose paths were all absolute."""
    for old, new in RENAMED.items():
        text = re.sub(old, new, text, flags=re.MULTILINE)
    return loads(text, name).anchored(folder)
