"""Splits problems into train and test by a hash of a key, so that no problem changes sides when rows are added."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from teamtr.errors import UserError
from teamtr.types import Problem


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    digest = hashlib.sha256(b"split:" + text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def digest(text: str) -> str:
    """Twelve hexadecimal digits that identify a text, for rows without an id."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def name_of(row: Mapping[str, Any], keys: Sequence[str], otherwise: str) -> str:
    """The row's name: the first of these columns that is not empty, or else ``otherwise``. A data set may have a column
    of names in which some rows, or all, have none."""
    return next((str(row[key]) for key in keys if row.get(key) is not None), otherwise)


class OwnNames:
    """Tells equal names apart: the second NAME becomes NAME-2, and so on, but never a name that was given before."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._given = set[str]()

    def own(self, name: str) -> str:
        while True:
            self._counts[name] += 1
            count = self._counts[name]
            other = name if count == 1 else f"{name}-{count}"
            if other not in self._given:
                self._given.add(other)
                return other


def with_own_ids(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The same problems; one whose id was used before has a suffix, because evaluations tell problems apart by id."""
    names = OwnNames()
    named = ((problem, names.own(problem.id)) for problem in problems)
    return tuple(problem if own == problem.id else replace(problem, id=own) for problem, own in named)


def hold_out(
    problems: Iterable[Problem], share: float, key: Callable[[Problem], str]
) -> dict[str, tuple[Problem, ...]]:
    """Two splits; ``test`` has the problems whose key's hash is below ``share``: none for 0, all for 1."""
    if not 0 <= share <= 1:
        raise UserError(f"held_out is a share from 0 to 1, got {share}")
    every = tuple(problems)
    return {
        "train": tuple(problem for problem in every if unit_hash(key(problem)) >= share),
        "test": tuple(problem for problem in every if unit_hash(key(problem)) < share),
    }
