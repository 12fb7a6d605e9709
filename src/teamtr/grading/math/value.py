"""Evaluates an answer's tree at given values of its symbols: exactly if it is rational, otherwise to many digits.

Nothing here can hang: a power, a factorial or a number of digits beyond a bound raises ``TooLargeError`` before it is
computed. Two trees that agree at several random points are the same function with high probability (for rational
functions by the Schwartz-Zippel lemma), so no simplification is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]

from teamtr.grading.math.parse import Node

MOST_BITS = 100_000  # of an exact number
MOST_DIGITS = 3_000  # of an inexact one
LARGEST_FACTORIAL = 10_000
LARGEST_EXPONENT = 10_000

Value = Any
"""A Fraction, or an mpmath number."""

_CONSTANTS = {"\\pi": lambda: mpmath.pi(), "e": lambda: mpmath.e(), "i": lambda: mpmath.mpc(0, 1)}
_FUNCTIONS = {name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
_FUNCTIONS |= {name: getattr(mpmath, name) for name in ("sinh", "cosh", "tanh", "coth", "ln")}
_FUNCTIONS |= {
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "arccot": mpmath.acot,
    "arcsec": mpmath.asec,
    "arccsc": mpmath.acsc,
    "arcsinh": mpmath.asinh,
    "arccosh": mpmath.acosh,
    "arctanh": mpmath.atanh,
    "log": mpmath.ln,
    "lg": mpmath.log10,
}


class TooLargeError(ArithmeticError):
    """A number that is too large to compute."""


class NoValueError(Exception):
    """A tree whose value is not a number."""


def is_constant(name: str) -> bool:
    return name in _CONSTANTS


def value(tree: Node, symbols: Mapping[str, Fraction]) -> Value:
    """The value of a tree. Raises NoValueError, TooLargeError, or ZeroDivisionError if it has none."""
    parts = tree.parts
    match tree.kind:
        case "number":
            return tree.value
        case "symbol":
            return _CONSTANTS[tree.name]() if tree.name in _CONSTANTS else symbols[tree.name]
        case "+":
            return _bounded(_both(value(parts[0], symbols), value(parts[1], symbols), lambda a, b: a + b))
        case "neg":
            return -value(parts[0], symbols)
        case "*":
            return _bounded(_both(value(parts[0], symbols), value(parts[1], symbols), lambda a, b: a * b))
        case "/":
            return _bounded(_both(value(parts[0], symbols), value(parts[1], symbols), lambda a, b: a / b))
        case "^":
            return _power(value(parts[0], symbols), value(parts[1], symbols))
        case "!":
            return _factorial(value(parts[0], symbols))
        case "call":
            return _call(tree.name, [value(part, symbols) for part in parts])
    raise NoValueError(tree.kind)


def far_apart(one: Value, other: Value) -> bool:
    """Whether the values differ by more than rounding can explain."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one != other
    first, second = _finite(one), _finite(other)
    return bool(abs(first - second) > max(abs(first), abs(second)) * mpmath.mpf(10) ** -15)


def distance(one: Value, other: Value) -> Value:
    return abs(_finite(one) - _finite(other))


def coincide(one: Value, other: Value) -> bool:
    """Whether the values agree in a hundred decimal places, if computed with a precision far beyond that."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    return bool(abs(_finite(one) - _finite(other)) < mpmath.mpf(10) ** -100)


def _finite(number: Value) -> Value:
    inexact = _inexact(number)
    if not mpmath.isfinite(inexact):
        raise ZeroDivisionError
    return inexact


def digits(number: Value) -> int:
    """Number of digits before the point."""
    size = abs(number)
    if isinstance(size, Fraction):
        return max(0, (size.numerator.bit_length() - size.denominator.bit_length()) * 30103 // 100000)
    return max(0, int(mpmath.mag(size)) * 30103 // 100000) if size else 0


def _bounded(number: Value) -> Value:
    if isinstance(number, Fraction):
        if max(number.numerator.bit_length(), number.denominator.bit_length()) > MOST_BITS:
            raise TooLargeError
        return number
    if digits(number) > MOST_DIGITS:
        raise TooLargeError
    return number


def _both(one: Value, other: Value, operation: Any) -> Value:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return operation(one, other)
    return operation(_inexact(one), _inexact(other))


def _inexact(number: Value) -> Value:
    if not isinstance(number, Fraction):
        return number
    if digits(number) > MOST_DIGITS:
        raise TooLargeError
    return mpmath.mpf(number.numerator) / number.denominator


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        times = exponent.numerator
        if isinstance(base, Fraction):
            if base in (1, -1):
                return base ** (times % 2)
            if base == 0:
                return base ** max(-1, min(times, 1))
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(times) * bits > MOST_BITS:
                raise TooLargeError
            return base**times
        if abs(times) > LARGEST_EXPONENT or abs(times) * (1 + digits(base)) > MOST_DIGITS * 10:
            raise TooLargeError
        return _bounded(base**times)
    base, exponent = _inexact(base), _inexact(exponent)
    if base == 0:
        raise ZeroDivisionError
    if abs(exponent * mpmath.log(base)) > MOST_DIGITS * 2:
        raise TooLargeError
    return _bounded(mpmath.power(base, exponent))


def _factorial(number: Value) -> Value:
    if isinstance(number, Fraction) and number.denominator == 1 and number >= 0:
        if number > LARGEST_FACTORIAL:
            raise TooLargeError
        return Fraction(math.factorial(number.numerator))
    if abs(_inexact(number)) > 100:
        raise TooLargeError
    return mpmath.gamma(_inexact(number) + 1)


def _call(name: str, given: list[Value]) -> Value:
    match name, given:
        case "root", [radicand, degree]:
            return _root(radicand, degree)
        case "abs", [number]:
            return abs(number)
        case "floor" | "ceil", [number]:
            if isinstance(number, Fraction):
                return Fraction(math.floor(number) if name == "floor" else math.ceil(number))
            return (mpmath.floor if name == "floor" else mpmath.ceil)(number)
        case "binom", [Fraction(denominator=1) as above, Fraction(denominator=1) as below]:
            if not 0 <= above <= LARGEST_FACTORIAL or below < 0:
                raise TooLargeError
            return Fraction(math.comb(above.numerator, below.numerator))
        case "binom", [above, below] if max(digits(above), digits(below)) < 3:
            return mpmath.binomial(_inexact(above), _inexact(below))
        case "max" | "min", [_, *_] if all(isinstance(number, Fraction) for number in given):
            return max(given) if name == "max" else min(given)
        case "log", [number, base]:
            return mpmath.ln(_inexact(number)) / mpmath.ln(_inexact(base))
        case "exp", [number]:
            return _power(mpmath.e(), number)
        case _, [number] if name in _FUNCTIONS:
            if digits(number) > 50:
                raise TooLargeError  # a sine of it would need as many digits
            return _FUNCTIONS[name](_inexact(number))
    raise NoValueError(name)


def _root(radicand: Value, degree: Value) -> Value:
    if degree == 2 and isinstance(radicand, Fraction) and radicand >= 0:
        over, under = math.isqrt(radicand.numerator), math.isqrt(radicand.denominator)
        if (over * over, under * under) == (radicand.numerator, radicand.denominator):
            return Fraction(over, under)
    if degree == 0:
        raise ZeroDivisionError
    number, times = _inexact(radicand), _inexact(degree)
    if number == 0:
        return Fraction(0)
    if (
        isinstance(degree, Fraction)
        and degree.denominator == 1
        and degree % 2
        and mpmath.im(number) == 0
        and number < 0
    ):
        return -mpmath.power(-number, 1 / times)  # the real root
    return mpmath.power(number, 1 / times)
