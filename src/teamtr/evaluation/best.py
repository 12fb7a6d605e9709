"""The best checkpoint by its evaluations, and early stopping: decided from stored values, so that a resumed run makes
the same decisions."""

from __future__ import annotations

from collections.abc import Sequence

from teamtr.reports import HeldOut


def best_of(evaluations: Sequence[HeldOut]) -> HeldOut | None:
    """The first evaluation with the highest success: a later equal one only cost more training."""
    return max(evaluations, key=lambda found: found.success, default=None)


def out_of_patience(evaluations: Sequence[HeldOut], patience: int | None) -> bool:
    """Whether at least ``patience`` evaluations followed the best one without improving on it; never with None."""
    best = best_of(evaluations)
    return patience is not None and best is not None and len(evaluations) - 1 - evaluations.index(best) >= patience


def are_comparable(asked: Sequence[str], asked_before: Sequence[str]) -> bool:
    """Whether success on these problems compares with that on the earlier ones: a resumed run may ask others
    (``eval.problems``), which are harder or easier. True where the log does not say which they were."""
    return not asked or not asked_before or list(asked) == list(asked_before)
