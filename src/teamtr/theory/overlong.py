"""DAPO's soft overlong punishment of messages near their token limit (arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats


def cache_tokens(limit: int, cache: float) -> int:
    """The number of whole tokens in the last share ``cache`` (0 to 1) of a limit."""
    return int(cache * limit + 1e-9)


def soft_punishment(lengths_M: ArrayLike, limits_M: ArrayLike, cut_M: ArrayLike, cache: float) -> Floats:
    """The term that each message adds to the reward, from -1 to 0 (eq. 13 of DAPO).

    With the limit L and C = ``cache_tokens(L, cache)``: 0 up to L - C tokens, ((L - C) - length) / C beyond, and -1
    if the message was cut. The paper has L = 20480 and C = 4096, a fifth. If C is 0, only cut messages are punished.
    """
    lengths, limits, cut = np.asarray(lengths_M), np.asarray(limits_M), np.asarray(cut_M, dtype=np.bool_)
    if not lengths.shape == limits.shape == cut.shape:
        raise ValueError(
            f"soft_punishment: one length, limit and mark per message, got {lengths.shape}, {limits.shape}, {cut.shape}"
        )
    if not 0.0 < cache <= 1.0:
        raise ValueError(f"soft_punishment: cache is a share of the limit above 0 and up to 1, got {cache}")
    cache_M = np.array([cache_tokens(int(limit), cache) for limit in limits.reshape(-1)]).reshape(limits.shape)
    beyond_M = np.maximum(lengths - (limits - cache_M), 0)
    soft_M = np.where(cache_M > 0, beyond_M / np.maximum(cache_M, 1), 0.0)
    return np.asarray(0.0 - np.where(cut, 1.0, np.minimum(soft_M, 1.0)), dtype=np.float64)
