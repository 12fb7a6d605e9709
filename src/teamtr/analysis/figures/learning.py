"""Figures of success: over training, with coordination, by update order, by team size, and around a swap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from teamtr.analysis.diagnostics.order import order_sensitivity
from teamtr.analysis.figures.drawing import Drawing, Panel, Series
from teamtr.analysis.figures.runs import Run, alike, need, seeds_together
from teamtr.randomness import generator
from teamtr.theory.power_law import PowerLaw, fit_power_law

SUCCESS = "held-out success (%)"
EVALUATE = "set eval.every to a number of stages, such as 5"
DRAWS = 1000
"""Bootstrap draws of the runs of each size, for the interval of an exponent."""


def learning_curves(runs: Sequence[Run]) -> Drawing:
    """fig:training-curves: held-out success against sampled tokens, and against stages."""
    evaluated = [run for run in runs if run.data["evals"]]
    need(evaluated, "no evaluation is in the log", EVALUATE)
    groups = seeds_together(evaluated)
    return Drawing(
        (
            Panel(
                "by sampled tokens",
                "tokens sampled for training",
                SUCCESS,
                tuple(_curve(name, group, "sampled_tokens") for name, group in groups.items()),
            ),
            Panel(
                "by stage",
                "stages done",
                SUCCESS,
                tuple(_curve(name, group, "stage") for name, group in groups.items()),
            ),
        ),
        "Held-out success (avg@K) over training. Bands: of one run the interval of its evaluation, of several seeds "
        "one standard deviation across them, at the evaluations that all of them have.",
        "lines that rise, leave the interval they began in and do not fall back; of two, the one that is higher at the "
        "same number of sampled tokens",
        tuple(f"{run.label}: no evaluation in the log" for run in runs if run not in evaluated),
    )


def _curve(label: str, group: Sequence[Run], axis: str) -> Series:
    if len(group) == 1:
        rows = [row for row in group[0].data["evals"] if row[axis] is not None]
        whole = all(row["low"] is not None and row["high"] is not None for row in rows)
        low, high = (_percents(rows, end) if whole else None for end in ("low", "high"))
        return Series(label, tuple(row[axis] for row in rows), _percents(rows, "success"), low, high)
    by_run = [{row["stage"]: row for row in run.data["evals"]} for run in group]
    shared = sorted(stage for stage in by_run[0] if stage is not None and all(stage in rows for rows in by_run))
    values_RS = 100 * np.array([[rows[stage]["success"] for stage in shared] for rows in by_run]).reshape(
        len(group), -1
    )
    mean_S, spread_S = values_RS.mean(axis=0), values_RS.std(axis=0, ddof=1)
    x = tuple(float(np.mean([rows[stage][axis] for rows in by_run])) for stage in shared)
    return Series(label, x, tuple(mean_S), tuple(mean_S - spread_S), tuple(mean_S + spread_S))


def _percents(rows: Sequence[dict[str, Any]], key: str) -> tuple[float, ...]:
    return tuple(100 * row[key] for row in rows)


def coordination(runs: Sequence[Run]) -> Drawing:
    """tab:ablation, Coord. and Stab.: consensus on the right answer, and stability of improvements."""
    found = [run for run in runs if run.data["coordination"]]
    steady = [run for run in runs if run.data["stability"]["improvements"]]
    need(found or steady, "no evaluations are in the log", EVALUATE)
    consensus = tuple(
        Series(
            run.label,
            tuple(row["stage"] for row in run.data["coordination"]),
            _percents(run.data["coordination"], "consensus"),
        )
        for run in found
    )
    improvements = tuple(
        Series(
            f"{run.label}, standard deviation {_told(run.data['stability']['deviation'])}",
            tuple(map(float, run.data["stability"]["stages"])),
            tuple(run.data["stability"]["improvements"]),
            kind="points",
        )
        for run in steady
    )
    panels = (
        Panel("coordination", "stages done", "consensus on the right answer (% of episodes)", consensus),
        Panel("stability", "stages done", "improvement of success since the last one", improvements, (("", 0.0),)),
    )
    return Drawing(
        tuple(panel for panel in panels if panel.series),
        "Left: episodes in which every agent that states an answer states the right one. Right: improvements of "
        "held-out success from evaluation to evaluation; their standard deviation is the paper's Stability where every "
        "stage is evaluated.",
        "consensus that rises with success; improvements above zero and close together",
        tuple(f"{run.label}: evaluations without what agents stated" for run in runs if run not in found),
    )


def order(runs: Sequence[Run]) -> Drawing:
    """tab:ablation, update order: final success by the order in which agents are updated."""
    finals: dict[str, list[float]] = {}
    same, notes = alike(runs, "order")
    for run in same:
        if run.data["evals"] and run.data["run"]["order"] != "unknown":
            finals.setdefault(run.data["run"]["order"], []).append(100 * run.data["evals"][-1]["success"])
    remedy = "give runs of at least two orders (plan.order: fixed, reverse, random), evaluated at their end"
    need(len(finals) > 1, "no two runs differ in their order and in nothing else", remedy)
    found = order_sensitivity(finals)
    names = tuple(finals)
    points = [(float(k), value) for k, name in enumerate(names) for value in finals[name]]
    means = Series("mean", tuple(map(float, range(len(names)))), tuple(found.means.values()), kind="bars")
    single = Series.of("run", points, "points")
    within = (
        "no order was run twice, so that chance is unknown" if found.within is None else f"{found.within:.2g} points"
    )
    return Drawing(
        (Panel("by order", "order of updates", SUCCESS, (means, single), names=names),),
        f"Final held-out success by order of updates. Spread between orders: {found.spread:.2g} points; standard "
        f"deviation within one order: {within}.",
        "a spread between orders that is not well above that within one: the order does not matter",
        notes,
    )


def scaling(runs: Sequence[Run]) -> Drawing:
    """tab:scaling: growth with the number of agents."""
    same, left_out = alike(runs, "team")
    sizes = sorted({run.size for run in same})
    remedy = "give runs of one task and plan with teams of at least two sizes"
    need(len(sizes) > 1, "no two runs differ in the number of agents and in nothing else", remedy)
    measures = (
        ("stale gap", "stale gap of the last probed stage, summed", _last_gap),
        (
            "success",
            f"final {SUCCESS}",
            lambda run: 100 * run.data["evals"][-1]["success"] if run.data["evals"] else None,
        ),
        ("stability", "standard deviation of stage improvements", lambda run: run.data["stability"]["deviation"]),
    )
    panels, notes = [], [*left_out]
    for title, label, measure in measures:
        values = {n: [v for run in same if run.size == n and (v := measure(run)) is not None] for n in sizes}
        known = [n for n in sizes if values[n]]
        if not known:
            notes.append(f"{title} is in none of the logs")
            continue
        points = [(float(n), v) for n in known for v in values[n]]
        mean = Series("mean", tuple(map(float, known)), tuple(float(np.mean(values[n])) for n in known))
        single = Series.of("run", points, "points")
        panels.append(Panel(f"{title}{_exponent(known, values)}", "agents", label, (mean, single)))
    need(panels, "none of the runs logged what is compared by size", f"{EVALUATE}, and diagnostics.every")
    return Drawing(
        tuple(panels),
        "What grows with the number of agents; exponents are fitted to the means of all runs of a size, with a 95 % "
        "interval from redrawing the runs of each size where every size has several.",
        "a stale gap that grows no faster than the number of agents, success that does not fall",
        tuple(notes),
    )


def _last_gap(run: Run) -> float | None:
    gaps = (run.data["probes"] or {"by_stage": {}})["by_stage"]
    return gaps[max(gaps)]["total"] if gaps else None


def _exponent(sizes: Sequence[int], values: dict[int, list[float]]) -> str:
    """The fitted exponent, for the title. The fit gets means, since it needs equally many repetitions of each size."""
    if len(sizes) < 3 or any(v <= 0 for n in sizes for v in values[n]):
        return ""
    rng = generator(0, "figures", "scaling")
    fit = fit_power_law(sizes, np.array([[np.mean(values[n])] for n in sizes]), rng)
    if fit is None:
        return ""
    if min(len(values[n]) for n in sizes) < 2:
        return f", grows as n^{fit.exponent:.2f}"
    redrawn_ND = np.array([rng.choice(values[n], (DRAWS, len(values[n]))).mean(axis=1) for n in sizes])
    low, high = np.quantile(np.polyfit(np.log(sizes), np.log(redrawn_ND), 1)[0], [0.025, 0.975])
    return f", grows as n^{PowerLaw(fit.exponent, float(low), float(high)).text()}"


def swap(runs: Sequence[Run]) -> Drawing:
    """fig:plugin-upgrade and tab:pnp-ablation: success before and after the replacement of an agent."""
    swapped = [run for run in runs if run.data["swaps"]]
    need(swapped, "no agent was replaced in these runs", "teamtr swap RUN --agent NAME --with MODEL, then train on")
    curves: list[Series] = []
    shocks: dict[str, float] = {}
    notes = []
    for run in swapped:
        first = run.data["swaps"][0]
        name = f"{run.label} ({first['mode']})"
        curves.append(_curve(name, [run], "stage"))
        if first["stage"] is None:
            notes.append(f"{name}: the record of the swap does not say its stage, so that its dots are not drawn")
        else:
            at = [row["success"] for row in first["success"].values() if row["success"] is not None]
            points = [(float(first["stage"]), 100 * value) for value in at]
            curves.append(Series.of(f"{name}: at the swap", points, "points"))
        if first["shock"] is None:
            notes.append(f"{name}: the record of the swap holds no shock")
        else:
            shocks[name] = 100 * first["shock"]
    bars = Series.of("shock", [(float(k), shock) for k, shock in enumerate(shocks.values())], "bars")
    panels = (
        Panel("recovery", "stages done", SUCCESS, tuple(curve for curve in curves if curve.x)),
        Panel("swap shock", "run", "success lost at the swap (points)", (bars,) if shocks else (), names=tuple(shocks)),
    )
    shown = tuple(panel for panel in panels if panel.series)
    need(shown, "neither evaluations nor the swaps tell of success", EVALUATE)
    return Drawing(
        shown,
        "Success before, at and after the replacement of an agent. Dots: before, as it came, and (aligned swaps) after "
        "alignment, on the same problems. The swap itself is not certified.",
        "a shock near zero, and a line that goes on rising after the swap",
        tuple(notes),
    )


def _told(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2g}"
