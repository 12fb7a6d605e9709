"""Advantages of words that were tried with all that the others said, not only with what they met.

Of G episodes of one problem in which an agent neither reads the others nor is read by them, any of its words and any of
theirs make an episode of the same team. Let R[g, k] be the return of its words of episode g with theirs of episode k.
Then the mean of R[g, k] over k estimates what words g are worth, E[R | words g], without the luck of whom they met: the
same others for all, so that two words differ by what they are worth with the same company. Every R[g, k] has the
expectation of a played episode with these words (k may be g), so the estimate of the gradient has the same expectation
for every baseline that does not depend on g; its variance is smaller (tests/statistical/test_crossed_gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from teamtr.theory.advantages import Advantages
from teamtr.types import Floats


def crossed_means_PG(returns_PGG: Floats, weights_PG: Floats) -> Floats:
    """What the words of each episode earn on average, where what the others said in episode k weighs
    ``weights_PG[:, k]`` (``theory.weights``); the plain mean where all of a problem's weights are 0."""
    totals_P1 = weights_PG.sum(axis=1, keepdims=True)
    shares_PG = np.where(totals_P1 > 0.0, weights_PG, 1.0)
    return np.asarray((returns_PGG * shares_PG[:, None, :]).sum(axis=2) / shares_PG.sum(axis=1, keepdims=True))


def crossed_advantages(
    estimate: Callable[[Floats, Floats | None], Advantages], returns_PGG: Floats, weights_PG: Floats
) -> Advantages:
    """The mean over k of the advantage of words g with the others of episode k, where all G x G episodes of a problem
    are one group for ``estimate``.

    Its deviation is that of the team's returns, as in a plain group, and not that of their means: a group in which
    words hardly matter stays small beside one in which they decide. A mean over k of normalized advantages keeps to the
    bound of a plain group, sqrt(G - 1): the means over k have at most the variance of all.
    """
    problems, g, _ = returns_PGG.shape
    spread_PGG = np.broadcast_to(weights_PG[:, None, :], returns_PGG.shape)
    found = estimate(returns_PGG.reshape(problems, g * g), spread_PGG.reshape(problems, g * g))
    values_PG, raw_PG = (
        (each.reshape(returns_PGG.shape) * spread_PGG).mean(axis=2) for each in (found.values_PG, found.raw_PG)
    )
    # Words that all earn the same teach nothing, however much the others' words change.
    equal_P = (returns_PGG == returns_PGG[:, :1, :]).all(axis=(1, 2))
    informative_P = found.informative_P & ~equal_P
    return replace(
        found,
        values_PG=np.where(informative_P[:, None], values_PG, 0.0),
        raw_PG=np.where(informative_P[:, None], raw_PG, 0.0),
        informative_P=informative_P,
    )
