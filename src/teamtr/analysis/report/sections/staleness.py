"""The Staleness section: effective share of old rollouts, how they misjudge updates, and the cost of alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from teamtr.analysis.diagnostics.probes import probed, stale_gap_by_stage
from teamtr.analysis.diagnostics.staleness import stale_steps
from teamtr.analysis.report.parts import (
    Axis,
    Chart,
    Grid,
    Nothing,
    Part,
    Series,
    Table,
    agent_color,
    dots,
    line,
)
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.rollouts import answer_by_shares, chosen_rollouts, other_choice, rollout_parts
from teamtr.analysis.report.section import Answer, Data, Section, register
from teamtr.analysis.report.words import NONE, finite, num, percent, signed
from teamtr.records import mapping, whole
from teamtr.team import Agent, visibility

FORMS = {"identity": "word for word", "statements": "by what was stated", "agreement": "by who agrees with whom"}
STAGES = Axis("stage", whole=True)
APART = 0.12
"""Distance between the updates of one stage, as a share of the stage's width."""


# -- compute ----------------------------------------------------------------------------------------------------------


def compute(run: Reading) -> Data:
    return {"rollouts": chosen_rollouts(run), "probes": _probes(run), "staleness": _steps(run)}


def _probes(run: Reading) -> dict[str, Any] | None:
    found = probed(run.updates)
    if not found:
        return None
    by_stage = {stage: asdict(gap) for stage, gap in stale_gap_by_stage(found).items()}
    return {"updates": [asdict(one) for one in found], "by_stage": by_stage}


def _steps(run: Reading) -> list[dict[str, Any]] | None:
    """Staleness from the batches that were read; None if none were, or there is nothing to compare."""
    plan, team_file = run.plan, run.team_file
    if run.sample is None or plan is None or team_file is None or plan.order.kind == "together":
        return None
    agents = {agent.name: Agent(agent.name, "", sees=visibility(agent.sees)) for agent in team_file.team.agents}
    updated = {}
    for update in run.updates:
        if mapping(update, "rollouts").get("action") == "redraw":
            continue  # messages kept from an older batch do not show how far the team has moved
        stage, step, agent = whole(update, "stage"), whole(update, "step"), agents.get(str(update.get("agent")))
        if stage is not None and step is not None and agent is not None:
            updated[stage, step] = agent
    batches = {(file.stage, file.step): batch for file, batch in run.sample.batches}
    return [step.as_record() for step in stale_steps(batches, updated, plan.gamma)] or None


# -- answer -----------------------------------------------------------------------------------------------------------


def answer(data: Data) -> Answer:
    question = "Did it need fresh rollouts?"
    chosen, probes, steps = data["rollouts"], data["probes"], data["staleness"]
    if not any(update["kept"] for update in data["updates"]):
        text = "Rollouts grow old when an agent changes, and none changed: no update was kept."
        return Answer(question, "plain", "cannot be told", text)
    is_probed = bool(probes and probes["by_stage"])
    if chosen is not None and chosen["shares"]:
        return answer_by_shares(question, chosen, _misjudged_in_words(probes) if is_probed else "")
    if is_probed:
        found = _answer_by_probes(question, probes)
    elif steps:
        found = _answer_by_steps(question, steps, data["run"]["fresh"])
    else:
        text = "Not measured: it needs stored episodes of at least two steps of one stage (`teamtr report` reads them)."
        found = Answer(question, "plain", "not measured", text)
    cost = other_choice(chosen)
    return replace(found, text=f"{found.text} {cost}") if cost else found


def _answer_by_probes(question: str, probes: Data) -> Answer:
    """The answer from probes: how far stale rollouts misjudge updates, on batches that no update was trained on."""
    judged, told = _judged(probes)
    gap, noise = (sum(stage[key] for stage in probes["by_stage"].values()) / len(judged) for key in ("total", "noise"))
    shares = [probe["weights"]["effective_share"] for probe in judged if "effective_share" in probe["weights"]]
    worth = f" Reused, they were worth at least {percent(min(shares))} of as many fresh ones (ESS/B)." if shares else ""
    text = (
        f"In {len(told)} of {len(judged)} probed updates rollouts of the team that began the stage say something else "
        f"than fresh ones of what the update is worth (95 % intervals). They are {gap:.2g} apart on average, where "
        f"sampling alone would show {noise:.2g}.{worth}"
    )
    # One interval in twenty misses zero by chance; more than a tenth of them is taken as significant.
    return Answer(question, "plain", "somewhat" if len(told) > 0.1 * len(judged) else "hardly", text)


def _misjudged_in_words(probes: Data) -> str:
    judged, told = _judged(probes)
    return f"By probes they misjudge {len(told)} of {len(judged)} updates (95 % intervals)."


def _judged(probes: Data) -> tuple[list[Data], list[Data]]:
    """The probed updates with a stale gap, and those whose interval excludes zero."""
    judged = [probe for probe in probes["updates"] if probe["gap"] is not None]
    return judged, [probe for probe in judged if not probe["gap"]["lower"] <= 0.0 <= probe["gap"]["upper"]]


def _answer_by_steps(question: str, steps: Sequence[Data], fresh: bool | None) -> Answer:
    """The answer from stored episodes: how far contexts and returns moved within a stage."""
    seen = [s for s in steps if s["drift"] is not None and s["drift"]["repeated"] >= 0.5]
    moved = [s for s in steps if s["moved"] is not None and not s["moved"]["lower"] <= 0.0 <= s["moved"]["upper"]]
    largest = max(seen, key=lambda s: s["drift"]["excess"], default=None)
    if largest is None:
        contexts = "Contexts do not repeat, not even by what was stated in them, so their drift cannot be counted."
    elif largest["drift"]["excess"] < 0.005:
        contexts = "Within a stage contexts moved no more than chance moves them."
    else:
        moved_by = percent(largest["drift"]["excess"])
        how = "" if largest["form"] == "identity" else f", {FORMS[largest['form']]}"
        contexts = f"Within a stage the contexts of {largest['agent']} moved by up to {moved_by} beyond chance{how}."
    text = (
        f"{contexts} In {len(moved)} of {len(steps)} later steps the same problems already paid differently than at "
        f"the stage's start (95 % intervals).{' Every update here saw fresh ones.' if fresh else ''}"
    )
    # One interval in twenty misses zero by chance; more than a tenth of them is taken as significant.
    fooled = len(moved) > 0.1 * len(steps) or (largest is not None and largest["drift"]["excess"] > 0.05)
    return Answer(question, "plain", "somewhat" if fooled else "hardly", text)


# -- show -------------------------------------------------------------------------------------------------------------


def show(data: Data) -> list[Part]:
    agents = data["run"]["agents"]
    parts: list[Part] = []
    if data["rollouts"]:
        parts += rollout_parts(data["rollouts"], agents)
    if data["probes"]:
        parts.append(Grid(_probe_charts(data["probes"], agents)))
    if data["staleness"]:
        parts += [_drift_table(data["staleness"], data["probes"]), Grid(_step_charts(data["staleness"], agents))]
    nothing = (
        "This plan reuses rollouts, and its log does not say what they were still worth."
        if data["run"]["fresh"] is False
        else "Not measured here. teamtr report RUN reads the stored episodes of several stages and measures it."
    )
    return parts or [Nothing(nothing)]


def _by_agent(rows: Sequence[Data], agents: Sequence[str], draw: Callable[..., Series]) -> list[Series]:
    """One series per agent, in order of occurrence, made by ``draw(rows, name, color)``."""
    names = dict.fromkeys(row["agent"] for row in rows)
    return [draw([row for row in rows if row["agent"] == name], name, agent_color(agents, name)) for name in names]


def _place(row: Data) -> str:
    return f"{row['agent']}, stage {row['stage']}, step {row['step']}"


def _beside(row: Data) -> float:
    """The x position of an update: updates of one stage are placed side by side."""
    return float(row["stage"] + APART * row["step"])


def _probe_charts(probes: Data, agents: Sequence[str]) -> list[Chart]:
    judged = [probe for probe in probes["updates"] if probe["gap"] is not None]
    totals = [{"stage": int(stage), **gap} for stage, gap in probes["by_stage"].items()]
    return [
        Chart(
            "Stale gap of each probed update",
            STAGES,
            Axis("fresh − stale surrogate"),
            _by_agent(judged, agents, _gaps),
            caption=(
                "What new rollouts of the team before an update say it is worth, less what rollouts of the team that "
                "began the stage say, in units of the normalized advantage, with 95 % intervals over problems. No "
                "update learned from either batch. Good: intervals that hold zero."
            ),
            levels=[(0.0, "")],
        ),
        Chart(
            "Δ stale of each probed stage",
            STAGES,
            Axis("sum of |fresh − stale|", low=0),
            [
                line(totals, "stage", "noise", color="faint", label="by sampling alone"),
                line(totals, "stage", "total", color="agent-1", label="sum of the gaps' sizes"),
                dots(totals, "stage", "total", color="agent-1"),
            ],
            caption=(
                "Sizes add up even where nothing is stale: the faint line is what sampling alone would show. Good: the "
                "two lie together."
            ),
        ),
        Chart(
            "What the stage's first rollouts are still worth",
            STAGES,
            Axis("ESS / B, %", percent=True, low=0, high=1),
            _by_agent(judged, agents, _worth),
            caption=(
                "Effective share of the first rollouts when reweighted to the team before an update. Good: near 100 %: "
                "then reusing them costs little."
            ),
            nothing="No probe carried rollouts past an update.",
        ),
    ]


def _gaps(rows: Sequence[Data], agent: str, color: str) -> Series:
    return dots(
        rows,
        _beside,
        lambda p: p["gap"]["estimate"],
        low=lambda p: p["gap"]["lower"],
        high=lambda p: p["gap"]["upper"],
        tip=lambda p: (
            f"{_place(p)}\nsurrogate on fresh rollouts {signed(p['fresh'])}, on those of the stage's first team "
            f"{signed(p['stale'])}\ndifference {_interval(p['gap'])}"
        ),
        color=color,
        label=agent,
    )


def _worth(rows: Sequence[Data], agent: str, color: str) -> Series:
    def tip(probe: Data) -> str:
        weights = probe["weights"]
        told = ", ".join(
            [
                f"ESS / B {percent(weights.get('effective_share'), 1)}",
                *(f"{word} {num(weights.get(word.lower()))}" for word in ("P95", "P99")),
                f"largest {num(weights.get('largest'))}",
                f"above ten {percent(weights.get('above_ten'), 1)}",
            ]
        )
        moved, error = weights.get("total_variation"), weights.get("total_variation_error")
        within = "" if error is None else f" ± {num(1.96 * error, 2)}"
        return f"{_place(probe)}\n{told}" + (
            f"\ntotal variation of conversations {num(moved)}{within}" if finite(moved) else ""
        )

    return dots(rows, "stage", lambda p: p["weights"].get("effective_share"), tip=tip, color=color, label=agent)


def _drift_table(steps: Sequence[Data], probes: Data | None) -> Table:
    """D_occ in every form: those from counted contexts are lower bounds, the one from weights is an upper bound."""
    rows = []
    for form, words in FORMS.items():
        found = [s["drifts"][form] for s in steps if form in s["drifts"]]
        if found:
            mean = {key: sum(drift[key] for drift in found) / len(found) for key in found[0]}
            bounds = (num(mean["excess"]), num(mean["corrected"])) if mean["repeated"] >= 0.5 else (NONE, NONE)
            rows.append((words, percent(mean["repeated"]), num(mean["total_variation"]), num(mean["chance"]), *bounds))
    weighed = [p["weights"]["total_variation"] for p in (probes or {"updates": ()})["updates"] if _weighed(p)]
    if weighed:
        mean_weighed = num(sum(weighed) / len(weighed))
        rows.append(("by importance weights", "not needed", mean_weighed, NONE, NONE, "upper bound"))
    return Table(
        ("contexts compared", "repeat", "total variation", "by chance", "at least", "estimate"),
        rows,
        title="D_occ, by what is compared",
        caption=(
            "Means over the later updates of a stage. Counting sees only contexts that repeat, and a coarser form can "
            "only show less: at least: total variation less chance; estimate: chance taken out in quadrature, rough. "
            "The weights give the total variation between whole conversations, which no context can exceed. Good: near "
            "zero."
        ),
    )


def _weighed(probe: Data) -> bool:
    return "total_variation" in probe["weights"]


def _step_charts(steps: Sequence[Data], agents: Sequence[str]) -> list[Chart]:
    forms = "; ".join(FORMS[form] for form in dict.fromkeys(s["form"] for s in steps) if form) or "none does"
    counted = [s for s in steps if s["drift"]]
    return [
        Chart(
            "Drift of contexts within a stage",
            STAGES,
            Axis("total variation", low=0),
            [*_by_agent(counted, agents, _chance), *_by_agent(counted, agents, _drift)],
            caption=(
                "How much the contexts in which an agent speaks changed between stage start and its own update. Cross: "
                "what chance alone gives between two batches of one team. Dots on their crosses: stale rollouts would "
                f"have done. Contexts are compared by the finest form of which half repeat: here {forms}."
            ),
            nothing=(
                "No form of the contexts repeats often enough to be counted; where probes are logged, the weights tell."
            ),
        ),
        Chart(
            "Return moved since stage start",
            STAGES,
            Axis("change of mean return"),
            _by_agent([s for s in steps if s["moved"]], agents, _moved),
            caption=(
                "The same problems, played again before a later update (95 % interval). Away from zero: the stage's "
                "first batch was out of date, and by how much."
            ),
            levels=[(0.0, "")],
        ),
    ]


def _told(step: Data) -> str:
    drift = step["drift"]
    return (
        f"{_place(step)}\ntotal variation {num(drift['total_variation'])}, by chance {num(drift['chance'])}\n"
        f"{percent(drift['repeated'])} of contexts repeat, compared {FORMS[step['form']]}"
    )


def _chance(rows: Sequence[Data], agent: str, color: str) -> Series:
    return dots(rows, "stage", lambda s: s["drift"]["chance"], tip=_told, color=color, size=3.5, crosses=True)


def _drift(rows: Sequence[Data], agent: str, color: str) -> Series:
    return dots(rows, "stage", lambda s: s["drift"]["total_variation"], tip=_told, color=color, label=agent)


def _moved(rows: Sequence[Data], agent: str, color: str) -> Series:
    return dots(
        rows,
        _beside,
        lambda s: s["moved"]["estimate"],
        low=lambda s: s["moved"]["lower"],
        high=lambda s: s["moved"]["upper"],
        tip=lambda s: f"{_place(s)}: {_interval(s['moved'])}",
        color=color,
        label=agent,
    )


def _interval(measured: Data) -> str:
    return f"{signed(measured['estimate'])} ({signed(measured['lower'])} to {signed(measured['upper'])})"


register(
    Section(
        key="staleness",
        title="Staleness",
        place=40,
        lead="What old rollouts were still worth, what they hide, and what sampling at other times would have cost.",
        compute=compute,
        show=show,
        answer=answer,
    )
)
