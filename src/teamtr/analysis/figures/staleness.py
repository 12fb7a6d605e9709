"""Figures of staleness: the gap of surrogates, trajectory weights, and the drift of contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teamtr.analysis.figures.drawing import Drawing, Panel, Series
from teamtr.analysis.figures.region import PROBE
from teamtr.analysis.figures.runs import Run, need
from teamtr.analysis.report import build_report

BATCHES = 12
"""Maximum batches of a run that are read for the drift of contexts."""


def stale_gap(runs: Sequence[Run]) -> Drawing:
    """fig:occ-gap and Delta_stale: the surrogate on fresh rollouts minus that on rollouts of the stage's first team."""
    steps, sums = [], []
    for run in runs:
        gaps: dict[int, list[tuple[float, dict[str, float]]]] = {}
        for probe in run.probes:
            if probe["gap"] is not None:
                gaps.setdefault(probe["step"], []).append((float(probe["stage"]), probe["gap"]))
        steps += [_with_interval(f"{run.label}, i = {step + 1}", gaps[step]) for step in sorted(gaps)]
        by_stage = sorted((run.data["probes"] or {"by_stage": {}})["by_stage"].items())
        for what, key in ((run.label, "total"), (f"{run.label}, by sampling alone", "noise")):
            if by_stage:
                sums.append(Series.of(what, [(float(stage), gap[key]) for stage, gap in by_stage]))
    need(steps, "no update after a stage's first was probed", f"{PROBE} (logs before 0.2 hold no gap that counts)")
    return Drawing(
        (
            Panel("gap of each update", "stage", "fresh less stale (normalized advantage)", tuple(steps), (("", 0.0),)),
            Panel("Delta stale", "stage", "sum of the sizes of a stage's gaps (normalized advantage)", tuple(sums)),
        ),
        "Surrogate of the i-th update of a stage on new rollouts of the team before it, less that on rollouts of the "
        "team that began the stage, with 95 % intervals over problems. No update learned from either batch. Sizes add "
        "up even where nothing is stale: the second line is what sampling alone would show.",
        "intervals that hold zero: stale rollouts would have said the same, and fresh ones may not be worth their "
        "tokens here",
    )


def _with_interval(label: str, points: Sequence[tuple[float, dict[str, float]]]) -> Series:
    estimate, lower, upper = (tuple(gap[key] for _, gap in points) for key in ("estimate", "lower", "upper"))
    return Series(label, tuple(stage for stage, _ in points), estimate, lower, upper)


def weights(runs: Sequence[Run]) -> Drawing:
    """tab:is-degeneracy: the importance weights needed to reuse the stage's first rollouts for its later updates."""
    share, tail = [], []
    for run in runs:
        by_step: dict[int, list[dict[str, Any]]] = {}
        for probe in run.probes:
            if probe["weights"]:
                by_step.setdefault(probe["step"], []).append(probe["weights"])
        steps = sorted(by_step)
        if not steps:
            continue
        share.append(_means(run.label, steps, by_step, "effective_share", 100.0))
        for key, told in (("p99", "P99"), ("largest", "largest")):
            tail.append(_means(f"{run.label}: {told}", steps, by_step, key, 1.0))
    need(share, "no probe logged trajectory weights", f"{PROBE}, in a team of at least two trained agents")
    return Drawing(
        (
            Panel("effective sample size", "i-th update of a stage", "ESS / B (%)", tuple(share)),
            Panel("tail", "i-th update of a stage", "trajectory weight", tuple(tail), logarithmic="y"),
        ),
        "Trajectory weights that would carry a stage's first rollouts to the team before its i-th update: mean over "
        "the probed stages, bars from the smallest to the largest.",
        "ESS/B near 100 %, weights near 1: reusing rollouts would be cheap. Weights average to 1, so that no more than "
        "one in ten can exceed 10",
    )


def drift(runs: Sequence[Run]) -> Drawing:
    """D_occ of tab:scaling: from importance weights, and from contexts that repeat, above the chance level."""
    bounded, seen, notes = [], [], []
    for run in runs:
        by_step: dict[int, list[tuple[float, float, float | None]]] = {}
        for p in run.probes:
            if "total_variation" in p["weights"]:
                moved, error = p["weights"]["total_variation"], p["weights"].get("total_variation_error")
                by_step.setdefault(p["step"], []).append((float(p["stage"]), moved, error))
        for step in sorted(by_step):
            label = f"{run.label}, i = {step + 1}"
            bounded.append(_with_errors(label, by_step[step]))
            if bounded[-1].low is None:
                notes.append(f"{label}: not every standard error is in the log, so that no bars are drawn")
        steps = build_report(run.reading, most_batches=BATCHES, most_episodes=1).data["staleness"] or []
        told = [(float(s["stage"]), s["drift"]["excess"]) for s in steps if s["drift"]]
        if told:
            seen.append(Series.of(f"{run.label}, above chance", told, "points"))
        elif steps:
            notes.append(f"{run.label}: contexts hardly repeat, so that comparing them says nothing")
        else:
            notes.append(
                f"{run.label}: no stage has a second batch (the plan reuses rollouts, or store.episodes is false)"
            )
    need(
        bounded or seen,
        "neither probes nor stored batches tell how contexts moved",
        f"{PROBE}, or store.episodes: true",
    )
    panels = (
        Panel("by importance weights", "stage", "total variation of conversations", tuple(bounded)),
        Panel("by contexts that repeat", "stage", "total variation above chance", tuple(seen)),
    )
    return Drawing(
        tuple(panel for panel in panels if panel.series),
        "How far the team moved from the stage's start until its i-th update. Left: total variation of whole "
        "conversations from trajectory weights (bars: two standard errors), which bounds that of their contexts. "
        "Right: total variation of the updated agent's contexts, less what relabelling within a problem gives by "
        "chance, in the finest form in which they repeat.",
        "near zero: what the agents see has hardly changed within a stage",
        tuple(notes),
    )


def _with_errors(label: str, rows: Sequence[tuple[float, float, float | None]]) -> Series:
    """Points with error bars of two standard errors; without bars unless all errors are known."""
    x, y = tuple(x for x, _, _ in rows), tuple(y for _, y, _ in rows)
    errors = [error for _, _, error in rows if error is not None]
    if len(errors) < len(rows):
        return Series(label, x, y)
    pairs = list(zip(y, errors, strict=True))
    return Series(label, x, y, tuple(v - 2 * e for v, e in pairs), tuple(v + 2 * e for v, e in pairs))


def _means(
    label: str, steps: Sequence[int], by_step: dict[int, list[dict[str, Any]]], key: str, scale: float
) -> Series:
    values = [[scale * weights[key] for weights in by_step[step] if key in weights] for step in steps]
    known = [(float(step + 1), found) for step, found in zip(steps, values, strict=True) if found]
    return Series(
        label,
        tuple(x for x, _ in known),
        tuple(sum(found) / len(found) for _, found in known),
        tuple(min(found) for _, found in known),
        tuple(max(found) for _, found in known),
    )
