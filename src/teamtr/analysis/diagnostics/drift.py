"""Drift of an agent's contexts while others are updated: D_occ between two batches of the same problems.

Contexts are compared by identity, so only contexts that repeat count. Two batches of the same distribution also differ
by chance: ``chance`` is the result of randomly relabeling the pooled contexts, and only an excess over it is drift. In
free text nothing repeats, ``repeated`` is near zero, and the result is meaningless.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Drift:
    """Total variation between two samples of contexts; ``repeated`` is the share that occurs more than once."""

    total_variation: float
    chance: float
    repeated: float

    @property
    def excess(self) -> float:
        """The part not explained by chance: a conservative estimate, at most the true value up to its own spread."""
        return max(self.total_variation - self.chance, 0.0)

    @property
    def corrected(self) -> float:
        """Chance subtracted in quadrature, as noise adds up: exact if there is only chance or no chance, approximate in
        between, and mostly noise near zero."""
        return math.sqrt(max(self.total_variation**2 - self.chance**2, 0.0))


def context_drift(
    before: Sequence[Hashable],
    after: Sequence[Hashable],
    *,
    rng: np.random.Generator,
    strata: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None,
    draws: int = 100,
) -> Drift:
    """The drift between an agent's contexts at the start of the stage and those before its own update.

    ``strata`` name the problem of each context on both sides. Both batches play the same problems equally often, so
    chance moves contexts only within a problem, and relabeling must stay within it too.
    """
    if not before or not after:
        raise ValueError("context_drift needs contexts on both sides")
    labels_N, kinds = _numbered([*before, *after])
    strata_N = _numbered([*strata[0], *strata[1]])[0] if strata else np.zeros(len(labels_N), dtype=np.int64)
    if len(strata_N) != len(labels_N):
        raise ValueError(f"every context needs its problem, got {len(strata_N)} for {len(labels_N)} contexts")
    first_N = np.arange(len(labels_N)) < len(before)
    # Sorted by problem, the first batch before the second within each: shuffling within a problem relabels it.
    place_N = first_N[np.lexsort((~first_N, strata_N))]

    def distance(labels: NDArray[np.int64], first: NDArray[np.bool_]) -> float:
        one = np.bincount(labels[first], minlength=kinds) / len(before)
        other = np.bincount(labels[~first], minlength=kinds) / len(after)
        return 0.5 * float(np.abs(one - other).sum())

    shuffled = [labels_N[np.lexsort((rng.random(len(labels_N)), strata_N))] for _ in range(draws)]
    return Drift(
        total_variation=distance(labels_N, first_N),
        chance=float(np.mean([distance(labels, place_N) for labels in shuffled])),
        repeated=float((np.bincount(labels_N)[labels_N] > 1).mean()),
    )


def _numbered(values: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    """Numbers the values, equal ones alike, and counts the distinct ones."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64), len(numbers)
