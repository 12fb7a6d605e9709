r"""The cheap part of comparing two answers: how they are written, and plain numbers.

``quick_same`` decides what needs no algebra (most of what a model writes) by string operations and exact arithmetic;
the rest goes to a worker. Two rules of the MATH data set are kept on purpose: where the truth is an integer the answer
must be written as a number (``2^3`` is no answer to "what is 2^3?"), and a fraction must be reduced.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

_CHARACTERS = str.maketrans(
    dict(zip("−–÷，（）：\u00a0\u2009\u202f\n\t\r", "--/,():      ", strict=True))
    | {
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "√": r"\sqrt ",
        "∞": r"\infty ",
        "±": r"\pm ",
        "∅": r"\emptyset ",
    }
    | {"π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "∪": r"\cup ", "∩": r"\cap "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "°": r"^\circ ", "²": "^2", "³": "^3"}
    | {"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
)
LONGEST_NUMBER = 2_000
"""Characters: what is longer is no number that anybody states, and more than Python converts."""

_BLANKS = re.compile(r" {2,}")
_OPENED_BY = {"(": "(", ")": "(", "[": "[", "]": "["}
_BRACKET_OR_THOUSANDS = re.compile(r"[()\[\]]|(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_END = r"(?![A-Za-z])"  # of a command's name
_REPLACEMENTS = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (rf"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?[lrm]?|middle){_END}", ""),
        (rf"\\(?:displaystyle|textstyle|limits|nolimits|mathstrut){_END}|(?<!\\)\\!|\{{\}}", ""),
        (rf"\\[hv]?phantom\s*(?:\{{[^{{}}]*\}}|-)|(?<!\\)\\[,;: ]|\\q?quad{_END}|~", " "),
        (rf"\\[dtc]frac{_END}", r"\\frac"),
        (r"\\(?:mbox|mathrm|textrm|textbf|textit|textnormal|textsf|operatorname|mathsf)(?=\s*\{)", r"\\text"),
        (r"\\(?:mathbf|mathit|boldsymbol|bm|vec|hat|bar|overline|overrightarrow|boxed|ensuremath)(?=\s*\{)", ""),
        (r"\\text\s*\{(?=[^{}A-Za-z\d]*\d)([^{}A-Za-z]*)\}", r"\1"),
        (rf"\s*(?:\^\s*\\circ{_END}|\^\s*\{{\s*\\circ\s*\}}|\\degrees?{_END}|\\text\s*\{{\s*degrees?\s*\}})", ""),
        (rf"\\\$|\\pounds{_END}|[€£$]|(?<!\\)\\[()\[\]]", ""),
        (r"\\%", "%"),
        (rf"\\leq(?:slant)?{_END}", r"\\le"),
        (rf"\\geq(?:slant)?{_END}", r"\\ge"),
        (rf"\\neq{_END}", r"\\ne"),
        (rf"\\lt{_END}", "<"),
        (rf"\\gt{_END}", ">"),
    )
)
_THIN_THOUSANDS = re.compile(r"(?<=\d)\s*(?:,\\!|\{,\}|\\,|\\!)\s*(?=\d{3}(?!\d))")  # 1,\!000  10{,}000  58\,500
_UNIT_TEXT = re.compile(r"(?<=[^\s,=])\s*\\text\s*\{[^{}]*\}\s*(?:\^\s*\{?\s*\d\s*\}?)?\s*\.?$")
_UNIT_WORDS = re.compile(
    r"(?<=[\d}%)])\s*(?:(?:mm|cm|km|kg|mph|ft|in|ml|sq)|\s(?!(?:or|and)\b|sin|cos|tan|cot|sec|csc|log|sqrt)[A-Za-z]{3,}"
    r"(?:\s+(?!(?:or|and)\b)[A-Za-z]+)*)\.?\s*(?:\^\s*\{?\s*[23]\s*\}?)?\s*\.?$"
)
_EQUALS = re.compile(r"=|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z])")
_WORDS = re.compile(r"[A-Za-z][A-Za-z .,'&-]*|(?!sqrt|sin|cos|tan|log|exp)[A-Za-z]{3,}[\w .,'&-]*", re.ASCII)

_DIGITS = r"(?:\d+(?:\.\d*)?|\.\d+)"
_LITERAL = re.compile(
    rf"""
    (?P<sign>[-+]?)
    (?:
        (?P<decimal>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?
      | (?P<whole>\d+)?\\frac(?P<inner>-?)(?:\{{(?P<top>-?\d+)\}}|(?P<top1>\d))(?:\{{(?P<bottom>\d+)\}}|(?P<bottom1>\d))
      | (?P<numerator>\d+)/(?P<denominator>\d+)
    )
    (?P<percent>%?)
    """,
    re.VERBOSE | re.ASCII,
)
_MOST_WRAPPINGS = 10
_FIGURES_OF_A_COMPUTER = 12
_MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True)
class Numeral:
    """A number as it is written: ``form`` is "integer", "decimal" or "fraction"; ``reduced`` speaks of a fraction,
    ``figures`` and ``places`` (all digits, and those behind the point) of a decimal."""

    value: Fraction
    form: str
    reduced: bool = True
    percent: bool = False
    figures: int = 0
    places: int = 0

    def answers(self, truth: Numeral) -> bool:
        """Whether this answer is right where that is the truth."""
        if not self._equals(truth):
            return truth.form == "fraction" and self._rounds(truth)
        if truth.form != "fraction" and truth.value.denominator == 1:
            return self.form != "fraction"
        return self.form != "fraction" or self.reduced or not truth.reduced

    def _equals(self, other: Numeral) -> bool:
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        mine, theirs = (n.value / 100 if n.percent else n.value for n in (self, other))
        return mine == theirs

    def _rounds(self, truth: Numeral) -> bool:
        """A decimal as a computer prints a fraction, right to its last place."""
        return self.figures >= _FIGURES_OF_A_COMPUTER and abs(self.value - truth.value) <= Fraction(10) ** -self.places


def clean(text: str) -> str:
    """The answer with everything gone that is only typography, money, degrees or a full stop."""
    # Thousands first: without its degree signs, a list of angles would be one number.
    text = _join_thousands(_THIN_THOUSANDS.sub("", _BLANKS.sub(" ", text.translate(_CHARACTERS))))
    for pattern, new in _REPLACEMENTS:
        text = pattern.sub(new, text)
    return _unwrapped(" ".join(text.split()).rstrip("."))


def _join_thousands(text: str) -> str:
    """``1,234`` as one number, but not within brackets, where it is a pair."""

    depth = {"(": 0, "[": 0}

    def joined(found: re.Match[str]) -> str:
        sign = found.group()
        if sign in _OPENED_BY:
            depth[_OPENED_BY[sign]] += 1 if sign in depth else -1
            return sign
        return sign if max(depth.values()) > 0 else sign.replace(",", "")

    return _BRACKET_OR_THOUSANDS.sub(joined, text)


def _unwrapped(text: str) -> str:
    """Without braces or ``\\text`` round the whole. A few times over: each looks through all of the text."""
    for _ in range(_MOST_WRAPPINGS):
        opening = re.match(r"(?:\\text\s*)?\{", text)
        if opening is None or not _closes_at_end(text, opening.end()):
            break
        text = text[opening.end() : -1].strip().rstrip(".")
    return text


def _closes_at_end(text: str, start: int) -> bool:
    """Whether the brace that opens before ``start`` is closed by the last character, and not before."""
    depth = 1
    for at in range(start, len(text)):
        if text[at - 1] != "\\":
            depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at == len(text) - 1
    return False


def without_units(text: str) -> str:
    """A cleaned answer without ``\\text{ cm}^2`` or a word after its number."""
    while (shorter := _UNIT_TEXT.sub("", text).rstrip()) != text and shorter[-1] not in "+-*/^_=<>":
        text = shorter
    return _UNIT_WORDS.sub("", text).rstrip()


def last_side(text: str) -> str:
    """What stands after the last sign of equality; all of it where there is none."""
    return _EQUALS.split(text)[-1].strip()


def numeral(text: str) -> Numeral | None:
    """The plain number that a cleaned answer is: ``-3``, ``2.50``, ``\\frac34``, ``1 1/2``, ``50%``, ``3e5``."""
    if len(text) > LONGEST_NUMBER:
        return None
    text = _without_brackets(text)
    mixed = _MIXED.fullmatch(text.removeprefix("-"))
    if mixed:
        text = f"{'-' if text.startswith('-') else ''}{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    found = _LITERAL.fullmatch(text.replace(" ", ""))
    if found is None:
        return None
    negative = (found["sign"] == "-") != (found["inner"] == "-")
    percent = found["percent"] == "%"
    if found["decimal"] is not None:
        value = Fraction("0" + found["decimal"]) * Fraction(10) ** int(found["exponent"] or 0)
        form = "integer" if re.fullmatch(r"\d+", found["decimal"]) and not found["exponent"] else "decimal"
        written = found["decimal"]
        return Numeral(
            -value if negative else value,
            form,
            percent=percent,
            figures=len(written.replace(".", "").lstrip("0")),
            places=len(written.partition(".")[2]) - int(found["exponent"] or 0),
        )
    top = int(found["top"] or found["top1"] or found["numerator"])
    bottom = int(found["bottom"] or found["bottom1"] or found["denominator"])
    if bottom == 0:
        return None
    reduced = math.gcd(top, bottom) == 1 and bottom != 1
    value = Fraction(top, bottom)
    if found["whole"] is not None:
        value += int(found["whole"])
    return Numeral(-value if negative else value, "fraction", reduced, percent)


def _without_brackets(text: str) -> str:
    while (inner := re.fullmatch(r"[({]\s*([^(){}]*)\s*[)}]", text)) is not None:
        text = inner.group(1)
    return text


def words(text: str) -> str | None:
    """The words that a cleaned answer is, for comparison: ``(C)`` as ``c``; None where it is not words."""
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip(" ().")
    return "".join(bare.casefold().split()) if _WORDS.fullmatch(bare) else None


def _values_alone(one: str, other: str) -> tuple[str, str]:
    """What both say of the same thing: ``x = 5`` and ``5``. Two equations are left as they are, unless of one name."""
    sides, others = _EQUALS.split(one), _EQUALS.split(other)
    if len(sides) > 1 and len(others) > 1 and [s.strip() for s in sides[:-1]] != [s.strip() for s in others[:-1]]:
        return one, other
    return sides[-1].strip(), others[-1].strip()


def quick_same(given: str, truth: str) -> bool | None:
    """Whether the answer is right, where that can be told without algebra; None where it cannot."""
    given, truth = clean(given), clean(truth)
    if given.replace(" ", "") == truth.replace(" ", ""):
        return True
    truth_words = words(truth)
    if truth_words is not None and (len(truth_words) == 1 or len(truth_words) > 2):
        said = words(last_side(given))
        if said == truth_words or len(truth_words) > 2:
            return said == truth_words
    truth, given = _values_alone(truth, given)
    expected, said_number = (numeral(without_units(text)) for text in (truth, given))
    if expected is not None and said_number is not None:
        return said_number.answers(expected)
    if expected is not None and expected.form != "fraction" and expected.value.denominator == 1:
        return False
    return None
