"""Certificates against the true gains of updates (fig:tr-cert): rank correlation and violation rate.

An update's gain is exact if the task has a closed form, otherwise measured on the next batch of the same problems, with
an interval. A certificate is violated if the whole interval of the gain lies below it.

A certificate bounds the gain of a step from the team that wrote its batch. If an earlier update has changed the team
since (a plan that reuses rollouts, or updates all agents together), it does not apply to the step that was made: no
certificate is issued then, and those in older logs are neither judged nor counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from teamtr.records import Record, accepted, mapping, mappings, number, whole
from teamtr.types import Floats


@dataclass(frozen=True)
class Gain:
    """The gain of one update, in units of reward; the interval of an exact gain has width 0."""

    estimate: float
    lower: float
    upper: float
    exact: bool


@dataclass(frozen=True)
class Tracking:
    """One kind of certificate over the updates for which both the certificate and the gain are known."""

    kind: str
    updates: tuple[int, ...]
    bounds: tuple[float, ...]
    gains: tuple[Gain, ...]
    rank_correlation: float | None
    violations: int
    positive: int
    not_applicable: int
    """Accepted steps from stale batches; older logs have certificates for them."""

    @property
    def violation_rate(self) -> float | None:
        return self.violations / len(self.updates) if self.updates else None


def gains(updates: Sequence[Record]) -> dict[int, Gain]:
    """The gain of each update, by its number; exact gains take precedence."""
    found: dict[int, Gain] = {}
    for record in updates:
        measured = mapping(record, "measured_before")
        ours = whole(measured, "update")
        estimate, lower, upper = (number(measured, key) for key in ("estimate", "lower", "upper"))
        if ours is not None and estimate is not None and lower is not None and upper is not None:
            found[ours] = Gain(estimate, lower, upper, exact=False)
    for record in updates:
        pair, ours = record.get("exact_success"), whole(record, "update")
        if ours is not None and isinstance(pair, list | tuple) and len(pair) == 2:
            before, after = number({"x": pair[0]}, "x"), number({"x": pair[1]}, "x")
            if before is not None and after is not None:
                found[ours] = Gain(after - before, after - before, after - before, exact=True)
    return found


def stale_updates(updates: Sequence[Record]) -> frozenset[int]:
    """The updates trained on a batch of another team than the one they updated, from the log alone.

    Either nothing was sampled since the previous update and an update since the last sampling changed an agent, or the
    batch was partly redrawn from an older team's.
    """
    stale, changed, before = set(), False, None
    for update in updates:
        total, ours = whole(update, "sampled_tokens_total"), whole(update, "update")
        reused = total is not None and total == before and whole(update, "step") != 0
        changed = (changed and reused) or mapping(update, "rollouts").get("action") == "redraw"
        if changed and ours is not None:
            stale.add(ours)
        changed = changed or (accepted(update) and update.get("version_before") != update.get("version_after"))
        before = total
    return frozenset(stale)


def certificate_tracking(updates: Sequence[Record], *, rounding: float = 1e-9) -> dict[str, Tracking]:
    """Every kind of certificate in the log against the gains."""
    known, stale = gains(updates), stale_updates(updates)
    rows: dict[str, list[tuple[int, float]]] = {}
    passed = sum(accepted(record) and whole(record, "update") in stale for record in updates)
    for record in updates:
        ours = whole(record, "update")
        for certificate in mappings(record, "certificates"):
            kind, bound = str(certificate.get("kind")), number(certificate, "lower_bound")
            if ours is None or bound is None:
                continue
            judged = rows.setdefault(kind, [])
            if ours not in stale and ours in known:
                judged.append((ours, bound))
    return {kind: _tracking(kind, rows[kind], known, passed, rounding) for kind in rows}


def _tracking(
    kind: str, pairs: Sequence[tuple[int, float]], known: Mapping[int, Gain], passed: int, rounding: float
) -> Tracking:
    gained = [known[update] for update, _ in pairs]
    bounds = [bound for _, bound in pairs]
    return Tracking(
        kind=kind,
        updates=tuple(update for update, _ in pairs),
        bounds=tuple(bounds),
        gains=tuple(gained),
        rank_correlation=rank_correlation(bounds, [gain.estimate for gain in gained]),
        violations=sum(gain.upper < bound - rounding for gain, bound in zip(gained, bounds, strict=True)),
        positive=sum(bound > 0.0 for bound in bounds),
        not_applicable=passed,
    )


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank. None with fewer than three pairs or without spread."""
    a, b = _ranks(np.asarray(first, dtype=np.float64)), _ranks(np.asarray(second, dtype=np.float64))
    if len(a) != len(b):
        raise ValueError(f"rank_correlation pairs values, got {len(a)} and {len(b)}")
    if len(a) < 3 or a.std() == 0.0 or b.std() == 0.0:
        return None
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[inverse], dtype=np.float64)
