"""Mistakes in a team file, their places, and how they are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from teamtr.errors import UserError

MOST_TOLD = 100
"""Maximum number of mistakes that an error lists; it states how many more there are."""
WIDEST = 200
"""Maximum number of characters that are shown of a line with a mistake."""

_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


@dataclass(frozen=True)
class Place:
    """A range of columns in one line of the file, counted from 1."""

    line: int
    column: int
    width: int = 1

    @classmethod
    def after(cls, text: str) -> Place:
        """The place right after this text, which the file begins with."""
        lines = _LINE_BREAK.split(text)
        return cls(len(lines), len(lines[-1]) + 1)


@dataclass(frozen=True)
class Mistake:
    """One mistake and where it is: a place in the file, or the override that caused it."""

    message: str
    place: Place | None = None
    override: str | None = None


class ConfigError(UserError):
    """All mistakes in a team file called ``name`` with the content ``text``."""

    def __init__(self, name: str, text: str, mistakes: Iterable[Mistake]) -> None:
        self.name, self.text, self.mistakes = name, text, tuple(mistakes)
        lines = _LINE_BREAK.split(text)
        told = [_render(name, lines, mistake) for mistake in self.mistakes[:MOST_TOLD]]
        if len(self.mistakes) > MOST_TOLD:
            told.append(f"{name}: and {len(self.mistakes) - MOST_TOLD} mistakes more")
        super().__init__("\n".join(told))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, tuple[Mistake, ...]]]:
        """Support pickling, so that the error can be passed between processes."""
        return type(self), (self.name, self.text, self.mistakes)


def _render(name: str, lines: Sequence[str], mistake: Mistake) -> str:
    """One mistake in the format of compiler messages."""
    if mistake.override is not None:
        return f"override {json.dumps(mistake.override, ensure_ascii=False)}: {mistake.message}"
    if mistake.place is None:
        return f"{name}: {mistake.message}"
    line, column, width = mistake.place.line, mistake.place.column, mistake.place.width
    head = f"{name}:{line}:{column}: {mistake.message}"
    source = lines[line - 1] if line <= len(lines) else ""
    if len(source) > WIDEST:
        cut = max(0, min(column - 1 - WIDEST // 4, len(source) - WIDEST))
        source, column = source[cut : cut + WIDEST], column - cut
    width = max(1, min(width, WIDEST - column + 1))
    # Tabs are kept, so that the caret is under its column at any tab width.
    pad = "".join("\t" if char == "\t" else " " for char in source[: column - 1].ljust(column - 1))
    return f"{head}\n{line:5d} | {source}\n      | {pad}{'^' * width}"
