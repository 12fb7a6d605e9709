"""The report of a stage: the sums of its updates' certificates and measured gains."""

from __future__ import annotations

from collections.abc import Sequence

from teamtr.records import UpdateRecord
from teamtr.reports import Certificate, StageReport
from teamtr.theory.certificates import add_up


def stage_report(stage: int, updates: Sequence[UpdateRecord]) -> StageReport:
    """Sums the certificates of a stage's updates, and the gains measured on later batches.

    A sum is a bound only if every step that was kept has its certificate: what the others gained is not known.
    """
    kept = [update for update in updates if update.report.accepted]
    by_kind = {kind: _certificates(kept, kind) for kind in _kinds(kept)}
    gains = [update.measured_before for update in updates if update.measured_before is not None]
    measured = {gain.update for gain in gains}
    ours = _certificates([update for update in kept if update.update in measured], "turn_aware")
    certified = None if ours is None else sum(float(found.lower_bound) for found in ours)
    return StageReport(
        stage=stage,
        steps=len(updates),
        accepted=len(kept),
        certificates=tuple(add_up(found) for found in by_kind.values() if found is not None),
        measured=sum(gain.estimate for gain in gains) if gains else None,
        certified_of_measured=certified if gains else None,
    )


def _kinds(updates: Sequence[UpdateRecord]) -> Sequence[str]:
    return list(dict.fromkeys(found.kind for update in updates for found in update.report.certificates))


def _certificates(updates: Sequence[UpdateRecord], kind: str) -> list[Certificate] | None:
    """The certificates of this kind; None if an update has none."""
    found = [certificate for update in updates if (certificate := update.report.certificate(kind)) is not None]
    return found if len(found) == len(updates) else None
