"""One figure for each lab, as PNG, PDF or SVG: axes with units, and a caption that says what a good result looks like.

matplotlib is imported when a figure is drawn, with its file backend: no screen is needed, and nothing else pays for the
import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.lab.roles import RolesReport
from teamtr.lab.scaling import ScalingReport
from teamtr.lab.staleness import CellReport, StalenessReport
from teamtr.lab.staleness_cells import STALE as STALE_PLAN
from teamtr.lab.staleness_cells import Cost
from teamtr.lab.tightness import TightnessReport
from teamtr.lab.verify import VerifyReport

FRESH, STALE, PAPER, OURS = "#1b7837", "#b2182b", "#7f7f7f", "#2166ac"
DPI = 130


def draw_verify(report: VerifyReport, path: str | Path) -> Path:
    """For each statement, the ratio of bound to true value: median and 99th percentile, with violations in red."""
    figure, plt = _figure(9.0, 0.19 * len(report.checks) + 2.0)
    axes = figure.subplots()
    named = [(name, check) for name, check in report.checks.items()][::-1]
    for row, (_, check) in enumerate(named):
        colour = STALE if check.violations else OURS
        if np.isfinite(check.median_ratio):
            axes.plot([check.median_ratio, check.p99_ratio], [row, row], color=colour, linewidth=0.8)
            axes.plot([check.median_ratio], [row], "o", color=colour, markersize=3.5)
        else:
            axes.text(1.1, row, "the bounded value is never positive", fontsize=5.5, va="center", color=PAPER)
    axes.set_yticks(range(len(named)), [name for name, _ in named], fontsize=6)
    axes.set_ylim(-1, len(named))
    axes.set_xscale("log")
    axes.set_xlim(0.8, 1e7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("bound / true value (dot: median, line: to the 99th percentile)")
    broken = sum(check.violations > 0 for check in report.checks.values())
    title = (
        f"{len(named)} statements on {report.teams} random teams: {report.violations} violations in {broken} of them"
    )
    axes.set_title(title, fontsize=9)
    caption = "Good: nothing red (no bound below the truth); dots near 1 are tight, identities lie on 1."
    return _save(figure, plt, path, caption)


def draw_roles(report: RolesReport, path: str | Path) -> Path:
    """Left, success by number of agents, fresh and stale, with the share of updates that lowered J; right, gap and
    drift."""
    figure, plt = _figure(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    n = np.array(report.n)
    for values, spread, colour, label in (
        (report.fresh, report.spread_fresh, FRESH, "fresh"),
        (report.stale, report.spread_stale, STALE, "stale"),
    ):
        error = np.array(spread) / np.sqrt(report.seeds)
        left.errorbar(n, values, yerr=error, fmt="o-", color=colour, label=label, capsize=2, markersize=4)
        for k, teams in zip(n, report.by_seed[label], strict=True):
            left.plot([k] * len(teams), teams, ".", color=colour, alpha=0.25, markersize=3)
    left.plot(n, report.stale_lowered, "x--", color=STALE, alpha=0.6, label="stale: share of updates that lowered J")
    left.plot(n, report.fresh_lowered, "x--", color=FRESH, alpha=0.6, label="fresh: share of updates that lowered J")
    left.set_ylim(-0.03, 1.05)
    left.set_xlabel("agents n")
    left.set_ylabel(f"P(exactly one volunteers), end of {report.stages} stages")
    left.set_title(f"Blind role division, radius {report.radius:g} nats per message", fontsize=9)
    left.legend(fontsize=7, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    for name, colour, style in (
        ("fresh_gap", FRESH, "o-"),
        ("stale_gap", STALE, "o-"),
        ("fresh_drift", FRESH, "s--"),
        ("stale_drift", STALE, "s--"),
    ):
        fit = report.exponents.get(name)
        label = name.replace("_", ": ") + (f", n^{fit.text()}" if fit is not None else "")
        right.plot(n, getattr(report, name), style, color=colour, label=label, markersize=4)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xticks(n, [str(k) for k in n])
    right.minorticks_off()
    right.set_xlabel("agents n")
    right.set_ylabel("stale gap (reward), drift (total variation)")
    right.set_title("Sums over the updates of a stage, mean over stages", fontsize=9)
    right.legend(fontsize=7)
    caption = (
        f"Good: fresh stays at 1, no update lowers J. {report.seeds} teams per n (faint dots), bars: one standard "
        "error. Intervals of exponents: 95 %."
    )
    return _save(figure, plt, path, caption)


def draw_scaling(report: ScalingReport, path: str | Path) -> Path:
    """One panel per family under fresh training: measured sums and bounds against n, on logarithmic axes."""
    names = list(dict.fromkeys(family.family for family in report.families))
    columns = 4
    rows = -(-len(names) // columns)
    figure, plt = _figure(3.4 * columns, 2.9 * rows + 0.7)
    panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    curves = (
        ("measured", "gap", STALE, "o-", "stale gap (forward order)"),
        ("measured", "drift", OURS, "s-", "drift (TV)"),
        ("measured", "error", FRESH, "^-", "error of the fresh surrogate"),
        ("bounds", "paper_stale_extra", PAPER, "o:", "the paper's bound on the stale gap"),
        ("bounds", "drift_by_kl", OURS, "s:", "ours: bound on the drift"),
        ("bounds", "ours_stale", "black", "v:", "ours: bound for one stale batch"),
    )
    for panel, name in zip(panels, names, strict=False):
        family = report.of(name, "fresh", "forward")
        for where, key, colour, style, label in curves:
            values = np.array(getattr(family, where)[key])
            shown = values > 1e-12
            if shown.any():
                panel.plot(np.array(family.n)[shown], values[shown], style, color=colour, label=label, markersize=3)
        reverse = np.array(report.of(name, "fresh", "reverse").measured["gap_naive"])
        if (reverse > 1e-12).any():
            panel.plot(family.n, reverse, "x--", color=STALE, markersize=4, label="naive gap (reverse order)")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(family.n, [str(k) for k in family.n])
        panel.minorticks_off()
        fit = family.tail["gap"]
        panel.set_title(f"{name}: gap n^{fit.text()}" if fit else f"{name}: gap zero", fontsize=8)
        panel.set_xlabel("agents n", fontsize=7)
        panel.tick_params(labelsize=6)
    panels[0].set_ylabel("per stage: reward or total variation", fontsize=7)
    for panel in panels[len(names) :]:
        panel.axis("off")
    handles, labels = _legend(list(panels[: len(names)]))
    figure.legend(handles, labels, fontsize=7, ncol=4, loc="upper center")
    caption = (
        "Good: measured (solid) below the bounds (dotted). rem:quad2lin claims slopes 2 (stale) and 1 (fresh): "
        "compare them with the solid lines."
    )
    return _save(figure, plt, path, caption, top=1.0 - 0.55 / (2.9 * rows + 0.7))


def draw_tightness(report: TightnessReport, path: str | Path) -> Path:
    """Left, the share of improving steps that each bound certifies; right, bound against gain."""
    figure, plt = _figure(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    rows = [*report.rows, report.overall]
    labels = [f"{row.turns} x {row.direction}" if row.turns else "all" for row in rows]
    kinds = (
        ("paper", PAPER, "the paper's"),
        ("first_order", "#92c5de", "ours, first order"),
        ("by_kl", OURS, "ours, by KL"),
        ("by_tv", "#053061", "ours, with exact TV"),
    )
    for k, (name, colour, label) in enumerate(kinds):
        position = np.arange(len(rows)) + 0.2 * (k - 1.5)
        left.bar(position, [row.certified[name] for row in rows], width=0.2, color=colour, label=label)
    left.axhline(0.5, color="black", linewidth=0.7, linestyle=":")
    left.set_xticks(range(len(rows)), labels, rotation=45, ha="right", fontsize=7)
    left.set_ylabel("share of improving steps certified")
    left.set_ylim(0.0, 1.05)
    left.set_xlabel("turns per agent x direction of the step", fontsize=8)
    left.legend(fontsize=7)
    gain = np.array(report.points["gain"])
    for name, colour, label in (kinds[0], kinds[2]):
        right.plot(gain, report.points[name], ".", color=colour, markersize=2.5, label=label)
    edge = float(np.abs(gain).max())
    right.plot([-edge, edge], [-edge, edge], color="black", linewidth=0.8)
    right.axhline(0.0, color="black", linewidth=0.5, linestyle=":")
    right.set_yscale("symlog", linthresh=0.02)
    right.set_xscale("symlog", linthresh=0.02)
    right.set_xlabel("true gain of the step (reward)")
    right.set_ylabel("certified lower bound (reward)")
    right.legend(fontsize=7)
    certified = report.overall.certified
    broken = sum(report.overall.violated.values())
    figure.suptitle(
        f"Steps of radius {report.radius:g}: certified {certified['by_kl']:.0%} (ours, by KL), "
        f"{certified['paper']:.0%} (paper); {broken} violations",
        fontsize=9,
    )
    caption = "Good: bars above one half; points below the diagonal (never violated) and above zero (a certified gain)."
    return _save(figure, plt, path, caption, top=0.94)


PLAN_STYLES = {
    "teamtr": ("fresh", FRESH, 6.0),
    "naive_sequential": ("stale", STALE, 6.0),
    "auto": ("auto", OURS, 6.0),
    "reweighted": ("reweighted", "#4393c3", 4.0),
    "partial": ("partial", "#8073ac", 4.0),
}
"""For each plan of the map: its name in the figure, color and marker size."""
BUDGETS: tuple[tuple[Cost, str, float, float], ...] = (("updates", "o", 1.0, -0.13), ("tokens", "D", 0.7, 0.2))
"""For each budget: its marker, relative marker size, and offset from the middle of a plan's row."""


def draw_staleness(report: StalenessReport, path: str | Path) -> Path:
    """One panel per cell: blind roles by agents and radius, the others below; red where stale rollouts fail."""
    blind = [cell for cell in report.cells if cell.cell.is_exact]
    others = [cell for cell in report.cells if not cell.cell.is_exact]
    agents = sorted({cell.cell.agents for cell in blind})
    radii = sorted({cell.cell.radius for cell in blind})
    rows = len(radii) + bool(others)
    units = math.lcm(len(agents) or 1, len(others) or 1)
    height = (0.6 + 0.22 * len(report.plans)) * rows + 1.0
    figure, plt = _figure(10.0, height)
    grid = figure.add_gridspec(rows, units)
    for cell in blind:
        wide = units // len(agents)
        column = agents.index(cell.cell.agents)
        panel = figure.add_subplot(grid[radii.index(cell.cell.radius), column * wide : (column + 1) * wide])
        title = f"blind roles, {cell.cell.agents} agents, radius {cell.cell.radius:g}"
        _draw_cell(panel, cell, report.plans, title, first=column == 0)
    for column, cell in enumerate(others):
        wide = units // len(others)
        panel = figure.add_subplot(grid[rows - 1, column * wide : (column + 1) * wide])
        _draw_cell(panel, cell, report.plans, _what_differs(cell), first=column == 0)
    failing = sum(_stale_fails(cell) for cell in report.cells)
    figure.suptitle(
        f"Success by plan: stale rollouts fail in {failing} of {len(report.cells)} cells (red)", fontsize=10
    )
    for cost, marker, _, _ in BUDGETS:
        face = "black" if cost == "updates" else "white"
        figure.axes[0].plot([], [], marker, color="black", markerfacecolor=face, markersize=5, label=f"at equal {cost}")
    handles, labels = _legend(figure.axes[:1])
    figure.legend(handles, labels, fontsize=7, ncol=2, loc="upper right")
    caption = (
        "Red: fresh beats stale at equal updates. Good: auto beside the better of the two, with few tokens (right of "
        f"each panel, as a multiple of stale's). {len(report.seeds)} seeds, bars: 95 % intervals."
    )
    return _save(figure, plt, path, caption, top=1.0 - 0.3 / height)


def _stale_fails(cell: CellReport) -> bool:
    return cell.at_equal["updates"].difference == "fresh"


def _draw_cell(panel: Any, cell: CellReport, plans: Sequence[str], title: str, first: bool) -> None:
    shown = [plan for plan in PLAN_STYLES if plan in plans]
    for row, plan in enumerate(shown):
        _, colour, size = PLAN_STYLES[plan]
        for cost, marker, scale, shift in BUDGETS:
            found, height = cell.at_equal[cost].success[plan], row + shift
            face = colour if cost == "updates" else "white"
            inside = [max(found.low, 0.0), min(found.high, 1.0)]
            panel.plot(inside, [height] * 2, color=colour, linewidth=1.6 * scale)
            panel.plot(
                [found.mean],
                [height],
                marker,
                color=colour,
                markerfacecolor=face,
                markersize=size * scale,
                clip_on=False,
                zorder=3,
            )
        if STALE_PLAN in cell.plans:
            times = cell.plans[plan].tokens / cell.plans[STALE_PLAN].tokens
            panel.text(1.03, row, f"{times:.2g}×", fontsize=6.5, va="center", color=colour)
    if STALE_PLAN in cell.plans:
        panel.text(1.03, -0.75, "tokens", fontsize=6, va="center", color=PAPER)
    if _stale_fails(cell):
        panel.set_facecolor("#fddbc7")
    panel.set_title(title, fontsize=8)
    panel.set_xlim(0.0, 1.0)
    panel.set_ylim(len(shown) - 0.5, -0.5)
    panel.set_yticks(range(len(shown)), [PLAN_STYLES[plan][0] for plan in shown] if first else [""] * len(shown))
    panel.tick_params(labelsize=7, length=2)
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)


def _what_differs(cell: CellReport) -> str:
    """The title of a cell outside the grid."""
    about = cell.cell
    if about.game == "roles":
        second = "all hear each other" if about.sees == "everything" else "blind in each round"
    else:
        second = f"halves of {about.length}"
    second += f", {about.rounds} rounds" if about.rounds > 1 else ""
    return f"{about.game.replace('-', ' ')}, {about.agents} agents, radius {about.radius:g}\n{second}"


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.figure(figsize=(width, height), dpi=DPI), plt


def _legend(panels: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Every label once, from the first panel that has it."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _save(figure: Any, plt: Any, path: str | Path, caption: str, top: float = 1.0) -> Path:
    target = Path(path)
    height = figure.get_size_inches()[1]
    figure.text(0.5, 0.06 / height, caption, ha="center", fontsize=7)
    figure.tight_layout(rect=(0.0, 0.2 / height, 1.0, top))
    figure.savefig(target, format=target.suffix.removeprefix(".") or "png")
    plt.close(figure)
    return target
