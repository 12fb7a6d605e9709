"""What is wrong with a team file, where it stands, and how it is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from teamtr.errors import UserError

KeyPath = tuple[str | int, ...]
"""Where something stands in the data: ``("team", "agents", 0, "model")``."""


@dataclass(frozen=True)
class Refusal:
    """Something in the data that is refused, and why.

    What is wrong between fields is not told when a field that it ``rests_on`` is refused itself.
    """

    path: KeyPath
    message: str
    rests_on: tuple[KeyPath, ...] = ()
    at_key: bool = False  # it is the key that is wrong, not its value
    meant: KeyPath | None = None  # for an unknown key: the valid one of the same section that was probably meant


_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


@dataclass(frozen=True)
class Place:
    """A stretch of one line of the file, counted from 1."""

    line: int
    column: int
    width: int = 1

    @classmethod
    def after(cls, text: str) -> Place:
        """Where a file that begins with this text goes on."""
        lines = _LINE_BREAK.split(text)
        return cls(len(lines), len(lines[-1]) + 1)


@dataclass(frozen=True)
class Mistake:
    """One thing wrong, and where: a place in the file, or the override that brought it."""

    message: str
    place: Place | None = None
    override: str | None = None


class ConfigError(UserError):
    """Everything wrong with a team file called ``name`` that holds ``text``."""

    def __init__(self, name: str, text: str, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        lines = _LINE_BREAK.split(text)
        super().__init__("\n".join(_render(name, lines, mistake) for mistake in self.mistakes))


def _render(name: str, lines: Sequence[str], mistake: Mistake) -> str:
    """One mistake as a compiler would print it."""
    if mistake.override is not None:
        return f"override {json.dumps(mistake.override, ensure_ascii=False)}: {mistake.message}"
    if mistake.place is None:
        return f"{name}: {mistake.message}"
    line, column, width = mistake.place.line, mistake.place.column, mistake.place.width
    head = f"{name}:{line}:{column}: {mistake.message}"
    source = lines[line - 1] if line <= len(lines) else ""
    # A tab stays a tab, so that the caret stands under its column however wide tabs are shown.
    pad = "".join("\t" if char == "\t" else " " for char in source[: column - 1].ljust(column - 1))
    return f"{head}\n{line:5d} | {source}\n      | {pad}{'^' * width}"


def show(value: Any) -> str:
    """A value as a message quotes it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            short = value if len(value) <= 40 else value[:37] + "..."
            return json.dumps(short, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        case dict():
            return "a mapping"
        case list() | tuple():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return str(value)


def at(data: Any, path: KeyPath) -> Any:
    """What stands at this path, or None."""
    for step in path:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def dotted(path: KeyPath, data: Any = None) -> str:
    """A path as messages and overrides write it: ``team.agents.left.model``; without the data, by number."""
    words = []
    for depth, step in enumerate(path):
        name = at(data, (*path[: depth + 1], "name")) if isinstance(step, int) else None
        words.append(name if isinstance(name, str) and name else str(step))
    return ".".join(words) or "the team file"


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a person who wrote ``word`` most likely meant, or None when none is near.

    Besides the whole name, its beginning, its parts and its initials count, a little less: ``radious`` is near
    ``radius_nats_per_message`` and ``lr`` near ``learning_rate``.
    """

    def like(other: str) -> float:
        return SequenceMatcher(None, word.lower(), other.lower()).ratio()

    def score(candidate: str) -> float:
        parts = candidate.split("_")
        scores = [like(candidate)]
        if len(word) >= 3:
            scores += [0.95 * like(candidate[: len(word)]), *(0.9 * like(part) for part in parts)]
        if len(parts) > 1 and word.lower() == "".join(part[:1] for part in parts):
            scores.append(0.9)
        return max(scores)

    best = max(candidates, key=score, default=None)
    return best if best is not None and score(best) >= 0.65 else None


def hint(word: Any, candidates: Iterable[str], otherwise: str = "") -> str:
    """``; did you mean "x"?``; when none is near, ``; <otherwise>: all of them``, or nothing without ``otherwise``."""
    candidates = tuple(candidates)
    near = nearest(word, candidates) if isinstance(word, str) else None
    if near:
        return f'; did you mean "{near}"?'
    return f"; {otherwise}: {', '.join(candidates)}" if otherwise else ""
