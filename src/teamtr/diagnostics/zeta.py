"""Zeta proxies of a run (tab:zeta-proxy): how large the estimation term is beside the other terms of the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.diagnostics.records import Record, accepted, mapping, mappings, number

PARTS = ("zeta_norm", "zeta_clip", "zeta_ratio")


@dataclass(frozen=True)
class ZetaProxy:
    """Per update, in units of the normalised advantage; ``penalty_share`` is its mean part of what the paper's
    single-step certificate subtracts, None where none was logged."""

    updates: int
    mean: float
    p50: float
    p90: float
    penalty_share: float | None


def zeta_proxy(updates: Sequence[Record]) -> ZetaProxy | None:
    """Over the updates that were kept; None when there is none."""
    kept = [update for update in updates if accepted(update)]
    values = [sum(number(update, part) or 0.0 for part in PARTS) for update in kept]
    if not values:
        return None
    shares = [share for update in kept if (share := _penalty_share(update)) is not None]
    p50, p90 = np.quantile(values, [0.5, 0.9])
    mean_share = float(np.mean(shares)) if shares else None
    return ZetaProxy(len(values), float(np.mean(values)), float(p50), float(p90), mean_share)


def _penalty_share(update: Record) -> float | None:
    for certificate in mappings(update, "certificates"):
        if certificate.get("kind") == "single_step":
            terms = mapping(certificate, "terms")
            estimation, occupancy = number(terms, "estimation"), number(terms, "occupancy")
            if estimation is not None and occupancy is not None and estimation + occupancy < 0.0:
                return estimation / (estimation + occupancy)
    return None
