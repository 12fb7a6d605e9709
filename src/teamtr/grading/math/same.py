r"""Compares two answers mathematically rather than as text: our own rule, run in a worker.

Numbers and formulas are equal if they have the same value wherever they are defined. Tuples are compared element by
element between equal brackets; lists, sets, unions and both signs of a ``\pm`` in any order; equations up to a constant
factor; matrices entry by entry. An inequality equals the interval that it describes. If the truth is a plain number,
the two rules of ``text.py`` apply: an integer must be given as a number, a fraction must be reduced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]

from teamtr.grading.math.parse import Node, parse
from teamtr.grading.math.text import Numeral, quick_same
from teamtr.grading.math.tokens import UnreadableError
from teamtr.grading.math.value import (
    NoValueError,
    TooLargeError,
    coincide,
    digits,
    distance,
    far_apart,
    is_constant,
    value,
)

_POINTS = 6  # at which two formulas with symbols are compared
_POINTS_NEEDED = 3  # of them that must have a value
_PLACES_BY_DEFAULT = 2  # decimal places in which a formula after "approximately" must agree
_MOST_SIGNS = 5  # of \pm in one answer

_COLLECTIONS = {"list", "set", "union"}


def graders() -> Callable[[list[dict[str, Any]]], Iterator[bool]]:
    """The worker's factory: a grader of items {"given": ..., "truth": ...}."""

    def grade(items: list[dict[str, Any]]) -> Iterator[bool]:
        for item in items:
            quick = quick_same(item["given"], item["truth"])
            yield same_answer(item["given"], item["truth"]) if quick is None else quick

    return grade


def same_answer(given: str, truth: str) -> bool:
    """Whether the given answer equals the truth. False if either cannot be parsed, is too large to compute, or exceeds
    the recursion limit (a thousand factors)."""
    try:
        return _same(*_in_one_case(_plain(parse(given)), _plain(parse(truth))))
    except (UnreadableError, TooLargeError, RecursionError):
        return False


def _same(given: Node, truth: Node) -> bool:
    given, truth = _alike(given, truth)
    givens, truths = _members(given), _members(truth)
    if len(truths) != 1 or len(givens) != 1:
        return _same_in_any_order(givens, truths) and (given.kind == "union") == (truth.kind == "union")
    given, truth = givens[0], truths[0]
    if given.kind != truth.kind and "tuple" in (given.kind, truth.kind):
        return False
    if _infinity(truth) or _infinity(given):
        return _infinity(truth) == _infinity(given)
    match truth.kind:
        case "text" | "based":
            return (given.kind, given.name) == (truth.kind, truth.name)
        case "set":
            return given.kind == "set" and len(given.parts) == len(truth.parts)
        case "tuple":
            return given.name == truth.name and _same_in_order(given.parts, truth.parts)
        case "matrix" | "row":
            return given.kind == truth.kind and _same_in_order(given.parts, truth.parts)
        case "relation":
            return given.kind == "relation" and _same_relation(given, truth)
    return _same_formula(given, truth)


def _same_in_order(givens: Sequence[Node], truths: Sequence[Node]) -> bool:
    return len(givens) == len(truths) and all(_same(g, t) for g, t in zip(givens, truths, strict=True))


def _same_in_any_order(givens: Sequence[Node], truths: Sequence[Node]) -> bool:
    left = list(givens)
    if len(left) != len(truths):
        return False
    for truth in truths:
        match = next((i for i, given in enumerate(left) if _same(given, truth)), None)
        if match is None:
            return False
        left.pop(match)
    return True


# Shapes


def _in_one_case(given: Node, truth: Node) -> tuple[Node, Node]:
    """Both trees with the case of letters folded, as data sets vary it, except for a letter that either answer has in
    both cases: a ring's radii are R and r."""
    names = [_symbols(given), _symbols(truth)]
    both = {name.casefold() for own in names for name in own if sum(n.casefold() == name.casefold() for n in own) > 1}

    def folded(tree: Node) -> Node:
        name = tree.name
        if tree.kind == "symbol" and name.casefold() not in both and not is_constant(name.casefold()):
            name = name.casefold()
        return Node(tree.kind, tuple(map(folded, tree.parts)), name, tree.value)

    return folded(given), folded(truth)


def _plain(tree: Node) -> Node:
    """``x \\in S`` as S, an inequality in one symbol as an interval, a list of intervals as a union."""
    if tree.kind in _COLLECTIONS:
        parts = tuple(_plain(part) for part in tree.parts)
        is_region = tree.kind == "list" and all(_is_interval(part) for part in parts)
        return Node("union" if is_region else tree.kind, parts)
    if tree.kind != "relation":
        return tree
    signs = tree.name.split()
    if signs[-1] == "in":
        return _plain(tree.parts[-1])
    return _interval(tree, signs) or tree


def _is_interval(tree: Node) -> bool:
    return tree.kind == "tuple" and (tree.name in ("(]", "[)") or any(_infinity(part) for part in tree.parts))


def _infinity(tree: Node) -> str:
    """The sign of an infinity; "" for any other tree."""
    match tree:
        case Node("infinity"):
            return "+"
        case Node("neg", (Node("infinity"),)):
            return "-"
    return ""


def _interval(tree: Node, signs: list[str]) -> Node | None:
    """``a < x \\le b`` as ``(a, b]``, ``x > a`` as ``(a, \\infty)``; None for other relations."""
    endless = Node("infinity")
    match tree.parts, signs:
        case [low, Node(kind="symbol"), high], ["<" | "<=" as left, "<" | "<=" as right]:
            return Node("tuple", (low, high), ("(" if left == "<" else "[") + (")" if right == "<" else "]"))
        case [high, Node(kind="symbol"), low], [">" | ">=" as right, ">" | ">=" as left]:
            return Node("tuple", (low, high), ("(" if left == ">" else "[") + (")" if right == ">" else "]"))
        case [Node(kind="symbol"), high], ["<" | "<=" as sign]:
            return Node("tuple", (Node("neg", (endless,)), high), "()" if sign == "<" else "(]")
        case [Node(kind="symbol"), low], [">" | ">=" as sign]:
            return Node("tuple", (low, endless), "()" if sign == ">" else "[)")
        case [low, Node(kind="symbol")], ["<" | "<=" as sign] if not _symbols(low):
            return Node("tuple", (low, endless), "()" if sign == "<" else "[)")
        case [high, Node(kind="symbol")], [">" | ">=" as sign] if not _symbols(high):
            return Node("tuple", (Node("neg", (endless,)), high), "()" if sign == ">" else "(]")
    return None


def _alike(given: Node, truth: Node) -> tuple[Node, Node]:
    """If only one of them is an equation (``x = 5``), its value alone, unless ``B = C`` would then pass for C."""
    if _is_equation(given) and not (_is_equation(truth) or truth.kind == "relation"):
        names_a_choice = truth.kind == "symbol" and any(part.kind == "symbol" for part in given.parts[:-1])
        return (given if names_a_choice else _value_named(given)), truth
    if _is_equation(truth) and not (_is_equation(given) or given.kind == "relation"):
        return given, _value_named(truth)
    return given, truth


def _is_equation(tree: Node) -> bool:
    if tree.kind == "list":  # x = 2, x = 3 or x = 2, 3
        return any(_is_equation(part) for part in tree.parts)
    return tree.kind == "relation" and set(tree.name.split()) <= {"=", "~"}


def _value_named(tree: Node) -> Node:
    if tree.kind == "list":
        return Node("list", tuple(_value_named(part) for part in tree.parts))
    if not _is_equation(tree):
        return tree
    for left, right, sign in zip(tree.parts, tree.parts[1:], tree.name.split(), strict=False):
        if _contradict(left, right, sign):
            raise UnreadableError("two values")
    return tree.parts[-1]


def _contradict(left: Node, right: Node, sign: str) -> bool:
    """Whether two sides are different numbers, as in ``41 = 42``. Names and tuples are not numbers."""
    if _symbols(left) or _symbols(right) or _count_signs(left) or _count_signs(right):
        return False
    try:
        with mpmath.workdps(60):
            one, other = value(left, {}), value(right, {})
            if sign != "~":
                return far_apart(one, other)
            places = len(str(right.value.denominator)) - 1 if right.kind == "number" else _PLACES_BY_DEFAULT
            return bool(distance(one, other) > mpmath.mpf(10) ** -places / 2)
    except NoValueError:
        return False
    except (ArithmeticError, ValueError):
        return True


def _same_sign(name: str) -> str:
    return name.replace("~", "=")


def _members(tree: Node) -> list[Node]:
    """The members of a list, set or union; both values of a ``\\pm``; otherwise the tree itself."""
    if tree.kind in _COLLECTIONS and tree.parts:
        return [member for part in tree.parts for member in _members(part)]
    if _count_signs(tree) > _MOST_SIGNS:
        raise UnreadableError("too many signs")
    if _count_signs(tree) and tree.kind not in ("relation", "tuple", "matrix"):
        return [_with_sign(tree, "+"), _with_sign(tree, "-")]
    return [tree]


def _count_signs(tree: Node) -> int:
    return (tree.kind == "pm") + sum(_count_signs(part) for part in tree.parts)


def _with_sign(tree: Node, sign: str) -> Node:
    parts = tuple(_with_sign(part, sign) for part in tree.parts)
    if tree.kind == "pm" and parts[0] == Node("number"):
        return parts[1] if sign == "+" else Node("neg", (parts[1],))
    if tree.kind == "pm":
        return Node("+", (parts[0], parts[1] if sign == "+" else Node("neg", (parts[1],))))
    return Node(tree.kind, parts, tree.name, tree.value)


def _same_relation(given: Node, truth: Node) -> bool:
    if _same_sign(given.name) != _same_sign(truth.name) or len(given.parts) != len(truth.parts):
        return False
    if _same_in_order(given.parts, truth.parts):
        return True
    return _same_sign(given.name) == "=" and _proportional(_difference(given), _difference(truth))


def _difference(equation: Node) -> Node:
    left, right = equation.parts
    return Node("+", (left, Node("neg", (right,))))


# Formulas


def _numeral(tree: Node) -> Numeral | None:
    """The plain number that a tree stands for, including ``12\\frac{3}{5}`` and ``50%``; None if it is not one."""
    match tree:
        case Node("number"):
            return Numeral(tree.value, "integer" if tree.value.denominator == 1 else "decimal")
        case Node("neg", (inside,)):
            number = _numeral(inside)
            return None if number is None else replace(number, value=-number.value)
        case Node("*", (Node("number", value=front), Node("^", (Node("number", value=Fraction(numerator=10)), power)))):
            exponent = _numeral(power)
            if not 1 <= front < 10 or exponent is None or exponent.form != "integer" or abs(exponent.value) > 999:
                return None
            return Numeral(front * Fraction(10) ** exponent.value.numerator, "scientific")
        case Node("/", (Node("number", value=top), _), "%"):
            return Numeral(top, "integer" if top.denominator == 1 else "decimal", percent=True)
        case Node("/", (Node("number", value=top), Node("number", value=bottom))) if bottom:
            whole = top.denominator == bottom.denominator == 1
            reduced = whole and Fraction(top, bottom).denominator == bottom != 1
            return Numeral(Fraction(top, bottom), "fraction", reduced)
        case Node("+", (Node("number", value=whole_part), fraction), "mixed"):
            number = _numeral(fraction)
            return None if number is None else Numeral(whole_part + number.value, "fraction", number.reduced)
    return None


def _same_formula(given: Node, truth: Node) -> bool:
    expected, said = _numeral(truth), _numeral(given)
    if expected is not None:
        if said is not None:
            return said.answers(expected)
        if expected.form == "integer":
            return False
    names = _symbols(given) | _symbols(truth)
    return _agree(names, lambda symbols: (value(given, symbols), value(truth, symbols)))


def _proportional(one: Node, other: Node) -> bool:
    """Whether one is a constant multiple of the other."""
    names = _symbols(one) | _symbols(other)
    if not names:
        return False  # any two numbers are
    at = _points(names)[0]
    try:
        first, second = value(one, at), value(other, at)
    except (ArithmeticError, NoValueError, ValueError):
        return False
    if first == 0 or second == 0:
        return False
    return _agree(names, lambda symbols: (value(one, symbols) * second, value(other, symbols) * first))


def _agree(names: set[str], both: Callable[[dict[str, Fraction]], tuple[Any, Any]]) -> bool:
    """Whether the two values are equal wherever both exist, at enough points."""
    agreed = 0
    for symbols in _points(names):
        try:
            with mpmath.workdps(60):
                one, other = both(symbols)
                if far_apart(one, other):
                    return False
                precision = 300 + max(digits(one), digits(other))
            with mpmath.workdps(precision):
                if not coincide(*both(symbols)):
                    return False
        except NoValueError:
            return False
        except TooLargeError:
            if not names:
                return False
            continue
        except (ArithmeticError, ValueError):  # no value at this point
            continue
        agreed += 1
    return agreed >= (_POINTS_NEEDED if names else 1)


def _symbols(tree: Node) -> set[str]:
    own = {tree.name} if tree.kind == "symbol" and not is_constant(tree.name) else set()
    return own.union(*(_symbols(part) for part in tree.parts))


def _points(names: set[str]) -> list[dict[str, Fraction]]:
    """Points of evaluation, the same for every grader: values of both signs, none of them special."""
    rng = random.Random(20240229)
    return [
        {
            name: Fraction(rng.choice((-1, 1)) * rng.randint(11, 97), rng.choice((7, 13, 17, 19)))
            for name in sorted(names)
        }
        for _ in range(_POINTS if names else 1)
    ]
