"""Sanitizes text from models and files for display, and formats numbers as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MOST_DIGITS = 300
"""Maximum digits of an integer in untrusted text: converting it is fast, and its value fits in a float."""

_HIDDEN = re.compile(
    "[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~&])")
_HALF = re.compile("[\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with characters that hide or reorder text (bidi controls, zero-width, control codes), or that XML cannot
    contain, replaced by their codes."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def on_terminal(text: str) -> str:
    """The text made safe for a terminal: without control codes, hence without escape sequences, and without carriage
    returns."""
    return visible(text.replace("\r\n", "\n")).replace("\r", "⟨U+000D⟩")


def has_half_character(text: str) -> bool:
    """Whether the text contains a lone surrogate, which neither files nor tokenizers can represent."""
    return not text.isascii() and _HALF.search(text) is not None


def without_surrogates(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, replaced by the replacement character."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def in_markdown(text: str) -> str:
    """The text on one line, with Markdown and HTML syntax escaped."""
    return _MARKDOWN.sub(r"\\\1", visible(" ".join(text.split())))


def share(value: float, interval: Sequence[float]) -> str:
    """A share with its interval, in percent. It has a decimal because with many problems that all have the same result
    the interval is narrower than one percent, and `0 % (0 to 0)` would claim certainty."""
    low, high = interval
    return f"{100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 batch", "2 batches": a number and what it counts."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def shown(value: Any) -> str:
    """The value in at most 80 characters, for an error message."""
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def slug(text: str) -> str:
    """The text as it may appear in the name of a run."""
    kept = "".join(c if c.isalnum() or c == "." else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part)
