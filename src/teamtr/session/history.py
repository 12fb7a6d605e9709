"""What a run's log says so far, kept in memory: read once when a run goes on, and added to with every record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from teamtr.records import AnyRecord, EvalRecord, StageRecord, UpdateRecord
from teamtr.reports import UpdateReport


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
