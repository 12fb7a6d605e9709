"""The part of the staleness section on the choice before every update: new, reused or redrawn rollouts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from teamtr.analysis.diagnostics.reuse import UNHARMED, bias_of_redrawing, decisions, tokens_by_choice
from teamtr.analysis.report.parts import (
    Axis,
    Chart,
    Facts,
    Grid,
    Part,
    Series,
    Table,
    Toned,
    agent_color,
    dots,
    line,
)
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Answer, Data
from teamtr.analysis.report.words import NONE, num, percent, signed

ACTIONS = {"sample": "sampled anew", "reuse": "reused", "redraw": "redrawn in part"}
UPDATES = Axis("update", whole=True)
MOST_REASONS = 12
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


# -- compute ----------------------------------------------------------------------------------------------------------


def chosen_rollouts(run: Reading) -> dict[str, Any] | None:
    """Every decision, and their summary; None if the log has none."""
    found = decisions(run.updates)
    if not found:
        return None
    shares = [decision.share for decision in found if decision.share is not None]
    kept = [decision.kept for decision in found if decision.kept is not None]
    bias, tokens = bias_of_redrawing(found), tokens_by_choice(found)
    return {
        "decisions": [{**asdict(decision), "worn": decision.worn} for decision in found],
        "actions": {action: sum(decision.action == action for decision in found) for action in ACTIONS},
        "reweighted": any(decision.needed is not None for decision in found),
        "shares": len(shares),
        "worn": sum(decision.worn for decision in found),
        "mean_share": _mean(shares),
        "smallest_share": min(shares, default=None),
        "largest_cut": max(decision.cut for decision in found),
        "mean_kept": _mean(kept),
        "bias": None if bias is None else {**asdict(bias), "told": bias.told},
        "tokens": None if tokens is None else asdict(tokens),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# -- answer -----------------------------------------------------------------------------------------------------------


def answer_by_shares(question: str, chosen: Data, probes: str) -> Answer:
    """The answer for a plan that reuses rollouts: their effective share. ``probes`` is a sentence on probes, or ""."""
    later, worn, bias = chosen["shares"], chosen["worn"], chosen["bias"]
    used = sum(decision["worn"] and decision["action"] == "reuse" for decision in chosen["decisions"])
    how = "Reweighted" if chosen["reweighted"] else "As they are"
    text = (
        f"{how}, old rollouts were worth {percent(chosen['mean_share'])} of new ones on average and "
        f"{percent(chosen['smallest_share'])} at least (ESS/B): too little before {worn} of {later} later updates"
        f"{', which learned from them all the same' if used else ''}."
    )
    biased = bias is not None and bias["told"]
    told = f"Redrawing them is biased: redrawn less new reward {_interval(bias)}." if biased else ""
    # As with intervals, more than a tenth is taken as significant.
    harmed = not chosen["reweighted"] and chosen["mean_share"] < UNHARMED
    headline = "hardly" if worn <= 0.1 * later and not harmed else "somewhat" if worn <= 0.5 * later else "yes"
    if harmed:
        text += f" As they are, they cost success on average where their mean worth is below {percent(UNHARMED)}."
    tone: Any = "bad" if biased or used > 0.1 * later else "good" if headline == "hardly" else "plain"
    return Answer(question, tone, headline, " ".join(filter(None, (text, told, probes, other_choice(chosen)))))


def other_choice(chosen: Data | None) -> str:
    """The cost of sampling before every update, or only at the start of a stage; "" for what the run itself did."""
    if chosen is None or chosen["tokens"] is None:
        return ""
    spent, always, never = (chosen["tokens"][key] for key in ("spent", "always", "never"))
    return " ".join(
        f"Sampling {when} {num(tokens)} tokens ({num(tokens / spent)} times as many)."
        for when, tokens in (
            ("before every update would have taken about", always),
            ("only when a stage begins would have taken", never),
        )
        if tokens != spent
    )


# -- show -------------------------------------------------------------------------------------------------------------


def rollout_parts(chosen: Data, agents: Sequence[str]) -> list[Part]:
    charts = [_share_chart(chosen, agents)] if chosen["shares"] else []
    charts += [_token_chart(chosen)] if chosen["tokens"] else []
    charts += [_bias_chart(chosen, agents)] if chosen["bias"] else []
    reasons = _reasons(chosen["decisions"], with_shares=bool(chosen["shares"]))
    # The table is placed beside the last chart if their number is odd, otherwise below them.
    return [_facts(chosen), *([Grid([*charts, reasons])] if len(charts) % 2 else [Grid(charts), reasons])]


def _facts(chosen: Data) -> Facts:
    told = [
        Toned(f"{chosen['actions'][action]} {words}") for action, words in ACTIONS.items() if chosen["actions"][action]
    ]
    if chosen["shares"]:
        tone: Any = "bad" if chosen["worn"] and not chosen["reweighted"] else ""
        told.append(Toned(f"old rollouts worth {percent(chosen['smallest_share'])} at least", tone))
    if chosen["largest_cut"] > 5e-4:
        told.append(Toned(f"truncation cut {percent(chosen['largest_cut'], 1)} of the weights at most"))
    if chosen["mean_kept"] is not None:
        told.append(Toned(f"{percent(chosen['mean_kept'])} of the tokens stayed when redrawn"))
    if chosen["bias"]:
        told.append(Toned(f"bias of redrawing {_interval(chosen['bias'])}", "bad" if chosen["bias"]["told"] else ""))
    return Facts(tuple(told))


def _interval(measured: Data) -> str:
    return f"{signed(measured['estimate'])} ({signed(measured['lower'])} to {signed(measured['upper'])})"


def _tip(decision: Data) -> str:
    lines = [
        f"update {decision['update']}: {decision['agent']}, stage {decision['stage']}, step {decision['step']}",
        f"{ACTIONS.get(decision['action'], decision['action'])}: {decision['reason']}",
    ]
    if decision["share"] is not None:
        needed = f", needed {percent(decision['needed'], 1)}" if decision["needed"] else ""
        lines.append(f"ESS / B {percent(decision['share'], 1)}{needed}")
    if decision["cut"] > 5e-4:
        lines.append(f"truncation cut {percent(decision['cut'], 1)} of the weights")
    if decision["kept"] is not None:
        lines.append(f"{percent(decision['kept'], 1)} of the tokens stayed")
    if decision["bias"] is not None:
        lines.append(f"redrawn − new reward {_interval(decision['bias'])}")
    if decision["tokens"] is not None:
        lines.append(f"{num(decision['tokens'])} tokens sampled, all new {num(decision['tokens_anew'])}")
    return "\n".join(lines)


def _by_agent(rows: Sequence[Data], agents: Sequence[str], y: Any, **ends: Any) -> list[Series]:
    names = dict.fromkeys(row["agent"] for row in rows)
    return [
        dots(
            [row for row in rows if row["agent"] == name],
            "update",
            y,
            tip=_tip,
            color=agent_color(agents, name),
            label=name,
            **ends,
        )
        for name in names
    ]


def _share_chart(chosen: Data, agents: Sequence[str]) -> Chart:
    """A chart of every decision: existing rollouts at their effective share, new ones at one."""
    rows = chosen["decisions"]
    there = [row for row in rows if row["share"] is not None]
    sampled = [row for row in rows if row["action"] == "sample"]
    needed = {row["needed"] for row in there if row["needed"]}
    crossed = [row for row in there if row["action"] != "reuse"]
    steady = len(needed) == 1
    return Chart(
        "What the rollouts were still worth",
        UPDATES,
        Axis("ESS / B, %", percent=True, low=0, high=1),
        [
            *([] if steady else [line([row for row in there if row["needed"]], "update", "needed", color="radius")]),
            dots(sampled, "update", lambda row: 1.0, tip=_tip, color="faint"),
            *_by_agent(there, agents, "share"),
            dots(crossed, "update", "share", tip=_tip, color="exact", size=4.5, crosses=True),
        ],
        caption=_worth_caption(chosen["reweighted"]),
        levels=[(level, "") for level in needed] if steady else [],
        table=_worth_table(there),
    )


def _worth_caption(reweighted: bool) -> str:
    told = (
        "Before every update after a stage's first: the effective share of the rollouts that were there"
        f"{', reweighted to the team as it was then' if reweighted else ''}, counting episodes of groups with a "
        "signal. Grey, at 100 %: all new."
    )
    if not reweighted:
        return f"{told} Good: {percent(UNHARMED)} and more on average; below a half the rollouts describe another team."
    return (
        f"{told} Crossed out: not used as they were, but redrawn in part or sampled anew. Dashed: what the plan asks "
        "for. Good: near 100 %, and every dot under the line crossed out."
    )


def _worth_table(there: Sequence[Data]) -> Table:
    rows = []
    for name in dict.fromkeys(row["agent"] for row in there):
        own = [row for row in there if row["agent"] == name]
        done = Counter(row["action"] for row in own)
        shares = [row["share"] for row in own]
        counts = (num(done[action]) for action in ("reuse", "redraw", "sample"))
        rows.append((name, num(len(own)), percent(_mean(shares), 1), percent(min(shares), 1), *counts))
    return Table(("agent", "updates", "mean", "smallest", "reused", "redrawn", "sampled"), rows)


def _token_chart(chosen: Data) -> Chart:
    known = [row for row in chosen["decisions"] if row["tokens"] is not None]
    by_choice = {
        "spent": [row["tokens"] for row in known],
        "always": [row["tokens_anew"] for row in known],
        "never": [row["tokens_anew"] if row["step"] == 0 else 0 for row in known],
    }
    drawn = {
        key: [{"update": row["update"], "tokens": total} for row, total in zip(known, accumulate(each), strict=True)]
        for key, each in by_choice.items()
    }
    words = {"always": "before every update", "never": "when a stage begins", "spent": "this run"}
    colors = {"always": "agent-3", "never": "agent-0", "spent": "exact"}
    spent = chosen["tokens"]["spent"]
    return Chart(
        "Tokens sampled, and by the other choices",
        UPDATES,
        Axis("tokens so far", low=0),
        [line(drawn[key], "update", "tokens", color=colors[key], label=words[key]) for key in words],
        caption=(
            "This run beside one that samples before every update, and one that samples only when a stage begins, both "
            "estimated from the stage's newest whole batch. Good: near the lower line while the rollouts are still "
            "worth their weight."
        ),
        table=Table(
            ("sampling", "tokens", "beside this run"),
            [
                (words[key], num(tokens), f"{num(tokens / spent)} ×")
                for key in words
                for tokens in (chosen["tokens"][key],)
            ],
        ),
    )


def _bias_chart(chosen: Data, agents: Sequence[str]) -> Chart:
    measured = [row for row in chosen["decisions"] if row["bias"] is not None]
    ends = {end: lambda row, key=key: row["bias"][key] for end, key in (("low", "lower"), ("high", "upper"))}
    bias = chosen["bias"]
    return Chart(
        "Bias of redrawing",
        UPDATES,
        Axis("reward, redrawn − new"),
        _by_agent(measured, agents, lambda row: row["bias"]["estimate"], **ends),
        caption=(
            "What redrawn episodes earned beyond new ones of the same problems, which were played twice; 95 % "
            f"intervals over those problems. Mean of {num(bias['redraws'])}: {_interval(bias)}, Student's t over the "
            "redraws, which count alike. Good: intervals that hold zero; above it, updates have climbed on the very "
            "words that stayed."
        ),
        levels=[(0.0, "")],
        table=Table(
            ("", "redraws", "redrawn − new", "95 % interval"),
            [("mean", num(bias["redraws"]), signed(bias["estimate"]), _ends(bias))],
        ),
    )


def _ends(measured: Data) -> str:
    return f"{signed(measured['lower'])} to {signed(measured['upper'])}"


def _reasons(rows: Sequence[Data], *, with_shares: bool) -> Table:
    """A table of decisions and reasons with their counts. Reasons that differ only in numbers are merged."""
    groups: dict[tuple[str, str], list[Data]] = {}
    for row in rows:
        groups.setdefault((row["action"], _NUMBER.sub("…", row["reason"])), []).append(row)
    by_count = sorted(groups.items(), key=lambda group: -len(group[1]))[:MOST_REASONS]
    shares = " ESS / B: mean and smallest effective share of those that were there." if with_shares else ""
    return Table(
        ("rollouts, and why", "updates", *(("ESS / B", "smallest") if with_shares else ()), "tokens each"),
        [_reason(action, alike, group, with_shares) for (action, alike), group in by_count],
        title="Decisions by their reason",
        caption=(
            f"Where the rollouts of each update came from.{shares} Good: reused while they are worth much, new when "
            "they are not."
        ),
    )


def _reason(action: str, alike: str, group: Sequence[Data], with_shares: bool) -> tuple[str, ...]:
    reasons = {row["reason"] for row in group}
    shares = [row["share"] for row in group if row["share"] is not None]
    tokens = _mean([row["tokens"] for row in group if row["tokens"] is not None])
    return (
        f"{ACTIONS.get(action, action)}: {reasons.pop() if len(reasons) == 1 else alike}",
        num(len(group)),
        *((percent(_mean(shares), 1), percent(min(shares, default=None), 1)) if with_shares else ()),
        NONE if tokens is None else num(round(tokens)),
    )
