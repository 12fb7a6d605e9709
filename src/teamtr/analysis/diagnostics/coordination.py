"""Coordination: how often every agent that states an answer states the right one (tab:ablation, Coord.)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teamtr.records import Record, number, whole


@dataclass(frozen=True)
class Coordination:
    """One evaluation. ``alone`` is success minus consensus: the share of right episodes without consensus."""

    stage: int
    success: float
    consensus: float

    @property
    def alone(self) -> float:
        return max(self.success - self.consensus, 0.0)


def coordination(evals: Sequence[Record]) -> tuple[Coordination, ...]:
    """The evaluations that recorded the agents' stated answers."""
    found = []
    for record in evals:
        stage, success = whole(record, "stage"), number(record, "avg_at_k")
        consensus = number(record, "consensus_on_correct")
        if stage is not None and success is not None and consensus is not None:
            found.append(Coordination(stage, success, consensus))
    return tuple(found)
