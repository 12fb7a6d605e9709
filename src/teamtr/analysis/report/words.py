"""Formats numbers for text and the page."""

from __future__ import annotations

from typing import Any

from teamtr.records import number

NONE = "–"
"""Placeholder for an unknown number."""


def finite(value: Any) -> bool:
    """Whether this is a finite number, which can be shown and drawn."""
    return number({"x": value}, "x") is not None


def num(value: Any, digits: int = 3) -> str:
    """The value with three significant digits, grouped thousands, and a power of ten if it is very small or large; a
    value that is not a number unchanged. Halves round away from zero, as in the browser (Python rounds them to even),
    so that a page shows a number in only one way."""
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
    """The same with a plus sign for positive values."""
    return f"{'+' if value > 0 else ''}{num(value, digits)}" if finite(value) else NONE


def percent(share: Any, digits: int = 0) -> str:
    return f"{points(share, digits)} %" if finite(share) else NONE


def points(share: float, digits: int = 0) -> str:
    """The share in hundredths; halves round up."""
    return f"{100 * share + 1e-9:.{digits}f}"


def clock(seconds: float | None) -> str:
    """A duration in words."""
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
