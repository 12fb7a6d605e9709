"""Named randomness: every draw is seeded by (seed, purpose, stage, step, ...), never by global state.

A resumed run uses the same names and therefore gets the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose."""
    text = "\x1f".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.Generator(np.random.PCG64(seed_of(seed, *names)))


def resampled_range(
    values_P: NDArray[np.float64], confidence: float, *, draws: int, rng: np.random.Generator
) -> tuple[float, float]:
    """The bootstrap interval of the mean over problems, with equal tails."""
    count = len(values_P)
    # Only the number of times each problem is drawn matters: a multinomial needs no P x draws indices.
    times_DP = rng.multinomial(count, np.full(count, 1 / count), size=draws)
    tail = (1 - confidence) / 2
    low, high = np.quantile(times_DP @ values_P / count, [tail, 1 - tail])
    return float(low), float(high)


def uniforms(seed: int, rows: int, tokens: int) -> NDArray[np.float64]:
    """Noise for sampling: one number in [0, 1) per row and token.

    Row i depends only on the seed, i and the number of tokens, so rows may be batched and ordered in any way without
    changing the sampled tokens.
    """
    return np.random.default_rng(seed).random((rows, tokens))


def lengths_of(noise_BT: NDArray[np.float64]) -> list[int]:
    """The number of tokens that each row of a batch may have: behind its own end, a row is NaN."""
    return [int(count) for count in np.isfinite(noise_BT).sum(1)]


AT_ONCE = 4096
"""The number of values that take as long to draw as creating their generator."""


class RowNoise:
    """Rows of ``uniforms(seed, ...)``, computed without the rows before them. Rows are mostly requested in order, so
    neighbors are generated together, as many as cost hardly more than one."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.seed, self.tokens = seed, tokens
        self._together = max(1, AT_ONCE // max(1, tokens))
        self._block, self._made = -1, np.zeros((0, tokens))

    def __getitem__(self, row: int) -> NDArray[np.float64]:
        block, place = divmod(row, self._together)
        if block != self._block:
            numbers = np.random.PCG64(self.seed)
            numbers.advance(block * self._together * self.tokens)  # one generator step per number
            self._made = np.random.Generator(numbers).random((self._together, self.tokens))
            self._block = block
        found: NDArray[np.float64] = self._made[place]
        return found
