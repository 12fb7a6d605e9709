"""Graders that are pure functions of two strings, linear in the length of the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Bounds on what is converted to an integer: a model may write 1e999999999, which exact arithmetic cannot handle.
_MOST_CHARACTERS = 200
_LARGEST_EXPONENT = 400

FULLWIDTH = str.maketrans("０１２３４５６７８９．％＋－＝／", "0123456789.%+-=/")
"""Characters of Chinese and Japanese texts. Commas are left out, because there they separate clauses."""

_WORD_OR_NUMBER = re.compile(
    r"""
    [^\W\d]\w*(?:\.\d+)*                                # a word with its digits: the 2 of CO2 is no number
    | (?P<number>
        (?P<sign>(?<![\w)\]}])[-+\u2212])?              # a sign, unless it is the minus of 5-3
        (?:(?P<units>\d{1,3}(?:,\d{3})+|\d+)[ ](?=\d+/\d))?    # the 1 of 1 1/2
        (?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\d)(?=\.\d))
        (?P<decimals>\.\d+)?
        (?P<exponent>[eE][-+]?\d+)?
        (?:[ ]?/[ ]?(?P<denominator>\d+))?
        (?P<percent>[ ]?\\?%)?
      )
    """,
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True)
class Number:
    """An exact number as written; ``50%`` has value 50 and ``percent`` set."""

    value: Fraction
    percent: bool = False

    def __str__(self) -> str:
        return f"{self.value}{'%' if self.percent else ''}"

    def same(self, other: Number) -> bool:
        """Whether the values are equal. A percentage is a number of hundredths: 50% is 1/2 and 0.5, never 50."""
        return self.worth == other.worth

    @property
    def worth(self) -> Fraction:
        """The value, in which 50% is 1/2."""
        return self.value / 100 if self.percent else self.value


def normalize(text: str) -> str:
    """The text with case folded, ends stripped, and each run of white space replaced by one blank."""
    return " ".join(text.casefold().split())


def exact_match(text: str, answer: str) -> bool:
    """Whether both texts are the same up to case and white space."""
    return normalize(text) == normalize(answer)


def last_number(text: str) -> Number | None:
    """The last number written in the text: ``-3``, ``1,234.50``, ``.5``, ``2e-3``, ``1/2``, ``1 1/2`` or ``50%``.

    None if there is none, or if it is unsuitable for exact arithmetic (division by zero, more than 200 characters, an
    exponent beyond 400).
    """
    last = None
    for match in _WORD_OR_NUMBER.finditer(text.translate(FULLWIDTH)):
        if match["number"] is not None:
            last = match
    if last is None or len(last.group()) > _MOST_CHARACTERS:
        return None
    exponent = int((last["exponent"] or "e0")[1:])
    denominator = int(last["denominator"] or 1)
    if abs(exponent) > _LARGEST_EXPONENT or denominator == 0:
        return None
    value = Fraction(_digits(last["whole"]) + (last["decimals"] or "")) * Fraction(10) ** exponent / denominator
    negative = last["sign"] in ("-", "\u2212")
    if last["units"] is not None:
        is_mixed = last["decimals"] is None and last["exponent"] is None and value < 1
        value, negative = (value + int(_digits(last["units"])), negative) if is_mixed else (value, False)
    return Number(-value if negative else value, percent=last["percent"] is not None)


def _digits(written: str) -> str:
    return written.replace(",", "") or "0"


def number_match(text: str, answer: str) -> bool:
    """Whether the last numbers of both are equal; False if either has none."""
    said, right = last_number(text), last_number(answer)
    return said is not None and right is not None and said.same(right)
