"""The rating scale for models that judge another model's text, and the parser of their ratings."""

from __future__ import annotations

import re
from fractions import Fraction

from teamtr.grading import last_number

LOWEST, HIGHEST = 0, 10
UNRATED = -1.0
"""The rating of a text without a number: below every valid rating."""
SCALE = f"End with a whole number from {LOWEST} (surely wrong) to {HIGHEST} (surely right)."

_OUT_OF = re.compile(rf"(?<=\d)[*_)]*[ ]?\(?(?:/|(?:out )?of)[ ]?[*_]*{HIGHEST}(?!\d)", re.IGNORECASE)


def rating(text: str) -> float:
    """The last number in a text, clamped to the scale: ``8``, ``8/10``, ``8 out of 10`` and ``8.5`` are ratings. A
    percentage is a share of the scale: ``80%`` is 8."""
    number = last_number(_OUT_OF.sub("", text))
    if number is None:
        return UNRATED
    value = number.worth * HIGHEST if number.percent else number.value
    return float(min(max(value, Fraction(LOWEST)), Fraction(HIGHEST)))
