"""What sections of a team file are made of: the base class, kinds of values, paths and refusals."""

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
