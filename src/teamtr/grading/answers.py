"""Graders that are pure functions of two strings. Every one of them is linear in the text's length."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Bounds on what becomes an integer: a model may well write 1e999999999, which no exact arithmetic survives.
_MOST_CHARACTERS = 200
_LARGEST_EXPONENT = 400

FULLWIDTH = str.maketrans("０１２３４５６７８９．％＋－＝／", "0123456789.%+-=/")
"""Signs as Chinese and Japanese texts write them. Commas are none of them: there they part sentences."""

_WORD_OR_NUMBER = re.compile(
    r"""
    [^\W\d]\w*(?:\.\d+)*                                # a word with its digits: the 2 of CO2 is no number
    | (?P<number>
        (?P<sign>(?<![\w)\]}])[-+\u2212])?              # a sign, unless it is the minus of 5-3
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
    """An exact number as it is written; ``50%`` has value 50 and ``percent`` set."""

    value: Fraction
    percent: bool = False

    def __str__(self) -> str:
        return f"{self.value}{'%' if self.percent else ''}"

    def same(self, other: Number) -> bool:
        """Equal values. A percentage is so many hundredths: 50% is 1/2 and 0.5, and never 50."""
        return self._worth == other._worth

    @property
    def _worth(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


def normalize(text: str) -> str:
    """Case folded, ends stripped, every run of white space one blank."""
    return " ".join(text.casefold().split())


def exact_match(text: str, answer: str) -> bool:
    """The same text up to case and white space."""
    return normalize(text) == normalize(answer)


def last_number(text: str) -> Number | None:
    """The last number written in the text: ``-3``, ``1,234.50``, ``.5``, ``2e-3``, ``1/2`` or ``50%``.

    None when there is none, or when it is one that no exact arithmetic should be asked to hold (division by zero,
    more than 200 characters, an exponent beyond 400).
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
    value = Fraction((last["whole"].replace(",", "") or "0") + (last["decimals"] or "")) * Fraction(10) ** exponent
    negative = last["sign"] in ("-", "\u2212")
    return Number((-value if negative else value) / denominator, percent=last["percent"] is not None)


def number_match(text: str, answer: str) -> bool:
    """The last numbers of both are the same number; False when either has none."""
    said, right = last_number(text), last_number(answer)
    return said is not None and right is not None and said.same(right)
