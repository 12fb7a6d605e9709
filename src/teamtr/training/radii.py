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
        used = [_used(past[name], radii) for name in names]
        # What a nat of the radius costs: a radius per token allows a message more, the longer it is.
        prices = [
            turn_aware_price(turns[name], reward_range) * _used(past[name]) / used_kl
            for name, used_kl in zip(names, used, strict=True)
        ]
        kappas = [gain / used_kl**0.5 for gain, used_kl in zip(gains, used, strict=True)]
        shares = best_radii(kappas, total, curvature_I=prices).radii_I
    return {name: float(KEPT_EQUAL * radii.nats + share) for name, share in zip(names, shares, strict=True)}


def _used(report: UpdateReport, radii: Radii | None = None) -> float:
    """The KL that an update used: per message, or in the unit of these radii."""
    return max(report.kl_per_token if radii is not None and radii.per_token else report.kl_full, 1e-12)
