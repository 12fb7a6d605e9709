"""The probes that a run logged (``diagnostics.every``), read back: stale gaps, weights, and which tokens moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.diagnostics.records import Record, mapping, number, whole


@dataclass(frozen=True)
class Probed:
    """One probed update. ``fresh`` and ``stale`` are its surrogate on the batch it learned from and on the stage's
    first; None at a stage's first step, where they are the same. ``weights`` and ``shift`` are as logged."""

    update: int
    stage: int
    step: int
    agent: str
    fresh: float | None
    stale: float | None
    weights: dict[str, float]
    shift: dict[str, Any] | None

    @property
    def gap(self) -> float | None:
        return None if self.fresh is None or self.stale is None else abs(self.fresh - self.stale)


def probed(updates: Sequence[Record]) -> tuple[Probed, ...]:
    """The updates that were probed, in order."""
    found = []
    for update in updates:
        probe = mapping(update, "probe")
        counted, stage, step = (whole(update, key) for key in ("update", "stage", "step"))
        if not probe or counted is None or stage is None or step is None:
            continue
        weights = mapping(probe, "weights")
        found.append(
            Probed(
                update=counted,
                stage=stage,
                step=step,
                agent=str(update.get("agent")),
                fresh=number(probe, "fresh"),
                stale=number(probe, "stale"),
                weights={key: value for key in weights if (value := number(weights, key)) is not None},
                shift=_shift(mapping(probe, "token_shift")),
            )
        )
    return tuple(found)


def stale_gap_by_stage(found: Sequence[Probed]) -> dict[int, float]:
    """Delta_stale of each probed stage: the sum of its steps' gaps (fig:occ-gap)."""
    gaps: dict[int, float] = {}
    for one in found:
        if one.gap is not None:
            gaps[one.stage] = gaps.get(one.stage, 0.0) + one.gap
    return gaps


def _shift(logged: Record) -> dict[str, Any] | None:
    """By rank before the update; None unless the three rows are lists of equal length."""
    rows = {key: logged.get(key) for key in ("before_R", "after_R", "moved_R")}
    if not all(isinstance(row, list) and row for row in rows.values()):
        return None
    if len({len(row) for row in rows.values() if isinstance(row, list)}) != 1:
        return None
    return {**rows, "flipped": number(logged, "flipped"), "positions": whole(logged, "positions")}
