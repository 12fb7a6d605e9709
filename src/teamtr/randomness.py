"""Randomness is named: every draw comes from (seed, purpose, stage, step, ...), never from global state.

A run that was killed asks for the same names again and so gets the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose."""
    text = "\x1f".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.Generator(np.random.PCG64(seed_of(seed, *names)))
