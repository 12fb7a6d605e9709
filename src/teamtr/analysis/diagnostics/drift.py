"""How far the contexts of an agent moved while others were updated: D_occ between two batches of the same problems.

Contexts are compared by identity, so this sees only contexts that repeat. Two batches of one and the same law differ
by chance as well: ``chance`` is what random relabelling of the pooled contexts gives, and only an excess over it is
drift. In free text nothing repeats, ``repeated`` is near zero, and the figure then says nothing.
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
        """What no chance explains: a cautious figure, at most the truth but for its own spread."""
        return max(self.total_variation - self.chance, 0.0)

    @property
    def corrected(self) -> float:
        """Chance taken out in quadrature, as noise adds up: right where there is only chance and where there is none,
        rough between; near zero it is mostly spread."""
        return math.sqrt(max(self.total_variation**2 - self.chance**2, 0.0))


def context_drift(
    before: Sequence[Hashable],
    after: Sequence[Hashable],
    *,
    rng: np.random.Generator,
    strata: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None,
    draws: int = 100,
) -> Drift:
    """Between the contexts an agent had at stage start and those it has when its own turn to be updated comes.

    ``strata`` name the problem of each context on both sides. Both batches play the same problems equally often, so
    chance moves contexts only within a problem, and relabelling must stay within it as well.
    """
    if not before or not after:
        raise ValueError("context_drift needs contexts on both sides")
    labels_N, kinds = _numbered([*before, *after])
    strata_N = _numbered([*strata[0], *strata[1]])[0] if strata else np.zeros(len(labels_N), dtype=np.int64)
    if len(strata_N) != len(labels_N):
        raise ValueError(f"every context needs its problem, got {len(strata_N)} for {len(labels_N)} contexts")
    first_N = np.arange(len(labels_N)) < len(before)
    # Sorted by problem, and within it the first batch before the second: random order within a problem relabels it.
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
    """Equal values get equal numbers; and how many different ones there are."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64), len(numbers)
