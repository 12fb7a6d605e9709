"""Finds problems that occur in both training and evaluation data: word for word, or nearly so."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

WORDS = 5  # words per run; overlap is counted in runs
NEARLY = 0.6  # runs in both texts, as a share of the runs in either

_OTHER = re.compile(r"[\W_]+")
_WORD = re.compile(r"[^\W\d_]+|\d")


@dataclass(frozen=True)
class Overlap:
    """Positions of training texts, each mapped to the position of the evaluation text that it repeats."""

    exact: dict[int, int]
    near: dict[int, int]

    @property
    def rows(self) -> set[int]:
        """The training texts to drop."""
        return {*self.exact, *self.near}

    def __str__(self) -> str:
        return (
            f"{len(self.rows)} training rows repeat evaluation problems: {len(self.exact)} word for word "
            f"({len(set(self.exact.values()))} problems), {len(self.near)} nearly ({len(set(self.near.values()))})"
        )


def folded(text: str) -> str:
    """Letters and digits only, case-folded: equal for texts that differ in typography alone."""
    return _OTHER.sub("", text.casefold())


def find_overlap(training: Sequence[str], evaluation: Sequence[str]) -> Overlap:
    """Which training texts equal an evaluation text up to typography, and which share most runs of words with one."""
    exact_places = {folded(text): place for place, text in enumerate(evaluation)}
    runs_of = [_runs(text) for text in evaluation]
    places_with: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, runs in enumerate(runs_of):
        for run in runs:
            places_with[run].append(place)
    exact: dict[int, int] = {}
    near: dict[int, int] = {}
    for row, text in enumerate(training):
        letters = folded(text)
        if letters in exact_places:
            exact[row] = exact_places[letters]
            continue
        runs = _runs(text)
        shared = Counter(place for run in runs & places_with.keys() for place in places_with[run])
        for place, count in shared.items():
            if count >= NEARLY * len(runs | runs_of[place]):
                near[row] = place
                break
    return Overlap(exact, near)


def _runs(text: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(text.casefold())
    return {tuple(words[start : start + WORDS]) for start in range(max(1, len(words) - WORDS + 1))}
