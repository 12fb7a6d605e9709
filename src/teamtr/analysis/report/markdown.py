"""The report and the comparison as Markdown: what a terminal, a pull request or a notebook can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from teamtr.analysis.report.headlines import clock
from teamtr.reports import was_kept
from teamtr.text import in_markdown, visible

Data = Mapping[str, Any]


def report_text(data: Data) -> str:
    """One run. Every value that a model or a file wrote is escaped."""
    run = data["run"]
    parts = [
        f"# {in_markdown(run['name'])}",
        f"{run['state']}, {run['stages_done']} of {run['stages'] or '?'} stages, {len(data['updates'])} updates, "
        f"agents {in_markdown(', '.join(run['agents']))}, plan {in_markdown(str(run['preset']))}, seed {run['seed']}.",
        *(f"> {in_markdown(note)}" for note in data["notes"]),
        "## At a glance",
        *(f"- **{a['question']}** {in_markdown(a['headline'])}. {in_markdown(a['text'])}" for a in data["headlines"]),
        "## Learning",
        _table(
            ("stage", "sampled tokens", "success", "from", "to", "consensus"),
            [
                (e["stage"], e["sampled_tokens"], *(_percent(e[k]) for k in ("success", "low", "high", "consensus")))
                for e in data["evals"]
            ],
        ),
        "## Trust region",
        _table(
            ("agent", "updates", "kept", "outside", "restored", "no signal", "back-offs", "largest upper KL / radius"),
            [_region_row(agent, data["updates"]) for agent in run["agents"]],
        ),
        _table(
            ("sampled estimate", "bias, radii", "error, radii", "flips", "flips near the edge"),
            [
                tuple(e[k] for k in ("name", "bias_in_radii", "rmse_in_radii", "flip_rate", "near_flip_rate"))
                for e in data["kl_reliability"]
            ],
        ),
        *_subsamples(data["kl_subsamples"]),
        "## Certificate",
        _table(
            ("certificate", "updates judged", "positive", "rank correlation", "violations", "not applicable: stale"),
            [
                tuple(c[k] for k in ("kind", "count", "positive", "rank_correlation", "violations", "not_applicable"))
                for c in ({"kind": kind, **found} for kind, found in data["certificates"].items())
            ],
        ),
        *_swaps(data["swaps"]),
        "## Accounting",
        _cost(data["cost"], run),
        "## How to reproduce",
        "```\n" + visible("\n".join(data["reproduce"]["commands"])).replace("```", "'''") + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def comparison_text(comparison: Data) -> str:
    """Several runs, as Markdown. Every value that a model or a file wrote is escaped."""
    tables = [_table(table.header, table.rows) for table in comparison_tables(comparison)]
    return "\n\n".join([*tables, *(f"> {in_markdown(note)}" for note in comparison["notes"])]) + "\n"


class Table(NamedTuple):
    """Cells are text on one line, in which nothing hides; for Markdown they are still to be escaped."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def comparison_tables(comparison: Data) -> list[Table]:
    """Several runs: what they came to, and the settings that differ, if any do."""
    runs = comparison["runs"]
    differences = {d["run"]: d for d in comparison["differences"]}
    rows = []
    for k, run in enumerate(runs):
        d = differences.get(k)
        final = None if run["final"] is None else run["final"]["success"]
        told = (
            (f"{100 * d['estimate']:+.1f}", f"{100 * d['low']:+.1f} to {100 * d['high']:+.1f}", d["basis"])
            if d
            else ("", "", "")
        )
        rows.append((run["label"], run["sampled_tokens"], _percent(final), *told))
    settings = [(s["key"], *("-" if v is None else v for v in s["values"])) for s in comparison["settings"]]
    tables = [
        (("run", "sampled tokens", "final success", "difference, points", "95 % interval", "paired by"), rows),
        (("setting that differs", *(run["label"] for run in runs)), settings),
    ]
    shown = ([[_on_one_line(_cell(x)) for x in row] for row in (header, *cells)] for header, cells in tables if cells)
    return [Table(lines[0], lines[1:]) for lines in shown]


def _region_row(agent: str, updates: Sequence[Data]) -> tuple[Any, ...]:
    own = [u for u in updates if u["agent"] == agent]
    kept = [u for u in own if was_kept(u["outcome"])]
    fills = [u["kl_upper"] / u["radius"] for u in kept if u["kl_upper"] is not None and u["radius"]]
    return (
        agent,
        len(own),
        len(kept),
        sum(u["outside"] for u in kept),
        sum(u["outcome"] == "restored" for u in own),
        sum(u["outcome"] == "skipped_no_signal" for u in own),
        sum(u["backtracks"] or 0 for u in own),
        max(fills, default=None),
    )


def _cost(cost: Data, run: Data) -> str:
    ratio = cost["overhead"]["token_ratio"]
    against = f", {ratio:.2f} times naive sequential training" if ratio else ""
    spent = [(agent, phase, s) for agent, phases in cost["seconds"].items() for phase, s in phases.items()]
    told = (
        f"{cost['sampled_tokens']:,} tokens sampled{against}; {cost['episodes']:,} episodes; {clock(run['seconds'])}."
    )
    return told + "\n\n" + _table(("agent", "phase", "seconds"), spent)


def _subsamples(subsamples: Sequence[Data]) -> list[str]:
    """Nothing where no update was probed."""
    keys = ("share", "median_in_radii", "p90_in_radii", "near_flip_rate", "exact_flip_rate")
    header = ("positions", "median error, radii", "P90, radii", "flips near the edge", "flips against exact")
    return [_table(header, [tuple(k[key] for key in keys) for k in subsamples])] if subsamples else []


def _swaps(swaps: Sequence[Data]) -> list[str]:
    """Nothing where no agent was replaced."""
    if not swaps:
        return []
    rows = [
        (
            s["agent"],
            s["stage"],
            " > ".join(s["models"]),
            s["mode"],
            *(_percent(s["success"].get(when, {}).get("success")) for when in ("before", "at_swap", "after")),
            *((s["alignment"] or {}).get(key) for key in ("kl_upper", "radius")),
            "certified" if s["certified"] else "uncertified",
        )
        for s in swaps
    ]
    header = ("agent", "stage", "model", "mode", "before", "as it came", "after", "held-out KL, upper", "radius", "")
    return ["## Swap", _table(header, rows)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _on_one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return "Nothing of this is in the log."
    cells = [[in_markdown(_cell(x)) for x in row] for row in (header, *rows)]
    widths = [max(len(row[c]) for row in cells) for c in range(len(header))]
    lines = ["| " + " | ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
