"""What a run has done so far, kept in memory and added to with every record.

What decides anything (each agent's last update, and those of the stage in progress) is part of every commit; the log
only says which stages have their report and their evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from teamtr.records import (
    AnyRecord,
    EvalRecord,
    StageRecord,
    UpdateRecord,
    decode_record,
    decode_report,
    encode_record,
    encode_report,
)
from teamtr.reports import UpdateReport
from teamtr.store import StoreError


class History:
    """What later stages depend on. Of the updates, the last of each agent and those of the newest stage are kept."""

    def __init__(self, records: Iterable[AnyRecord] = ()) -> None:
        self.updates = 0
        """The number of the last update."""
        self.closed: set[int] = set()
        """Stages that have their report."""
        self.evaluated: set[int] = set()
        """Stages before which the team was evaluated."""
        self.success: list[float] = []
        """Of every evaluation, in order."""
        self._newest: list[UpdateRecord] = []
        self._earlier: dict[str, UpdateReport] = {}
        for record in records:
            self.add(record)

    def as_state(self) -> dict[str, Any]:
        """What a commit holds of it."""
        return {
            "earlier": {name: encode_report(report) for name, report in self._earlier.items()},
            "newest": [encode_record(update) for update in self._newest],
        }

    def take_state(self, state: Mapping[str, Any], last: AnyRecord | None) -> None:
        """Put the updates that a commit holds, and its own, in the place of those that the log has.

        Raises StoreError where the commit holds something else.
        """
        try:
            self._earlier = {name: decode_report(report) for name, report in state["earlier"].items()}
            newest = [decode_record(found) for found in state["newest"]]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(
                f"the newest commit does not hold the updates before it ({error!r:.200}): restore its folder from a "
                "copy, or remove it"
            ) from error
        self._newest = [update for update in newest if isinstance(update, UpdateRecord)]
        if last is not None:
            self.add(last)

    def add(self, record: AnyRecord) -> None:
        match record:
            case UpdateRecord():
                if self._newest and self._newest[0].stage != record.stage:
                    self._earlier = self.last_updates(record.stage)
                    self._newest = []
                self._newest.append(record)
                self.updates = max(self.updates, record.update)
            case StageRecord():
                self.closed.add(record.report.stage)
            case EvalRecord():
                self.evaluated.add(record.stage)
                self.success.append(record.report.avg_at_k)

    def last_updates(self, before_stage: int) -> dict[str, UpdateReport]:
        """Each agent's last update before this stage, which is the newest or a later one."""
        newest = [update.report for update in self._newest if update.stage < before_stage]
        return self._earlier | {report.agent: report for report in newest}

    def of_stage(self, stage: int) -> Sequence[UpdateRecord]:
        """The updates of this stage, which is the newest or a later one."""
        return [update for update in self._newest if update.stage == stage]
