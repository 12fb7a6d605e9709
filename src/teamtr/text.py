"""Text from models and files, made safe to look at; and figures as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MOST_DIGITS = 300
"""Of a whole number that somebody else wrote: Python converts one in no time, and a float can hold it."""

_HIDDEN = re.compile(
    "[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~&])")
_HALF = re.compile("[\ud800-\udfff]")


def visible(text: str) -> str:
    """Characters that hide or reorder text (bidi controls, zero-width, control codes), or that XML cannot hold, become
    their code."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def on_terminal(text: str) -> str:
    """The text as a terminal may be given it: no control code, so no escape sequence, and no return to the beginning
    of a line."""
    return visible(text.replace("\r\n", "\n")).replace("\r", "⟨U+000D⟩")


def has_half_character(text: str) -> bool:
    """Whether half of a surrogate pair stands alone in the text: no file and no tokenizer can hold it."""
    return not text.isascii() and _HALF.search(text) is not None


def without_surrogates(text: str) -> str:
    """Halves of a character, which UTF-8 cannot write, become the sign for what cannot be read."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def in_markdown(text: str) -> str:
    """The text on one line, with everything escaped that Markdown or HTML would read."""
    return _MARKDOWN.sub(r"\\\1", visible(" ".join(text.split())))


def share(value: float, interval: Sequence[float]) -> str:
    """A share with its interval, in per cent. With a decimal: of many problems that are all alike the interval is
    narrower than one per cent, and `0 % (0 to 0)` would claim certainty."""
    low, high = interval
    return f"{100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 batch", "2 batches": a number and what it counts."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def shown(value: Any) -> str:
    """The value in at most 80 characters, for an error."""
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def slug(text: str) -> str:
    """As it may stand in the name of a run."""
    kept = "".join(c if c.isalnum() or c == "." else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part)
