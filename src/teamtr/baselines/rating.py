"""What a model that judges another one's text is told, and the number that it answers with."""

from __future__ import annotations

import re
from fractions import Fraction

from teamtr.grading import last_number

LOWEST, HIGHEST = 0, 10
UNRATED = -1.0
"""Where no number was said: below every rating."""
SCALE = f"End with a whole number from {LOWEST} (surely wrong) to {HIGHEST} (surely right)."

_OUT_OF = re.compile(rf"[ ]?/[ ]?{HIGHEST}(?!\d)")


def rating(text: str) -> float:
    """The last number of a text, between the ends of the scale: ``8``, ``8/10`` and ``8.5`` are ratings."""
    number = last_number(_OUT_OF.sub("", text))
    return UNRATED if number is None else float(min(max(number.value, Fraction(LOWEST)), Fraction(HIGHEST)))
