"""Controls that steer an update to its radius: penalty weight, backtracking, step scale, radius (app:impl, "Enforcing
the trust region").

All of them rest on one fact: near the old policy the KL grows like the square of the step (lem:klfisher, whose second
order is the same for either order of the arguments).
"""

from __future__ import annotations

import math


def adapt_beta(beta: float, kl: float, target: float, *, low: float = 1e-4, high: float = 100.0) -> float:
    """The penalty weight for the next update, the adaptive beta of eq:ppo_obj (the rule of PPO).

    Doubled if ``kl`` is above 1.5 * target (or not finite), halved if below target / 1.5, always within [low, high].
    The bounds are applied first, so a beta of 0, which doubling cannot change, counts as ``low``.
    """
    _require_positive("adapt_beta", target=target, low=low, high=high)
    beta = min(max(beta, low), high)
    if not kl <= 1.5 * target:  # also true for nan
        beta *= 2.0
    elif kl < target / 1.5:
        beta /= 2.0
    return min(max(beta, low), high)


def backoff_fraction(upper: float, radius: float, *, safety: float = 0.9) -> float:
    """The fraction of the line from the old to the tried parameters at which the bound becomes safety * radius.

    The KL grows like the square of the step, so it is sqrt(safety * radius / upper), below 1 whenever ``upper`` is
    outside the radius. Inside the radius it is 1. A bound that is not finite gives no distance: 0.5.
    """
    _require_positive("backoff_fraction", radius=radius, safety=safety)
    if safety >= 1.0:
        raise ValueError(f"backoff_fraction: safety must be below 1, or back-off may never end; got {safety}")
    if upper <= radius:
        return 1.0
    if not math.isfinite(upper):
        return 0.5
    return math.sqrt(safety * radius / upper)


def adapt_step_scale(
    scale: float, kl_reached: float, kl_target: float, *, slowest: float = 0.5, fastest: float = 2.0
) -> float:
    """The scale of the next update's steps, from the KL that this one's steps reached.

    scale * sqrt(target / reached), with the factor clamped to [slowest, fastest]. A KL of 0 (or below, from a sampled
    estimate) means that nothing moved, as with a learning rate of 0: the scale is kept, or it would double forever.
    For a KL that is not finite the factor is ``slowest``.
    """
    _require_positive("adapt_step_scale", scale=scale, kl_target=kl_target, slowest=slowest, fastest=fastest)
    if kl_reached <= 0.0:
        return scale
    if not math.isfinite(kl_reached):
        return scale * slowest
    return scale * min(max(math.sqrt(kl_target / kl_reached), slowest), fastest)


def adapt_radius(radius: float, kl_used: float, target: float, *, factor: float = 10.0) -> float:
    """The next radius, so that the KL actually used settles at ``target`` ("adaptive delta" of tab:ablation).

    Updates use some share of their radius, so the radius changes by sqrt(target / used), at most a factor of 2 at a
    time, and stays within [target / factor, target * factor]. The root halves the remaining error (in logs) each time;
    the plain quotient would follow the noise of one update. A KL of 0, as after an update that was restored or skipped,
    leaves the radius unchanged.
    """
    _require_positive("adapt_radius", radius=radius, target=target)
    if not factor >= 1.0:
        raise ValueError(f"adapt_radius: factor must be at least 1, got {factor}")
    moved = adapt_step_scale(radius, kl_used, target)
    return min(max(moved, target / factor), target * factor)


def _require_positive(function: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0.0:
            raise ValueError(f"{function}: {name} must be positive, got {value}")
