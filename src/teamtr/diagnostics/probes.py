"""The probes that a run logged (``diagnostics.every``), read back: stale gaps, weights, and which tokens moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.diagnostics.records import Record, mapping, mappings, number, numbers, whole


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


TokenKls = dict[tuple[int, int], list[float]]
"""The exact KL at each position of a message, by (episode, turn)."""


def token_kls(updates: Sequence[Record]) -> dict[tuple[int, int], TokenKls]:
    """The single values that probes logged, by the stage and step of the update."""
    found: dict[tuple[int, int], TokenKls] = {}
    for update in updates:
        stage, step = whole(update, "stage"), whole(update, "step")
        if stage is None or step is None:
            continue
        logged = mapping(mapping(mapping(update, "probe"), "token_shift"), "sampled_kl")
        for message in mappings(logged, "tokens"):
            episode, turn = whole(message, "episode"), whole(message, "turn")
            values = numbers(message.get("kl"))
            if episode is not None and turn is not None and values.size:
                found.setdefault((stage, step), {})[episode, turn] = values.tolist()
    return found


def _shift(logged: Record) -> dict[str, Any] | None:
    """By rank before the update; None unless the three rows are finite numbers, equally many."""
    rows = {key: numbers(logged.get(key)).tolist() for key in ("before_R", "after_R", "moved_R")}
    ranks = len(rows["moved_R"])
    if not ranks or any(len(row) != ranks for row in rows.values()):
        return None
    told = {"flipped": number(logged, "flipped"), "positions": whole(logged, "positions")}
    return {**rows, **told, "stretched": _stretched(mapping(logged, "stretched"), ranks)}


def _stretched(logged: Record, ranks: int) -> dict[str, Any] | None:
    moved_R = numbers(logged.get("moved_R")).tolist()
    if len(moved_R) != ranks:
        return None
    return {"moved_R": moved_R, **{key: number(logged, key) for key in ("times", "kl", "flipped")}}
