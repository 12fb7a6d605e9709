"""The rating scale for models that judge another model's text, and the parser of their ratings."""

from __future__ import annotations

import re
from fractions import Fraction

from teamtr.grading import last_number

LOWEST, HIGHEST = 0, 10
UNRATED = -1.0
"""The rating of a text without a number: below every valid rating."""
SCALE = f"End with a whole number from {LOWEST} (surely wrong) to {HIGHEST} (surely right)."

_OUT_OF = re.compile(rf"[ ]?/[ ]?{HIGHEST}(?!\d)")


def rating(text: str) -> float:
    """The last number in a text, clamped to the scale: ``8``, ``8/10`` and ``8.5`` are ratings."""
    number = last_number(_OUT_OF.sub("", text))
    return UNRATED if number is None else float(min(max(number.value, Fraction(LOWEST)), Fraction(HIGHEST)))
