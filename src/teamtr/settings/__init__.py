"""Building blocks of team-file sections: the base class, value types, paths and refusals."""

from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, Count, Flag, From0, NonEmpty, Positive, Share, UpTo1

__all__ = [
    "Above0",
    "Anchor",
    "Count",
    "Flag",
    "From0",
    "NonEmpty",
    "Positive",
    "Refusal",
    "Section",
    "Share",
    "UpTo1",
    "key",
    "unset",
]
