"""What a stage begins and ends with, from the log: the radii that its agents get, and what its updates were worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from teamtr.presets import Radii
from teamtr.theory.allocation import best_radii, equal_radii, proportional_radii
from teamtr.theory.certificates import add_up, turn_aware_price
from teamtr.types import Certificate, StageReport

KEPT_EQUAL = 0.1
"""The share of a stage's total that is equal for all: an agent that gained nothing can still move."""


def shared_radii(
    radii: Radii, past: Mapping[str, Mapping[str, Any]], turns: Mapping[str, int], reward_range: float
) -> dict[str, float]:
    """A radius for each agent of ``turns``, in nats, from the record of its last update; see ``presets.Radii``."""
    names, count = list(turns), len(turns)
    total = (1 - KEPT_EQUAL) * radii.nats * count
    ours = [{c["kind"]: c["terms"] for c in past[name]["certificates"]}.get("turn_aware") for name in names]
    gains = [terms["surrogate"] if terms else 0.0 for terms in ours]
    shares = proportional_radii(gains, total)
    if any(terms is None for terms in ours) or max(gains) <= 0.0:
        shares = equal_radii(total, count)  # nothing speaks for any of them
    elif radii.allocation == "certified":
        used = [max(past[name]["kl_full"], 1e-12) for name in names]
        prices = [turn_aware_price(turns[name], reward_range) for name in names]
        kappas = [gain / used_kl**0.5 for gain, used_kl in zip(gains, used, strict=True)]
        shares = best_radii(kappas, total, curvature_I=prices).radii_I
    return {name: float(KEPT_EQUAL * radii.nats + share) for name, share in zip(names, shares, strict=True)}


def stage_report(stage: int, updates: Sequence[Mapping[str, Any]]) -> StageReport:
    """Add up the certificates of a stage's updates, and the gains that later batches measured."""
    certificates = {
        r["update"]: {c["kind"]: Certificate(c["kind"], c["terms"], c["lower_bound"]) for c in r["certificates"]}
        for r in updates
    }
    by_kind: dict[str, list[Certificate]] = {}
    for found in certificates.values():
        for kind, certificate in found.items():
            by_kind.setdefault(kind, []).append(certificate)
    measured = [r["measured_before"] for r in updates if r["measured_before"] is not None]
    certified = [certificates.get(m["update"], {}).get("turn_aware") for m in measured]
    return StageReport(
        stage=stage,
        steps=len(updates),
        accepted=sum(r["outcome"].startswith("accepted") for r in updates),
        certificates=tuple(add_up(found) for found in by_kind.values()),
        measured=sum(m["estimate"] for m in measured) if measured else None,
        certified_of_measured=sum(float(c.lower_bound) for c in certified if c is not None) if measured else None,
    )
