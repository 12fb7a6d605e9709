"""Crossed advantages: an agent's messages are evaluated with the others' messages of every episode of the group.

In G episodes of one problem in which an agent neither reads the others nor is read by them, any of its messages and any
of theirs form a valid episode of the same team. Let R[g, k] be the return of its messages of episode g with theirs of
episode k. The mean of R[g, k] over k estimates E[R | messages g] with less noise, because all messages are compared
against the same messages of the others. Every R[g, k] has the expectation of a played episode with these messages (k
may be g), so the estimate of the gradient has the same expectation for every baseline that does not depend on g; its
variance is smaller (tests/statistical/test_crossed_gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from teamtr.theory.advantages import Advantages
from teamtr.types import Floats


def crossed_means_PG(returns_PGG: Floats, weights_PG: Floats) -> Floats:
    """The mean return of each episode's messages over the others' messages, those of episode k weighted by
    ``weights_PG[:, k]`` (``theory.weights``); the plain mean if all of a problem's weights are 0."""
    totals_P1 = weights_PG.sum(axis=1, keepdims=True)
    shares_PG = np.where(totals_P1 > 0.0, weights_PG, 1.0)
    return np.asarray((returns_PGG * shares_PG[:, None, :]).sum(axis=2) / shares_PG.sum(axis=1, keepdims=True))


def crossed_advantages(
    estimate: Callable[[Floats, Floats | None], Advantages], returns_PGG: Floats, weights_PG: Floats
) -> Advantages:
    """The mean over k of the advantage of messages g with the others of episode k, where all G x G episodes of a
    problem are one group for ``estimate``.

    Its deviation is that of the team's returns, as in a plain group, and not that of their means: advantages stay small
    in a group in which the agent's messages hardly matter. A mean over k of normalized advantages keeps the bound of a
    plain group, sqrt(G - 1), because the means over k have at most the variance of all returns.
    """
    problems, g, _ = returns_PGG.shape
    spread_PGG = np.broadcast_to(weights_PG[:, None, :], returns_PGG.shape)
    found = estimate(returns_PGG.reshape(problems, g * g), spread_PGG.reshape(problems, g * g))
    values_PG, raw_PG = (
        (each.reshape(returns_PGG.shape) * spread_PGG).mean(axis=2) for each in (found.values_PG, found.raw_PG)
    )
    # Messages that all earn the same have no signal, however much the others' messages matter.
    equal_P = (returns_PGG == returns_PGG[:, :1, :]).all(axis=(1, 2))
    informative_P = found.informative_P & ~equal_P
    return replace(
        found,
        values_PG=np.where(informative_P[:, None], values_PG, 0.0),
        raw_PG=np.where(informative_P[:, None], raw_PG, 0.0),
        informative_P=informative_P,
    )
