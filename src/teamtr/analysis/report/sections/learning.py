"""The Learning section: the team's improvement, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from teamtr.analysis.diagnostics.coordination import coordination
from teamtr.analysis.diagnostics.stability import stability
from teamtr.analysis.report.parts import Axis, Chart, Grid, Part, Table, band, dots, line
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Answer, Data, Section, register
from teamtr.analysis.report.words import finite, num, percent, points
from teamtr.text import counted

MANY = 30
"""With more evaluations than this, only the band shows their intervals."""


def compute(run: Reading) -> Data:
    return {
        "stability": asdict(stability(run.updates, run.evals)),
        "coordination": [{**asdict(c), "alone": c.alone} for c in coordination(run.evals)],
    }


def answer(data: Data) -> Answer:
    question, evals = "Does it improve?", data["evals"]
    if len(evals) >= 2:
        first, last = _ends(evals)
        gained = 100 * (last["success"] - first["success"])
        same = first["problem_set"] == last["problem_set"]
        sure = same and None not in (first["high"], last["low"]) and last["low"] > first["high"]
        worse = same and None not in (first["low"], last["high"]) and last["high"] < first["low"]
        verdict = "" if sure or worse else " The intervals overlap: more held-out problems would tell."
        verdict = verdict if same else " They asked different problems, which may be harder or easier."
        text = (
            f"Held-out success went from {percent(first['success'])}{_range(first)} to {percent(last['success'])}"
            f"{_range(last)} in {counted((last['stage'] or 0) - (first['stage'] or 0), 'stage')}.{verdict}"
        )
        text += _best(data["run"], last)
        return Answer(question, "good" if sure else "bad" if worse else "plain", f"{gained:+.0f} points", text)
    rewards = [u["reward"] for u in data["updates"] if u["reward"] is not None]
    if len(rewards) >= 2:
        text = f"The reward of training batches went from {rewards[0]:.3f} to {rewards[-1]:.3f}; "
        return Answer(question, "plain", f"{rewards[-1] - rewards[0]:+.3f} reward", text + "evaluations are missing.")
    return Answer(question, "plain", "not known", "There are too few evaluations and updates to tell.")


def _ends(evals: Sequence[Data]) -> tuple[Data, Data]:
    """The first and the last evaluation on the same problems; the first of all if no other asked those of the last."""
    same = [e for e in evals if e["problem_set"] == evals[-1]["problem_set"]]
    return (same if len(same) > 1 else evals)[0], evals[-1]


def _best(run: Data, last: Data) -> str:
    """Sentences on a best checkpoint that is not the last, and on early stopping."""
    best, told = run["best"], ""
    if best is not None and best["success"] > last["success"]:
        told = f" Checkpoint {best['updates']} (stage {best['stage']}) was best, with {percent(best['success'])}."
    return told + (" The run was stopped early by eval.patience." if run["stopped_early"] else "")


def show(data: Data) -> list[Part]:
    evals = data["evals"]
    compared = [_first_and_last(evals, data["stability"])] if evals else []
    return [_success(evals, data["updates"]), Grid([*compared, _coordination(data["coordination"])])]


def _success(evals: Sequence[Data], updates: Sequence[Data]) -> Chart:
    held_out, x, many = "good-line", "sampled_tokens", len(evals) > MANY
    exact = line(updates, "sampled_tokens_total", "exact_success", color="exact", label="exact")
    confidence = (evals[0]["confidence"] if evals else None) or 0.95
    rows = [
        (
            num(e["stage"]),
            num(e["sampled_tokens"]),
            *(percent(e[k], 1) for k in ("success", "low", "high", "consensus")),
        )
        for e in evals
    ]
    return Chart(
        "Success over sampled tokens",
        Axis("tokens sampled for training", low=0),
        Axis("success, %", percent=True, low=0, high=1),
        [
            dots(
                updates,
                "sampled_tokens_total",
                "success",
                tip=lambda u: f"training batch before update {u['update']} ({u['agent']}): {percent(u['success'], 1)}",
                color="faint",
                label="training batches",
                size=1.8,
            ),
            *([exact] if exact.x else []),
            band(evals, x, "low", "high", color=held_out),
            line(evals, x, "success", color=held_out),
            dots(
                evals,
                x,
                "success",
                low=None if many else "low",
                high=None if many else "high",
                tip=lambda e: (
                    f"stage {e['stage']}: {percent(e['success'], 1)}{_range(e)}\n"
                    f"{num(e['sampled_tokens'])} sampled tokens"
                ),
                color=held_out,
                label=f"held-out, {percent(confidence)} interval over problems",
                size=2.5 if many else 4,
            ),
        ],
        caption=(
            "Good: the held-out line rises and its band leaves the band it started in. Training dots far above it mean "
            "memorised problems."
        ),
        table=Table(("stage", "sampled tokens", "success", "from", "to", "consensus"), rows),
        height=290,
    )


def _first_and_last(evals: Sequence[Data], stable: Data) -> Table:
    first, last = _ends(evals)
    passed = [k for k in last["pass_at_k"] if k != "1"]
    noise = f", where sampling alone would show {num(stable['noise'])}" if finite(stable["noise"]) else ""
    return Table(
        ("measure", "first", "last"),
        [
            (f"avg@{first['samples']}", percent(first["success"], 1), percent(last["success"], 1)),
            *((f"pass@{k}", percent(first["pass_at_k"].get(k), 1), percent(last["pass_at_k"][k], 1)) for k in passed),
            *(
                (f"pass^{k}", percent(first["pass_hat_k"].get(k), 1), percent(last["pass_hat_k"][k], 1))
                for k in last["pass_hat_k"]
                if k != "1"
            ),
            ("majority", percent(first["majority"], 1), percent(last["majority"], 1)),
            ("consensus on correct", percent(first["consensus"], 1), percent(last["consensus"], 1)),
        ],
        title="First and last evaluation",
        caption=(
            f"{num(last['problems'])} problems × {num(last['samples'])} samples. Stability (standard deviation of "
            f"improvements between evaluations, lower is better): {num(stable['deviation'])}{noise}; of "
            f"{stable['judged']} updates whose gain was measured, {stable['regressing']} lowered it with the whole "
            "interval (about one in forty would by chance)."
        ),
    )


def _coordination(rows: Sequence[Data]) -> Chart:
    color = "agent-4"
    return Chart(
        "Coordination",
        Axis("stage", whole=True),
        Axis("episodes, %", percent=True, low=0, high=1),
        [
            line(rows, "stage", "consensus", color=color),
            dots(
                rows,
                "stage",
                "consensus",
                tip=lambda c: f"stage {c['stage']}: every statement right in {percent(c['consensus'], 1)}",
                color=color,
            ),
        ],
        caption="Episodes in which every agent that states an answer states the right one. Good: rises with success.",
        nothing="No evaluation recorded what the agents stated.",
    )


def _range(row: Data) -> str:
    return "" if None in (row["low"], row["high"]) else f" ({points(row['low'])} to {points(row['high'])})"


register(
    Section(
        key="learning",
        title="Learning",
        place=10,
        lead="Success on held-out problems, against what it cost to get there.",
        compute=compute,
        show=show,
        answer=answer,
    )
)
