"""Fits of growth as a power of n, with an interval, and detection of the n at which the power changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.types import Floats

ZERO = 1e-12
"""A measured sum below this is rounding error."""


@dataclass(frozen=True)
class PowerLaw:
    """value ~ n^exponent by least squares on logarithms, with a 95 % interval by bootstrap over repetitions."""

    exponent: float
    low: float
    high: float

    def text(self) -> str:
        return f"{self.exponent:.2f} [{self.low:.2f}, {self.high:.2f}]"


def fit_power_law(
    n: Sequence[float], values_NR: Floats, rng: np.random.Generator, draws: int = 1000
) -> PowerLaw | None:
    """Fit the means over repetitions (R) against n; None if a mean is zero, which no power law fits.

    The repetitions of different n are independent, so they are resampled separately for each n.
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


def slope(n: Sequence[float], values_N: Floats) -> Floats:
    """Least squares of log(values) against log(n), along the last axis."""
    x = np.log(np.asarray(n, dtype=np.float64))
    x = x - x.mean()
    return np.asarray((np.log(values_N) @ x) / (x @ x))


@dataclass(frozen=True)
class Bend:
    """Growth with power ``before`` up to n = ``at`` and power ``after`` from there on."""

    at: float
    before: float
    after: float


def find_bend(n: Sequence[float], values_N: Floats, least: float = 0.25) -> Bend | None:
    """The piecewise linear fit of log(values) with a bend at one of the inner n, by least squares.

    ``n`` must increase. None if the two powers differ by less than ``least``, or with fewer than four n, which such a
    line always fits exactly.
    """
    x, y = np.log(np.asarray(n, dtype=np.float64)), np.log(np.asarray(values_N, dtype=np.float64))
    if len(n) < 4:
        return None
    found: list[tuple[float, Bend]] = []
    for place in range(1, len(n) - 1):
        columns = np.stack([np.ones_like(x), x, np.maximum(x - x[place], 0.0)], axis=1)
        fitted = np.linalg.lstsq(columns, y, rcond=None)[0]
        missed = float(np.square(columns @ fitted - y).sum())
        found.append((missed, Bend(n[place], float(fitted[1]), float(fitted[1] + fitted[2]))))
    _, bend = min(found, key=lambda one: one[0])
    return bend if abs(bend.after - bend.before) >= least else None
