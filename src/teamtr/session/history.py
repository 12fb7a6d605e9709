"""What a run has done so far, kept in memory and extended with every record.

Everything that decisions depend on (each agent's last update, the updates of the current stage, results of evaluations)
is part of every commit. The log says which stages have their report, and what was evaluated since the last commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from teamtr.evaluation.best import are_comparable
from teamtr.records import (
    AnyRecord,
    EvalRecord,
    StageRecord,
    SwapRecord,
    UpdateRecord,
    decode_record,
    decode_report,
    encode_record,
    encode_report,
)
from teamtr.reports import HeldOut, UpdateReport
from teamtr.store import StoreError


class History:
    """What later stages depend on. Of the updates, each agent's last one and those of the newest stage are kept."""

    def __init__(self, records: Iterable[AnyRecord] = ()) -> None:
        self.updates = 0
        """The number of the last update."""
        self.closed: set[int] = set()
        """Stages whose report is logged."""
        self.evaluated: set[int] = set()
        """Stages before which the team was evaluated."""
        self.success: list[float] = []
        """Success of every evaluation, in order."""
        self.held_out: list[HeldOut] = []
        """Evaluations of this run's checkpoints on the newest problems, in order. Those before a swap belong to another
        run."""
        self._asked: tuple[str, ...] = ()
        self._since = 0  # the stage of the first evaluation that counts
        self._newest: list[UpdateRecord] = []
        self._earlier: dict[str, UpdateReport] = {}
        for record in records:
            self.add(record)

    def as_state(self) -> dict[str, Any]:
        """The part of the history that a commit holds."""
        return {
            "earlier": {name: encode_report(report) for name, report in self._earlier.items()},
            "newest": [encode_record(update) for update in self._newest],
            "held_out": [asdict(found) for found in self.held_out],
        }

    def take_state(self, state: Mapping[str, Any], last: AnyRecord | None) -> None:
        """Replace the updates from the log with those in a commit, and add the commit's own.

        Raises StoreError if the commit's state is malformed.
        """
        try:
            self._earlier = {name: decode_report(report) for name, report in state["earlier"].items()}
            newest = [decode_record(found) for found in state["newest"]]
            self._know_of([_held_out(found) for found in state.get("held_out", ())])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(
                f"the newest commit does not hold the updates before it ({error!r:.200}): restore its folder from a "
                "copy, or remove it"
            ) from error
        self._newest = [update for update in newest if isinstance(update, UpdateRecord)]
        if last is not None:
            self.add(last)

    def _know_of(self, evaluated: Sequence[HeldOut]) -> None:
        """Add evaluations that a commit holds and the log may have lost: the best checkpoint must not depend on
        that."""
        known = {found.stage for found in self.held_out}
        lost = [found for found in evaluated if found.stage not in known and found.stage >= self._since]
        self.held_out = sorted([*lost, *self.held_out], key=lambda found: (found.updates, found.stage))
        self.evaluated |= {found.stage for found in lost}

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
                asked = record.report.problem_ids
                if not are_comparable(asked, self._asked):
                    self.held_out, self._since = [], record.stage
                self._asked = asked
                self.held_out.append(HeldOut(record.updates, record.stage, record.report.avg_at_k))
            case SwapRecord():
                self.held_out = []
                self.evaluated.clear()  # that was another team

    def last_updates(self, before_stage: int) -> dict[str, UpdateReport]:
        """Each agent's last update before this stage, which must be the newest stage or a later one."""
        newest = [update.report for update in self._newest if update.stage < before_stage]
        return self._earlier | {report.agent: report for report in newest}

    def of_stage(self, stage: int) -> Sequence[UpdateRecord]:
        """The updates of this stage, which must be the newest or a later one."""
        return [update for update in self._newest if update.stage == stage]


def _held_out(found: Mapping[str, Any]) -> HeldOut:
    return HeldOut(int(found["updates"]), int(found["stage"]), float(found["success"]))
