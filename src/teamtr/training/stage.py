"""The report of a stage: the sums of its updates' certificates and measured gains."""

from __future__ import annotations

from collections.abc import Sequence

from teamtr.records import UpdateRecord
from teamtr.reports import Certificate, StageReport
from teamtr.theory.certificates import add_up


def stage_report(stage: int, updates: Sequence[UpdateRecord]) -> StageReport:
    """Sums the certificates of a stage's updates, and the gains measured on later batches."""
    by_kind: dict[str, list[Certificate]] = {}
    for update in updates:
        for certificate in update.report.certificates:
            by_kind.setdefault(certificate.kind, []).append(certificate)
    ours = {update.update: update.report.certificate("turn_aware") for update in updates}
    measured = [update.measured_before for update in updates if update.measured_before is not None]
    certified = [found for gain in measured if (found := ours.get(gain.update)) is not None]
    return StageReport(
        stage=stage,
        steps=len(updates),
        accepted=sum(update.report.accepted for update in updates),
        certificates=tuple(add_up(found) for found in by_kind.values()),
        measured=sum(gain.estimate for gain in measured) if measured else None,
        certified_of_measured=sum(float(found.lower_bound) for found in certified) if measured else None,
    )
