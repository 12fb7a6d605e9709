"""Growth with n as a power of n, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.types import Floats

ZERO = 1e-12
"""Below this a measured sum is rounding."""


@dataclass(frozen=True)
class PowerLaw:
    """value ~ n^exponent by least squares on logarithms, with a 95 % interval from redrawing the repetitions."""

    exponent: float
    low: float
    high: float

    def text(self) -> str:
        return f"{self.exponent:.2f} [{self.low:.2f}, {self.high:.2f}]"


def fit_power_law(n: Sequence[int], values_NR: Floats, rng: np.random.Generator, draws: int = 1000) -> PowerLaw | None:
    """Fit the means over repetitions (R) against n; None when a mean is zero, which no power law is.

    The repetitions of different n are independent, so each n redraws its own.
    """
    values = np.asarray(values_NR, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != len(n) or len(n) < 2:
        raise ValueError(f"fit_power_law: a row of repetitions for each of at least two n, got {values.shape}")
    means = values.mean(axis=1)
    if (means <= ZERO).any():
        return None
    picks = rng.integers(values.shape[1], size=(draws, *values.shape))
    redrawn_DN = np.take_along_axis(values[None], picks, axis=2).mean(axis=2)
    exponents = slope(n, np.maximum(redrawn_DN, ZERO))
    low, high = np.quantile(exponents, [0.025, 0.975])
    return PowerLaw(float(slope(n, means)), float(low), float(high))


def slope(n: Sequence[int], values_N: Floats) -> Floats:
    """Least squares of log(values) against log(n), along the last axis."""
    x = np.log(np.asarray(n, dtype=np.float64))
    x = x - x.mean()
    return np.asarray((np.log(values_N) @ x) / (x @ x))
