"""Refusals (validation errors of a section), and helpers that quote values and suggest names in messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

KeyPath = tuple[str | int, ...]
"""A path in the data: ``("team", "agents", 0, "model")``."""


LONGEST_GUESSED = 64
"""Longest word, in characters, for which a similar name is searched."""


@dataclass(frozen=True)
class Refusal:
    """A part of the data that is refused, and why.

    A refusal between fields is not reported if a field that it ``rests_on`` is itself refused. One of a key that is
    ``idle`` (it has no effect given the others) is not reported of the stored team file of a run.
    """

    path: KeyPath
    message: str
    rests_on: tuple[KeyPath, ...] = ()
    at_key: bool = False  # the key is wrong, not its value
    idle: bool = False
    meant: KeyPath | None = None  # for an unknown key: the valid key of the same section that was probably meant


def show(value: Any) -> str:
    """A value as quoted in messages."""
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
    """The value at this path, or None."""
    for step in path:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def dotted(path: KeyPath, data: Any = None) -> str:
    """A path as written in messages and overrides: ``team.agents.left.model``; without ``data``, items are numbered."""
    words = []
    for depth, step in enumerate(path):
        name = at(data, (*path[: depth + 1], "name")) if isinstance(step, int) else None
        words.append(name if isinstance(name, str) and name else str(step))
    return ".".join(words) or "the team file"


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that was most likely meant by ``word``, or None if none is similar.

    A match with the beginning, a part or the initials of a name counts slightly less than one with the whole name:
    ``radious`` matches ``radius_nats_per_message``, and ``lr`` matches ``learning_rate``.
    """

    if len(word) > LONGEST_GUESSED:
        return None

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
    """``; did you mean "x"?``, or ``; <otherwise>: `` and all candidates if none is similar, or "" without
    ``otherwise``."""
    candidates = tuple(candidates)
    near = nearest(word, candidates) if isinstance(word, str) else None
    if near:
        return f'; did you mean "{near}"?'
    return f"; {otherwise}: {', '.join(candidates)}" if otherwise else ""
