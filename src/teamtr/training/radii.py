"""Splits a stage's trust region among its agents, according to the gain of each agent's last update."""

from __future__ import annotations

from collections.abc import Mapping

from teamtr.presets import Radii
from teamtr.reports import UpdateReport
from teamtr.theory.allocation import best_radii, equal_radii, proportional_radii
from teamtr.theory.certificates import turn_aware_price

KEPT_EQUAL = 0.1
"""The share of a stage's total that is split equally, so that an agent without a gain can still move."""


def shared_radii(
    radii: Radii, past: Mapping[str, UpdateReport], turns: Mapping[str, int], reward_range: float
) -> dict[str, float]:
    """A radius for each agent of ``turns``, in nats, from its last update; see ``presets.Radii``."""
    names, count = list(turns), len(turns)
    total = (1 - KEPT_EQUAL) * radii.nats * count
    ours = [past[name].certificate("turn_aware") for name in names]
    gains = [float(found.terms["surrogate"]) if found else 0.0 for found in ours]
    shares = proportional_radii(gains, total)
    if any(found is None for found in ours) or max(gains) <= 0.0:
        shares = equal_radii(total, count)  # a certificate is missing, or no agent gained
    elif radii.allocation == "certified":
        used = [max(past[name].kl_full, 1e-12) for name in names]
        prices = [turn_aware_price(turns[name], reward_range) for name in names]
        kappas = [gain / used_kl**0.5 for gain, used_kl in zip(gains, used, strict=True)]
        shares = best_radii(kappas, total, curvature_I=prices).radii_I
    return {name: float(KEPT_EQUAL * radii.nats + share) for name, share in zip(names, shares, strict=True)}
