"""Block verification: how much of an older policy's message may be kept as a sample of the new policy.

The old policy's message x_1 ... x_L is a draft, as in speculative decoding. Position i passes with probability h_i, and
the draft is kept up to the last position that passes. If that is not all of it, the next token is drawn from the
residual distribution below, and the new policy continues from there. The result has exactly the new policy's
distribution, and more of the draft is kept on average than by checking token by token (Sun et al., Block Verification
Accelerates Speculative Decoding, arXiv 2403.10444).

With p the old and q the new probabilities and p_0 = 1::

    p_i = min(1, p_(i-1) q(x_i | x_<i) / p(x_i | x_<i))
    r_i = sum over tokens y of max(0, p_i q(y | x_<=i) - p(y | x_<=i))
    h_i = r_i / (r_i + 1 - p_i)  for i < L,    h_L = p_L

and the next token after i kept ones has probabilities max(0, p_i q - p) / r_i. A message that ended early is treated as
one of full length whose rest is certain under both policies, which changes none of these probabilities.

It is exact for drafts that are independent of the new policy. Drafts that the update was trained on bias it: the update
has moved towards some of them, and more of those is kept than should be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from teamtr.types import Floats


def chance_so_far(log_ratio_L: Floats) -> Floats:
    """p_0 ... p_L from the log-ratios log q - log p of a message's tokens.

    The logarithm is a walk reflected at zero: the cumulative sum minus its running maximum.
    """
    walk = np.concatenate([[0.0], np.cumsum(log_ratio_L)])
    return np.asarray(np.exp(walk - np.maximum.accumulate(walk)))


def kept_tokens(chance_L1: Floats, rest_L: Floats, noise_L: Floats) -> int:
    """The number of tokens to keep.

    Args:
        chance_L1: p_0 ... p_L.
        rest_L: r_0 ... r_(L-1).
        noise_L: uniform numbers in [0, 1), one for each token.
    """
    length = len(rest_L)
    if length == 0:
        return 0
    with np.errstate(invalid="ignore"):
        checks_L = np.append(rest_L[1:] / (rest_L[1:] + (1.0 - chance_L1[1:-1])), chance_L1[-1])
    checks_L = np.where(np.isnan(checks_L), 1.0, checks_L)  # 0 / 0: the two policies agree from here on
    passed: NDArray[np.int64] = np.flatnonzero(noise_L < checks_L)
    return int(passed[-1]) + 1 if len(passed) else 0
