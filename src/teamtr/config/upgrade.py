"""Team files of earlier versions, as run folders hold them: keys and values that have other names now.

Only a stored copy is brought up to date. In a file that someone writes, an old name is a mistake like any other.
"""

from __future__ import annotations

import re

from teamtr.config.file import loads
from teamtr.config.schema import TeamFile

RENAMED = {
    r"^(  )normalise(?=:)": r"\1normalize",
    r"^(  preset: )no_normalisation$": r"\1no_normalization",
    r"^(  preset: )importance_weighted$": r"\1reweighted",
    r"^(  )importance_weighted(?=:)": r"\1reweight",
    r"^(  ratio: )length_normalised$": r"\1length_normalized",
}
"""Lines of a stored file, which is always written in the same form, and what they are now."""


def loads_stored(text: str, name: str) -> TeamFile:
    """The team file of a run folder, of this version or an earlier one."""
    for old, new in RENAMED.items():
        text = re.sub(old, new, text, flags=re.MULTILINE)
    return loads(text, name)
