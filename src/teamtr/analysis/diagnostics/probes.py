"""Reads the probes of a run from its log (``diagnostics.every``): stale gaps, weights, and token shifts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.records import Record, mapping, mappings, number, numbers, whole
from teamtr.theory.intervals import student_quantile

MANY = 10_000


@dataclass(frozen=True)
class Gap:
    """Fresh minus stale surrogate of one step, its interval, and its standard error."""

    estimate: float
    lower: float
    upper: float
    error: float


@dataclass(frozen=True)
class StageGap:
    """Delta_stale of a stage: the sum of its steps' absolute gaps; ``noise`` is its expectation from sampling noise."""

    total: float
    noise: float


@dataclass(frozen=True)
class Probed:
    """One probed update. ``fresh`` and ``stale`` are its surrogate on a new batch of the team before it and on one of
    the team that began the stage; ``gap`` is their difference with its interval. It is None at a stage's first step,
    where the two teams are the same, and in logs of versions before 0.2, whose gap was computed on the batch that the
    update was trained on and included its optimism. ``weights`` and ``shift`` are as logged."""

    update: int
    stage: int
    step: int
    agent: str
    fresh: float | None
    stale: float | None
    weights: dict[str, float]
    shift: dict[str, Any] | None
    gap: Gap | None


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
                gap=_gap(mapping(probe, "gap")),
            )
        )
    return tuple(found)


def stale_gap_by_stage(found: Sequence[Probed]) -> dict[int, StageGap]:
    """Delta_stale of each probed stage (fig:occ-gap). The absolute value of an unbiased estimate is biased upwards: for
    a true value of zero it is sqrt(2 / pi) standard errors on average, which ``noise`` sums."""
    gaps: dict[int, StageGap] = {}
    for one in found:
        if one.gap is not None:
            sofar = gaps.get(one.stage, StageGap(0.0, 0.0))
            noise = math.sqrt(2.0 / math.pi) * one.gap.error
            gaps[one.stage] = StageGap(sofar.total + abs(one.gap.estimate), sofar.noise + noise)
    return gaps


def _gap(logged: Record) -> Gap | None:
    estimate, lower, upper, confidence = (number(logged, key) for key in ("estimate", "lower", "upper", "confidence"))
    problems = whole(logged, "problems")
    if estimate is None or lower is None or upper is None or confidence is None or problems is None or problems < 2:
        return None
    if not 0.0 < confidence < 1.0:
        return None
    # The quantile takes memory proportional to the degrees of freedom, and beyond MANY it is that of the normal law.
    error = (upper - lower) / 2.0 / student_quantile((1.0 + confidence) / 2.0, min(problems, MANY) - 1)
    return Gap(estimate, lower, upper, error)


TokenKls = dict[tuple[int, int], list[float]]
"""The exact KL at each position of a message, by (episode, turn)."""


def token_kls(updates: Sequence[Record]) -> dict[tuple[int, int], TokenKls]:
    """The individual values that probes logged, by the stage and step of the update."""
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
    """The token shift by rank before the update; None unless the three rows are finite and of equal length."""
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
