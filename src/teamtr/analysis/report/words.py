"""Numbers as a person reads them, in text and on the page."""

from __future__ import annotations

from typing import Any

from teamtr.records import number

NONE = "–"
"""What stands where a number is not known."""


def finite(value: Any) -> bool:
    """Whether this is a number that can be shown and drawn."""
    return number({"x": value}, "x") is not None


def num(value: Any, digits: int = 3) -> str:
    """Three significant digits, thousands grouped, a power of ten where it is very small or large; what is no number
    as it is. Half goes away from zero, as in the browser (Python's own goes to the even digit): the page says a number
    one way."""
    if value is None:
        return NONE
    if not finite(value):
        return str(value)
    if float(value).is_integer():
        return f"{int(value):,}"
    value *= 1 + 1e-13
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_short(mantissa)}e{int(exponent)}".replace("e-", "e−")
    return _short(f"{float(f'{value:.{digits}g}'):,.6f}")


def signed(value: Any, digits: int = 3) -> str:
    """The same with a plus before what is above zero."""
    return f"{'+' if value > 0 else ''}{num(value, digits)}" if finite(value) else NONE


def percent(share: Any, digits: int = 0) -> str:
    return f"{points(share, digits)} %" if finite(share) else NONE


def points(share: float, digits: int = 0) -> str:
    """In hundredths; half goes up."""
    return f"{100 * share + 1e-9:.{digits}f}"


def clock(seconds: float | None) -> str:
    """A length of time."""
    if seconds is None:
        return "an unknown time"
    if seconds < 10 and not float(seconds).is_integer():
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _short(decimal: str) -> str:
    return decimal.rstrip("0").rstrip(".") if "." in decimal else decimal
