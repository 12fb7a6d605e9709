r"""The DeepScaleR verifier's rules, reimplemented: which answers it accepts as right.

The paper grades math with it, so results must be graded this way to be comparable with the paper's. An answer is right
if one of two things holds:

- *mathd*: both are the same text after the normalization of the MATH data set (``mathd_normalise``);
- *sympy*: after another normalization (``normalize``), both are the same text, or sympy simplifies their difference to
  zero. Tuples and intervals are compared element by element between equal brackets. A fraction that is not reduced is
  wrong. If only one of two elements is an integer, they differ. Text with more than two different letters, or with a
  power that might explode, is never passed to sympy.

All but sympy's part is done here, with string operations on texts of bounded length: ``judge`` returns right, wrong, or
the pairs of elements that sympy must prove equal (``proofs``, in the worker). The quirks are the verifier's: ``40_9``
is 409 (Python floats may contain underscores), ``\sqrt[3]{2}`` is the square root of 2, ``\cot x`` is x.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from teamtr.grading.math.latex import latex_to_text

_ENCLOSED_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")

Parts = list[tuple[str, str]]
"""(truth, given) pairs of elements that remain to be proved equal."""


def judge(given: str, truth: str) -> bool | Parts:
    """True or False, or the pairs of elements that sympy has to prove equal, all of them."""
    if mathd_normalise(given) == mathd_normalise(truth):
        return True
    truth, given = normalize(truth), normalize(given)
    if truth == given:
        return True
    if not given:
        return False
    truths, givens = _split(truth), _split(given)
    if len(truths) > 1 and (truth[0] != given[0] or truth[-1] != given[-1]):
        return False
    if len(truths) != len(givens):
        return False
    open_parts: Parts = []
    for one, other in zip(truths, givens, strict=True):
        decided = _judge_part(one, other)
        if decided is False:
            return False
        if decided is None:
            open_parts.append((one, other))
    return open_parts or True


def _judge_part(truth: str, given: str) -> bool | None:
    if _is_fraction(truth) and _is_fraction(given):
        return truth == given
    if _is_integer(truth) != _is_integer(given):
        return False
    if _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(given):
        return truth == given
    difference = f"({truth})-({given})"
    return None if _may_evaluate(difference) and not _is_hopeless(difference) else False


# mathd


class _UnreadableError(Exception):
    """The normalization of the MATH data set failed; the answer is used unchanged."""


def mathd_normalise(answer: str) -> str:
    answer = answer.strip()
    enclosed = _ENCLOSED_TEXT.search(answer)
    if enclosed is not None:
        answer = enclosed["text"].strip()
    try:
        return _mathd(answer)
    except _UnreadableError:
        return answer


def _mathd(text: str) -> str:
    for old, new in (
        *(
            ("\n", ""),
            ("\\!", ""),
            ("\\\\", "\\"),
            ("tfrac", "frac"),
            ("dfrac", "frac"),
            ("\\left", ""),
            ("\\right", ""),
        ),
        *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
    ):
        text = text.replace(old, new)
    text = _without_units(text)
    for old, new in (("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(old, new)
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _with_braces_after_fractions(_with_braces_after_roots(text).replace(" ", ""))
    return _as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _without_units(text: str) -> str:
    before, *after = text.split("\\text{ ")
    if len(after) > 1:
        raise _UnreadableError
    return before


def _with_braces_after_roots(text: str) -> str:
    """``\\sqrt3`` as ``\\sqrt{3}``."""
    before, *radicands = text.split("\\sqrt")
    if not all(radicands):
        raise _UnreadableError
    return before + "".join(
        "\\sqrt" + (rest if rest.startswith("{") else f"{{{rest[0]}}}{rest[1:]}") for rest in radicands
    )


def _with_braces_after_fractions(text: str) -> str:
    """``\\frac12`` and ``\\frac1{2}`` as ``\\frac{1}{2}``; the whole text unchanged if a fraction is incomplete."""
    before, *fractions = text.split("\\frac")
    if not all(fractions):
        raise _UnreadableError
    braced = before
    for rest in fractions:
        braced += "\\frac"
        if rest.startswith("{"):
            braced += rest
        elif len(rest) < 2:
            return text
        elif rest[1] == "{":
            braced += f"{{{rest[0]}}}{rest[1:]}"
        else:
            braced += f"{{{rest[0]}}}{{{rest[1]}}}{rest[2:]}"
    return braced


def _as_fraction(text: str) -> str:
    """``3/4`` as ``\\frac{3}{4}``, for integers written plainly."""
    plain = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return text if plain is None else f"\\frac{{{plain[1]}}}{{{plain[2]}}}"


# sympy

_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
_UNIT = tuple(re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?") for unit in _UNITS)
_WORDS = (
    *(("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")),
    *(("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")),
)
_PLAIN = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_DEEPEST_IN_PYTHON = 200  # nesting depth that Python's parser accepts
_UNSAFE_POWER = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
_EXPLODES = re.compile(r"\*\*\(?[0-9.]+\)?\*\*|\*\*[0-9]{5}|[0-9]{5}!|\([-+*/^!().0-9]*\)!")


def normalize(text: str) -> str:
    """The form that is compared and passed to sympy."""
    enclosed = _ENCLOSED_TEXT.search(text)
    if enclosed is not None:
        text = enclosed["text"]
    for old, new in _WORDS:
        text = text.replace(old, new)
    for unit in _UNIT:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    number = _float(text)
    if number is not None and _is_whole(number):
        text = str(round(number))
    if "\\" in text:
        with contextlib.suppress(ValueError):
            text = _plain_text(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is 7+3/4
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(int(float(text.replace(",", "")))) if _is_integer(text) else text


def _plain_text(text: str) -> str:
    for old, new in (
        ("\\tfrac", "\\frac"),
        ("\\dfrac", "\\frac"),
        ("\\frac", " \\frac"),
    ):  # the blank is for 1\frac{1}{2}
        text = text.replace(old, new)
    text = latex_to_text(text)
    for old, new in _PLAIN:
        text = text.replace(old, new)
    return text.strip()


def _split(text: str) -> list[str]:
    """The elements of a tuple or an interval; otherwise the text itself."""
    text = _without_thousands(text)
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not set("()[]") & set(inner):
        return [part.strip() for part in inner.split(",")]
    return [text] if text else []


def _without_thousands(text: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\3\4", text)) != text:
        text = shorter
    return text


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_whole(number: float) -> bool:
    return math.isfinite(number) and abs(number - round(number)) <= 1e-7


def _is_integer(text: str) -> bool:
    number = _float(_without_thousands(text))
    return number is not None and _is_whole(number)


def _is_fraction(text: str) -> bool:
    return _FRACTION.search(text) is not None


def _may_evaluate(expression: str) -> bool:
    letters = {letter for letter in expression.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    return len(letters) <= 2 and _UNSAFE_POWER.search(expression) is None


def _is_hopeless(expression: str) -> bool:
    """Whether the verifier itself would never return, or fail after seconds, so that nothing is lost by not trying."""
    depth = deepest = 0
    for bracket in re.findall(r"[()]", expression):
        depth += 1 if bracket == "(" else -1
        deepest = max(deepest, depth)
    return deepest >= _DEEPEST_IN_PYTHON or _EXPLODES.search(expression) is not None


# In the worker


def proofs() -> Callable[[list[dict[str, Any]]], Iterator[bool]]:
    """A grader of items {"parts": [(truth, given), ...]}: whether sympy proves each pair equal."""
    import sympy  # type: ignore[import-untyped]
    from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

    transformations = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
    )

    def equal(truth: str, given: str) -> bool:
        # sympy's parser evaluates Python, so it is only run in a worker, and only (see _may_evaluate) on text with at
        # most two different letters, which is too few to name anything harmful.
        expression = f"({truth})-({given})".replace("^", "**")
        try:
            difference = sympy_parser.parse_expr(expression, transformations=transformations)
            return bool(sympy.simplify(difference) == 0)
        except Exception:  # as in the original verifier: what cannot be parsed is not equal
            return False

    def grade(items: list[dict[str, Any]]) -> Iterator[bool]:
        for item in items:
            yield all(equal(truth, given) for truth, given in item["parts"])

    return grade
