"""Data types of a check: a statement, a batch of random cases, and the two numbers that the statement compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from teamtr.types import Floats

if TYPE_CHECKING:
    from teamtr.theory.tabular import DiscountedStage, EpisodicStage

TOLERANCE = 1e-9
"""Tolerance for rounding, relative to 1 + |bound|."""


@dataclass(frozen=True)
class Outcome:
    """One statement on a batch of random cases: ``true <= bound`` in each, or ``true == bound`` if ``equal``.

    A lower bound is written as slack: for gain >= surrogate - penalty, the true value is surrogate - gain and the bound
    is the penalty.
    """

    name: str
    """The paper's label, e.g. ``thm:single``, or ``ours:turn_aware``."""
    bound: Floats
    true: Floats
    equal: bool = False

    def violations(self) -> int:
        """Number of cases that violate the statement by more than rounding. A nan is a violation."""
        bound, true = np.broadcast_arrays(self.bound, self.true)
        with np.errstate(invalid="ignore"):  # inf - inf
            gap = np.abs(bound - true) if self.equal else true - bound
        holds = np.isfinite(bound) & np.isfinite(true) & (gap <= TOLERANCE * (1.0 + np.abs(bound))) | (bound == true)
        if not self.equal:
            holds |= (bound == np.inf) & ~np.isnan(true) | (true == -np.inf) & ~np.isnan(bound)
        return int((~holds).sum())

    def ratios(self) -> Floats:
        """bound / true wherever the true value is above 1e-12; 1 is tight."""
        bound, true = np.broadcast_arrays(self.bound, self.true)
        counted = true > 1e-12
        return np.asarray(bound[counted] / true[counted], dtype=np.float64)


@dataclass(frozen=True)
class Draw:
    """The input of a check: one batch of ``size`` random cases.

    ``rng`` belongs to this check and this batch alone. The two stages hold ``size`` random teams each, with their
    intermediate teams; all teams of a batch have one shape. What teams compute (values, occupancies) is computed once
    and shared by the checks.
    """

    rng: np.random.Generator
    size: int
    discounted: DiscountedStage
    episodic: EpisodicStage


Check = Callable[[Draw], Iterable[Outcome]]
