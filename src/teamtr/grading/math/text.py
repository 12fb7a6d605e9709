r"""The cheap part of comparing two answers: normalizing notation, and comparing plain numbers.

``quick_same`` decides what needs no algebra (most of what a model writes) by string operations and exact arithmetic;
the rest goes to a worker. Two rules of the MATH data set are kept on purpose: if the truth is an integer, the answer
must be written as a number (``2^3`` is no answer to "what is 2^3?"), and a fraction must be reduced.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from teamtr.grading.answers import FULLWIDTH

_CHARACTERS = str.maketrans(
    dict(zip("−–÷，（）：\u00a0\u2009\u202f\n\t\r", "--/,():      ", strict=True))
    | FULLWIDTH
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
"""Maximum number of characters of a number, which keeps it within what Python converts."""

_BLANK = re.compile(r" (?!\d)|(?<!\d) |(?<=\d) (?=\d{3}(?!\d))")
_BLANKS = re.compile(r" {2,}")
_OPENED_BY = {"(": "(", ")": "(", "[": "[", "]": "["}
_BRACKET_OR_THOUSANDS = re.compile(r"[()\[\]]|(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_END = r"(?![A-Za-z])"  # the end of a command's name
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
        (
            rf"\s*(?:\^\s*\\circ{_END}|\^\s*\{{\s*\\circ\s*\}}|\\degrees?{_END}|\\text\s*\{{\s*degrees?\s*\}}"
            rf"|(?<![A-Za-z\\])degrees?{_END})",
            r"\\degree ",
        ),
        (rf"\\\$|\\pounds{_END}|[€£$]|(?<!\\)\\[()\[\]]", ""),
        (r"\\%", "%"),
        (rf"\\leq(?:slant)?{_END}", r"\\le"),
        (rf"\\geq(?:slant)?{_END}", r"\\ge"),
        (rf"\\neq{_END}", r"\\ne"),
        (rf"\\lt{_END}", "<"),
        (rf"\\gt{_END}", ">"),
    )
)
_DEGREE = "\\degree "
_DEGREE_OR_FUNCTION = re.compile(
    r"(?P<degree>\\degree )|(?P<function>(?<![A-Za-z])\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z]))"
    r"|[=,;<>]|\\(?:approx|text)"
)
_THIN_THOUSANDS = re.compile(r"(?<=\d)\s*(?:,\\!|\{,\}|\\,|\\!)\s*(?=\d{3}(?!\d))")  # 1,\!000  10{,}000  58\,500
_UNIT_TEXT = re.compile(
    r"(?<=[^\s,=])\s*\\text\s*\{(?![^{}]*(?:\d|\b(?:or|and|not|nor)\b))[^{}]*\}\s*(?:\^\s*\{?\s*\d\s*\}?)?\s*\.?$"
)  # text with a number or an "or" is more than a unit
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
      | (?P<mantissa>\d(?:\.\d+)?)(?:\\times|\\cdot|\*)10\^(?:\{{(?P<power>[-+]?\d{{1,3}})\}}|(?P<power1>\d))
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
    """A number as written: ``form`` is "integer", "decimal", "scientific" or "fraction"; ``reduced`` is about
    fractions, ``figures`` and ``places`` (all digits, and those after the point) about decimals. ``50%`` has value 50
    and ``percent`` set; its ``worth`` is one half."""

    value: Fraction
    form: str
    reduced: bool = True
    percent: bool = False
    figures: int = 0
    places: int = 0

    def answers(self, truth: Numeral) -> bool:
        """Whether this answer is right for that truth. A percentage is a number of hundredths: ``50%`` answers 0.5 and
        not 50. The sign may only be left out, like a unit, if the truth itself has it."""
        left_out = truth.percent and not self.percent and self.value == truth.value
        if self.worth != truth.worth and not left_out:
            return truth.form == "fraction" and self._rounds(truth)
        if truth.form != "fraction" and truth.value.denominator == 1 and not truth.percent:
            return self.form != "fraction" and not self.percent
        return self.form != "fraction" or self.reduced or not truth.reduced

    @property
    def worth(self) -> Fraction:
        return self.value / 100 if self.percent else self.value

    def rounds_to(self, other: Numeral) -> bool:
        """Whether the other is this number, rounded to the places that the other is written with."""
        return abs(self.worth - other.worth) <= Fraction(10) ** -other.places / 2 / (100 if other.percent else 1)

    def _rounds(self, truth: Numeral) -> bool:
        """Whether this is the truth, a fraction, as a computer prints it: a decimal correct to its last place."""
        near = abs(self.value - truth.worth) <= Fraction(10) ** -self.places
        return self.figures >= _FIGURES_OF_A_COMPUTER and not self.percent and near


def clean(text: str) -> str:
    """The answer without typography, currency signs, degree signs and a final full stop."""
    # Thousands first: without its degree signs, a list of angles would become one number.
    text = _join_thousands(_THIN_THOUSANDS.sub("", _BLANKS.sub(" ", text.translate(_CHARACTERS))))
    for pattern, new in _REPLACEMENTS:
        text = pattern.sub(new, text)
    text = _without_degrees(text)
    return _unwrapped(" ".join(text.split()).rstrip("."))


def _without_degrees(text: str) -> str:
    """The text without degree signs, except in the argument of a function: there they change the value."""
    in_function = False

    def kept(found: re.Match[str]) -> str:
        nonlocal in_function
        if found["degree"] is None:
            in_function = found["function"] is not None
            return found.group()
        return _DEGREE if in_function else ""

    return _DEGREE_OR_FUNCTION.sub(kept, text) if _DEGREE in text else text


def _join_thousands(text: str) -> str:
    """The text with ``1,234`` as one number, except within brackets, where it is a pair."""

    depth = {"(": 0, "[": 0}

    def joined(found: re.Match[str]) -> str:
        sign = found.group()
        if sign in _OPENED_BY:
            depth[_OPENED_BY[sign]] += 1 if sign in depth else -1
            return sign
        return sign if max(depth.values()) > 0 else sign.replace(",", "")

    return _BRACKET_OR_THOUSANDS.sub(joined, text)


def _unwrapped(text: str) -> str:
    """The text without braces or ``\\text`` around all of it. Limited to a few layers: each scans the whole text."""
    for _ in range(_MOST_WRAPPINGS):
        opening = re.match(r"(?:\\text\s*)?\{", text)
        if opening is None or not _closes_at_end(text, opening.end()):
            break
        text = text[opening.end() : -1].strip().rstrip(".")
    return text


def _closes_at_end(text: str, start: int) -> bool:
    """Whether the brace that opens just before ``start`` is closed by the last character, and not before."""
    depth = 1
    for at in range(start, len(text)):
        if text[at - 1] != "\\":
            depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at == len(text) - 1
    return False


def without_units(text: str) -> str:
    """A cleaned answer without units, such as ``\\text{ cm}^2`` or a word after its number."""
    while (shorter := _UNIT_TEXT.sub("", text).rstrip()) != text and shorter[-1] not in "+-*/^_=<>":
        text = shorter
    return _UNIT_WORDS.sub("", text).rstrip()


def last_side(text: str) -> str:
    """The text after the last equality sign; all of it if there is none."""
    return _EQUALS.split(text)[-1].strip()


def numeral(text: str) -> Numeral | None:
    """The plain number that a cleaned answer is: ``-3``, ``2.50``, ``\\frac34``, ``1 1/2``, ``50%``, ``3e5``."""
    if len(text) > LONGEST_NUMBER:
        return None
    text = _without_brackets(text)
    mixed = _MIXED.fullmatch(text.removeprefix("-"))
    if mixed:
        text = f"{'-' if text.startswith('-') else ''}{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    found = _LITERAL.fullmatch(_squeezed(text))
    if found is None:
        return None
    negative = (found["sign"] == "-") != (found["inner"] == "-")
    percent = found["percent"] == "%"
    written = found["decimal"] or found["mantissa"]
    if written is not None:
        exponent = int(found["exponent"] or found["power"] or found["power1"] or 0)
        value = Fraction("0" + written) * Fraction(10) ** exponent
        form = "integer" if re.fullmatch(r"\d+", written) and not found["exponent"] else "decimal"
        form = form if found["mantissa"] is None else "scientific"
        return Numeral(
            -value if negative else value,
            form,
            percent=percent,
            figures=len(written.replace(".", "").lstrip("0")),
            places=len(written.partition(".")[2]) - exponent,
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


def _squeezed(text: str) -> str:
    """The text without blanks, except between digits where they do not separate thousands: ``4 2`` is not 42, but
    ``42 000`` is 42000."""
    return _BLANK.sub("", text)


def _without_brackets(text: str) -> str:
    while (inner := re.fullmatch(r"[({]\s*([^(){}]*)\s*[)}]", text)) is not None:
        text = inner.group(1)
    return text


def words(text: str) -> str | None:
    """The words of a cleaned answer, for comparison: ``(C)`` as ``c``; None if it is not words."""
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip(" ().")
    return "".join(bare.casefold().split()) if _WORDS.fullmatch(bare) else None


@dataclass(frozen=True)
class _Sides:
    """An answer split at its equality signs: the last side, the others, and whether all agree (None: that needs
    algebra). ``41 = 42`` states two numbers; ``x = 42`` states one and its name."""

    named: tuple[str, ...]
    last: str
    agree: bool | None


def _sides(text: str) -> _Sides:
    """Split at equality signs, unless a side before one is a list: ``41, x = 42`` are two answers."""
    sides = [side.strip() for side in _EQUALS.split(text)]
    if any(_is_list(side) for side in sides[:-1]):
        return _Sides((), text, True)
    agreements = [_agree(*pair) for pair in zip(sides, sides[1:], _EQUALS.findall(text), strict=False)]
    agree = False if False in agreements else None if None in agreements else True
    return _Sides(tuple(sides[:-1]), sides[-1], agree)


def _is_list(text: str) -> bool:
    """Whether there is a comma, a semicolon or an "or" outside of brackets."""
    depth = 0
    for found in re.finditer(r"[(\[{]|[)\]}]|[,;]|\b(?:or|and)\b", text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(found.group(), 0)
        if (found.group() in ",;" and depth <= 0) or found.group() in ("or", "and"):
            return True
    return False


def _agree(left: str, right: str, sign: str) -> bool | None:
    """Whether two neighbors state the same number; True if the left one is a name, None if it needs algebra."""
    number, other = numeral(without_units(left)), numeral(without_units(right))
    if number is not None and other is not None:
        return number.worth == other.worth or (sign.startswith("\\approx") and number.rounds_to(other))
    bare = re.sub(r"\\[A-Za-z]+", "", left)
    return None if re.search(r"\d", bare) and not re.search(r"[A-Za-z]", bare) else True


def quick_same(given: str, truth: str) -> bool | None:
    """Whether the answer is right, if that can be decided without algebra; None if not."""
    given, truth = clean(given), clean(truth)
    if _squeezed(given) == _squeezed(truth):
        return True
    said, right = _sides(given), _sides(truth)
    truth_words = words(truth)
    if truth_words is not None and (len(truth_words) == 1 or len(truth_words) > 2):
        said_words = words(said.last)
        if len(truth_words) > 2:
            return said_words == truth_words
        if said_words == truth_words:
            return not any(len(words(name) or "") == 1 for name in said.named)  # B = C does not state C
    if said.named and right.named and said.named != right.named:
        number, expected = numeral(without_units(given)), numeral(without_units(truth))
    else:
        number, expected = numeral(without_units(said.last)), numeral(without_units(right.last))
    if expected is not None and number is not None:
        return number.answers(expected) and said.agree
    if expected is not None and expected.form in ("integer", "decimal") and expected.value.denominator == 1:
        return False
    return None
