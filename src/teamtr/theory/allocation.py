"""Allocation of a KL budget among the steps of a stage, and the order of the steps (app:tightness).

app:tightness correctly says that equal radii *maximize* the penalty sum of sqrt(delta_i) under a fixed total. That
alone is no argument against them, because the gain of a step also grows like the root of its radius. What counts is the
difference, which is negative for gamma >= 1/2 by the paper's own bound, so that its best allocation is zero. With a
certificate whose penalty is of second order there is a real trade-off, which ``best_radii`` solves exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats

OrderKind = Literal["fixed", "reverse", "random", "largest_gain"]


def equal_radii(total: float, steps: int) -> Floats:
    """total / n for each step."""
    _budget("equal_radii", total)
    if steps < 1:
        raise ValueError(f"equal_radii: a stage has at least one step, got {steps}")
    return np.full(steps, total / steps)


def proportional_radii(gains_I: ArrayLike, total: float) -> Floats:
    """Radii in proportion to the gain observed at each step (app:tightness); losses count as no gain.

    Equal radii if no step gained.
    """
    _budget("proportional_radii", total)
    gains = np.maximum(np.asarray(gains_I, dtype=np.float64), 0.0)
    if gains.ndim != 1 or gains.size == 0 or not np.isfinite(gains).all():
        raise ValueError("proportional_radii: one finite gain per step is needed")
    if gains.sum() == 0.0:
        return equal_radii(total, gains.size)
    return np.asarray(total * (gains / gains.sum()))


@dataclass(frozen=True)
class Allocation:
    """Radii, the bound they certify (each step's part in ``parts_I``), and the marginal value of the budget.

    ``price`` is d bound / d total at the optimum, the multiplier of the budget: 0 if not all of it is used.
    """

    radii_I: Floats
    parts_I: Floats
    price: Floats

    @property
    def bound(self) -> Floats:
        return np.asarray(self.parts_I.sum(axis=-1))


def certified_parts(
    radii_I: ArrayLike,
    kappa_I: ArrayLike,
    curvature_I: ArrayLike = 0.0,
    penalty_I: ArrayLike = 0.0,
    cubic_I: ArrayLike = 0.0,
) -> Floats:
    """(kappa - c) sqrt(delta) - a delta - e delta^(3/2) for each step.

    ``kappa_I``: gain per root of the radius (lem:lin-quad). ``penalty_I``: the first-order occupancy penalty c, the
    paper's sqrt(2) gamma A_max / (1 - gamma)^2 or 0 for an agent that speaks once. ``curvature_I``: the terms linear in
    the radius, that is the smoothness price a of thm:info-lower-stage plus any second-order occupancy penalty.
    ``cubic_I``: the KL-Fisher remainder.
    """
    radii, kappa, a, c, e = _floats(radii_I, kappa_I, curvature_I, penalty_I, cubic_I)
    return (kappa - c) * np.sqrt(radii) - a * radii - e * radii**1.5


def best_radii(
    kappa_I: ArrayLike,
    total: ArrayLike,
    *,
    curvature_I: ArrayLike = 0.0,
    penalty_I: ArrayLike = 0.0,
    cubic_I: ArrayLike = 0.0,
    caps_I: ArrayLike = np.inf,
) -> Allocation:
    """The radii that maximize the sum of ``certified_parts`` with sum of radii <= total and radii <= caps, exactly.

    A step with kappa <= c cannot gain and gets 0. The others are concave in their radius, so the KKT conditions are
    sufficient: with the budget's price l, and x = sqrt(delta), b = kappa - c,

        b / (2x) - a - 3/2 e x = l,   x(l) = b / ((a + l) + sqrt((a + l)^2 + 3 e b)),   or the cap if that is smaller.

    The total of x(l)^2 decreases in l. If it is within the budget at l = 0 (curvature alone limits the steps), that is
    the solution; otherwise the l that spends the budget is found by bisection to the last bit (water-filling). With
    a = e = 0 delta_i is proportional to b_i^2. The last axis is steps; axes before it are separate stages.
    """
    (budget,) = _floats(total)
    _budget("best_radii", budget)
    kappa, a, c, e, caps = np.broadcast_arrays(*_floats(kappa_I, curvature_I, penalty_I, cubic_I, caps_I))
    if kappa.ndim == 0 or not np.isfinite(kappa).all():
        raise ValueError("best_radii: one finite kappa per step is needed")
    if not ((a >= 0).all() and (e >= 0).all() and (caps >= 0).all()):
        raise ValueError(
            "best_radii: curvature, cubic term and caps must be at least 0: only then is the bound concave"
        )
    b = np.maximum(kappa - c, 0.0)

    def radii(price: Floats) -> Floats:
        slope = a + price[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 where b = 0; b / 0 = inf, which a cap may cut
            root = np.where(b > 0, b / (slope + np.sqrt(slope**2 + 3.0 * e * b)), 0.0)
        return np.minimum(root**2, caps)

    zero = np.zeros(np.broadcast_shapes(b.shape[:-1], budget.shape))
    spent = radii(zero).sum(axis=-1) > budget
    with np.errstate(divide="ignore", invalid="ignore"):
        most = b.max(axis=-1) * np.sqrt(b.shape[-1] / budget)  # at this price no radius exceeds budget / n
    low, high = zero, np.where(spent, most, 0.0)
    while True:
        middle = 0.5 * (low + high)
        if not ((low < middle) & (middle < high)).any():
            break
        over = radii(middle).sum(axis=-1) > budget
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    chosen = np.where((budget > 0)[..., None], radii(high), 0.0)
    return Allocation(chosen, certified_parts(chosen, kappa, a, c, e), high)


def update_order(
    kind: OrderKind,
    agents: int,
    *,
    rng: np.random.Generator | None = None,
    expected_gains_A: ArrayLike | None = None,
) -> tuple[int, ...]:
    """The order sigma of a stage as agent numbers: fixed, reverse, random, or largest expected gain first.

    The bounds hold for every order (thm:stage) but their surrogates depend on it. "largest_gain" is greedy: an early
    step changes the states of all later ones, so the step with the largest expected gain is taken while the
    expectation still holds; equal gains keep the fixed order. An expected gain may be kappa_i sqrt(delta_i), or the
    agent's last measured gain.
    """
    if agents < 1:
        raise ValueError(f"update_order: a team has at least one agent, got {agents}")
    match kind:
        case "fixed":
            return tuple(range(agents))
        case "reverse":
            return tuple(range(agents))[::-1]
        case "random":
            if rng is None:
                raise ValueError("update_order: a random order needs a generator (teamtr.randomness.generator)")
            return tuple(int(k) for k in rng.permutation(agents))
        case "largest_gain":
            gains = np.asarray(expected_gains_A, dtype=np.float64)
            if gains.shape != (agents,) or not np.isfinite(gains).all():
                raise ValueError(f"update_order: largest_gain needs a finite expected gain of each of {agents} agents")
            return tuple(int(k) for k in np.argsort(-gains, kind="stable"))
    raise ValueError(f"update_order: unknown order {kind!r}: use fixed, reverse, random or largest_gain")


def _budget(where: str, total: ArrayLike) -> None:
    if not (np.isfinite(total) & (np.asarray(total) >= 0)).all():
        raise ValueError(f"{where}: the total budget must be a number of nats of at least 0, got {np.asarray(total)}")


def _floats(*values: ArrayLike) -> tuple[Floats, ...]:
    return tuple(np.asarray(value, dtype=np.float64) for value in values)
