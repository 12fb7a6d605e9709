"""Which checkpoint is best by its evaluations, and whether to train on: decided by what is stored, so that a resumed
run decides alike."""

from __future__ import annotations

from collections.abc import Sequence

from teamtr.reports import HeldOut


def best_of(evaluations: Sequence[HeldOut]) -> HeldOut | None:
    """The first of those with the highest success: a later one that is no better has only cost more."""
    return max(evaluations, key=lambda found: found.success, default=None)


def out_of_patience(evaluations: Sequence[HeldOut], patience: int | None) -> bool:
    """Whether so many evaluations in a row were no better than the best before them; never without patience."""
    best = best_of(evaluations)
    return patience is not None and best is not None and len(evaluations) - 1 - evaluations.index(best) >= patience
