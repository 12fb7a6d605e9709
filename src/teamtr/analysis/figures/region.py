"""Figures of the trust region and certificates: KL per update, bound against gain, sampled KL, zeta, token shifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from teamtr.analysis.diagnostics.tracking import certificate_tracking, rank_correlation
from teamtr.analysis.diagnostics.zeta import PARTS
from teamtr.analysis.figures.drawing import Drawing, Lacking, Panel, Series
from teamtr.analysis.figures.runs import Run, need
from teamtr.records import accepted, number, of_kind, whole

PROBE = "set diagnostics.every to a number of stages, such as 5"


def region(runs: Sequence[Run]) -> Drawing:
    """fig:tr-cert (a): the KL of every kept update in radii, and the share outside."""
    series, ordered, notes = [], [], []
    for run in runs:
        rows = [row for row in run.kept if row["kl_upper"] is not None and row["radius"]]
        lost = len(run.kept) - len(rows)
        if lost:
            notes.append(f"{run.label}: {lost} kept updates have no finite bound and are not drawn")
        if not rows:
            continue
        outside = sum(row["outside"] for row in run.kept) / len(run.kept)
        upper = np.array([row["kl_upper"] / row["radius"] for row in rows])
        label = f"{run.label}: {100 * outside:.1f} % outside"
        shares = tuple((np.arange(len(upper)) + 1) / len(upper) * 100)
        series.append(Series(label, tuple(np.sort(upper)), shares, kind="stairs"))
        ordered.append(Series(run.label, tuple(float(row["update"]) for row in rows), tuple(upper), kind="points"))
    need(series, "no kept update is in the log", "train for at least one update")
    return Drawing(
        (
            Panel("distribution", "upper bound of the KL (radii)", "kept updates up to here (%)", tuple(series)),
            Panel("over training", "update", "upper bound of the KL (radii)", tuple(ordered), (("radius", 1.0),)),
        ),
        "Upper confidence bound of the exact full-vocabulary KL of every kept update, in units of its own radius. The "
        "paper plots its sampled estimate; kl-reliability shows how far that is from the exact KL.",
        "everything at or below 1, and near it: inside the region, and using it",
        tuple(notes),
    )


def certificate(runs: Sequence[Run]) -> Drawing:
    """fig:tr-cert (b) and (c): cumulative certificates and gains, and one against the other."""
    cumulative = [series for run in runs for series in _cumulative(run)]
    scatter: dict[str, list[Series]] = {}
    notes = []
    for run in runs:
        if stale := sum(row["stale"] for row in run.kept):
            notes.append(f"{run.label}: {stale} of {len(run.kept)} kept updates have no certificate: batch was stale")
        if unnumbered := sum(whole(stage, "stage") is None for stage in of_kind(run.reading.records, "stage")):
            notes.append(f"{run.label}: {unnumbered} records of stages do not say which, and are left out of the sums")
        for kind, found in certificate_tracking(run.reading.updates).items():
            if not found.updates:
                continue
            correlation = "unknown" if found.rank_correlation is None else f"{found.rank_correlation:.2f}"
            label = f"{run.label}: rank correlation {correlation}, violated {100 * (found.violation_rate or 0):.1f} %"
            gains = found.gains
            scatter.setdefault(kind, []).append(
                Series(
                    label,
                    tuple(found.bounds),
                    tuple(g.estimate for g in gains),
                    tuple(g.lower for g in gains),
                    tuple(g.upper for g in gains),
                    kind="points",
                )
            )
    remedy = "train with a plan that samples anew before every update, on a task whose range of rewards is known"
    need(cumulative or scatter, "no certificate has a measured gain beside it", remedy)
    units = {"turn_aware": "certified lower bound (reward)", "single_step": "the paper's bound (normalized advantage)"}
    panels = [Panel("cumulative", "stages done", "sum over stages (reward)", tuple(cumulative), (("", 0.0),))]
    stages = tuple(series for run in runs if (series := _by_stage(run)) is not None)
    panels.append(Panel("stages", units["turn_aware"], "measured gain (reward)", stages, (("", 0.0),), diagonal=True))
    panels += [
        Panel(kind.replace("_", " "), units.get(kind, "bound"), "measured gain (reward)", tuple(found), (("", 0.0),),
              diagonal=kind != "single_step")
        for kind, found in scatter.items()
    ]  # fmt: skip
    return Drawing(
        tuple(panel for panel in panels if panel.series),
        "Left: gains that later batches measured, and our certificates of the same updates, summed over stages. Then "
        "every stage: its certificates against what was measured of the same updates, as the paper draws them; then "
        "every update: bound against gain with its 95 % interval, by kind of certificate. The last update of a stage "
        "is not measured. Bounds computed on a step's own batch are diagnostics, no guarantee; the paper's is in units "
        "of the normalized advantage, so that only its order and sign can be compared.",
        "points above the diagonal (no violation) with bounds above zero; about one violation in forty is chance",
        tuple(notes),
    )


def _measured_stages(run: Run) -> list[tuple[float, float, float]]:
    """(stages done, measured, certified) of every stage for which both are known."""
    return [
        (float(ours + 1), measured, certified)
        for stage in of_kind(run.reading.records, "stage")
        if (ours := whole(stage, "stage")) is not None
        and (measured := number(stage, "measured")) is not None
        and (certified := number(stage, "certified_of_measured")) is not None
    ]


def _by_stage(run: Run) -> Series | None:
    rows = _measured_stages(run)
    if not rows:
        return None
    _, measured_S, certified_S = (tuple(column) for column in zip(*rows, strict=True))
    correlation = rank_correlation(certified_S, measured_S)
    told = "unknown" if correlation is None else f"{correlation:.2f}"
    above = sum(bound > gain for _, gain, bound in rows) / len(rows)
    label = f"{run.label}: rank correlation {told}, certificate above the gain in {100 * above:.0f} %"
    return Series(label, certified_S, measured_S, kind="points")


def _cumulative(run: Run) -> list[Series]:
    rows = _measured_stages(run)
    if not rows:
        return []
    x, measured_S, certified_S = (tuple(column) for column in zip(*rows, strict=True))
    return [
        Series(f"{run.label}: measured", x, tuple(np.cumsum(measured_S))),
        Series(f"{run.label}: certified", x, tuple(np.cumsum(certified_S))),
    ]


def kl_reliability(runs: Sequence[Run]) -> Drawing:
    """tab:kl-reliability: sampled KLs against the exact one, and under subsampling of token positions."""
    panels, notes = [], []
    for name, title in (("kl_k1", "k1, the paper's estimate"), ("kl_k3", "k3, its non-negative variant")):
        series = []
        for run in runs:
            found = next(e for e in run.data["kl_reliability"] if e["name"] == name)
            rows = [
                row for row in run.updates if row["unit"] == "message" and row["radius"] and (row["kl_full"] or 0) > 0
            ]
            pairs = [
                (row["kl_full"] / row["radius"], row[name] / row["radius"]) for row in rows if row[name] is not None
            ]
            if pairs:
                label = (
                    f"{run.label}: {_share(found['flip_rate'])} flips, {_share(found['near_flip_rate'])} near the edge"
                )
                series.append(Series.of(label, pairs, "points"))
        if series:
            panels.append(
                Panel(title, "exact KL (radii)", "sampled KL (radii)", tuple(series), (("radius", 1.0),), diagonal=True)
            )
    need(
        panels, "no update moved a policy whose radius is per message", "set plan.radius_nats_per_message, train longer"
    )
    subsamples = []
    for run in runs:
        rows = run.data["kl_subsamples"]
        if not rows:
            notes.append(f"{run.label}: no subsamples of token positions; {PROBE}")
            continue
        shares = tuple(100 * row["share"] for row in rows)
        for key, told in (("median_in_radii", "median"), ("p90_in_radii", "90th percentile")):
            subsamples.append(Series(f"{run.label}: {told}", shares, tuple(row[key] for row in rows)))
        for row in rows:
            notes.append(
                f"{run.label}, {100 * row['share']:.0f} % of the positions: {_share(row['near_flip_rate'])} flips near "
                f"the threshold, {_share(row['exact_flip_rate'])} against the exact KL"
            )
    if subsamples:
        labels = ("token positions counted (%)", "distance from the estimate of all positions (radii)")
        panels.append(Panel("subsampled positions", *labels, tuple(subsamples)))
    return Drawing(
        tuple(panels),
        "Sampled KL of every update against its exact KL, and the sampled KL of some token positions against that of "
        "all. A flip is an estimate on the other side of the radius; near the edge is within half a radius of it.",
        "points on the diagonal, no flips; distances well below one radius. Where they are not, a gate on the sampled "
        "KL would have let updates out of the region",
        tuple(notes),
    )


def zeta(runs: Sequence[Run]) -> Drawing:
    """tab:zeta-proxy: the three proxies of the estimation error, per update."""
    titles = {"zeta_norm": "normalization", "zeta_clip": "clipped advantages", "zeta_ratio": "clipped ratios"}
    parts: dict[str, list[Series]] = {part: [] for part in PARTS}
    notes = []
    for run in runs:
        found, kept = run.data["zeta"], [update for update in run.reading.updates if accepted(update)]
        if found is None:
            continue
        for part, series in parts.items():
            points = [
                (float(ours), value)
                for update in kept
                if (ours := whole(update, "update")) is not None and (value := number(update, part)) is not None
            ]
            if points:
                series.append(Series.of(run.label, points))
            if lost := len(kept) - len(points):
                notes.append(
                    f"{run.label}: {lost} of {len(kept)} kept updates lack {titles[part]} or their number, and are not "
                    "drawn there; the sum counts what is missing as 0"
                )
        rows = (*((titles[part], part) for part in PARTS), ("sum", "proxy"), ("sum of a stage", "per_stage"))
        told = [f"{what} {_three(found[key])}" for what, key in rows]
        told.append(f"part of what the paper's stage bound subtracts {_three(found['penalty_share'])}")
        notes.append(f"{run.label}, mean, P50, P90: {'; '.join(told)}")
    panels = [
        Panel(titles[part], "update", "zeta proxy (normalized advantage)", tuple(series))
        for part, series in parts.items()
        if series
    ]
    need(panels, "no kept update is in the log", "train for at least one update")
    return Drawing(
        tuple(panels),
        "Proxies of the estimation error zeta by its source: normalization within a group, clipped advantages, clipped "
        "ratios. The proxy is cautious, and says little about the true zeta.",
        "small beside the surrogate gain; clip and ratio near zero",
        tuple(notes),
    )


def _three(spread: dict[str, float] | None) -> str:
    return "unknown" if spread is None else ", ".join(f"{spread[key]:.3g}" for key in ("mean", "p50", "p90"))


def token_shift(runs: Sequence[Run]) -> Drawing:
    """fig:logit-vocab: the effect on tokens, by rank, of an update inside the trust region and of one outside."""
    inside, outside = None, None
    for run in runs:
        rows = {row["update"]: row for row in run.updates}
        for probe in run.probes:
            row = rows.get(probe["update"])
            if probe["shift"] is None or row is None or not row["radius"] or row["kl_upper"] is None:
                continue
            fill = row["kl_upper"] / row["radius"]
            if fill <= 1 and (inside is None or fill > inside[0]):
                inside = (fill, run, probe)
            if fill > 1 and (outside is None or fill > outside[0]):
                outside = (fill, run, probe)
    if inside is None and outside is None:
        raise Lacking("no update was probed", PROBE)
    panels = [_shift_panel(kind, *chosen) for kind, chosen in (("inside", inside), ("outside", outside)) if chosen]
    notes = []
    stretched = inside[2]["shift"].get("stretched") if inside else None
    if outside is None and inside is not None and stretched:
        kl = "unknown" if stretched["kl"] is None else f"{stretched['kl']:.3g} nats per message"
        times = "an unknown number of" if stretched["times"] is None else f"{stretched['times']:g}"
        title = f"the same step, {times} times as long (KL {kl})"
        panels.append(_panel(title, {"moved": stretched["moved_R"]}, stretched["flipped"]))
    if outside is None:
        notes.append("no kept update lies outside its region; for a real one run plan.preset: no_trust_region")
    return Drawing(
        tuple(panels),
        "Tokens by their rank before the update (the last: all others together): mean absolute change of their "
        "log-probability, and the share of positions whose most likely token changed.",
        "small changes that fall on the first few ranks, and hardly a position whose first token flips",
        tuple(notes),
    )


def _shift_panel(kind: str, fill: float, run: Run, probe: dict[str, Any]) -> Panel:
    title = f"{kind}: {run.label}, update {probe['update']} ({probe['agent']}), {fill:.2g} radii"
    shift = probe["shift"]
    return _panel(title, {"moved": shift["moved_R"]}, shift["flipped"])


def _panel(title: str, rows: dict[str, Sequence[float]], flipped: float | None) -> Panel:
    count = len(next(iter(rows.values())))
    names = (*(str(rank + 1) for rank in range(count - 1)), "other")
    told = f"first token flipped: {_share(flipped)}"
    series = tuple(
        Series(f"{name}; {told}", tuple(map(float, range(count))), tuple(map(float, values)), kind="bars")
        for name, values in rows.items()
    )
    return Panel(title, "rank before the update", "change of log-probability (nats)", series, names=names)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"
