"""The Accounting section: use of tokens and time, and the overhead of fresh rollouts over naive sequential training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from teamtr.analysis.diagnostics.accounting import overhead, spent_by_agent
from teamtr.analysis.report.parts import Facts, Grid, Part, Table, Text, Toned
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Answer, Data, Section, register
from teamtr.analysis.report.words import NONE, clock, num
from teamtr.records import Record, mapping, number, whole
from teamtr.text import counted

Spent = Mapping[str, Mapping[str, float]]
"""Tokens or seconds by agent and phase."""


def compute(run: Reading) -> Data:
    updates = run.updates
    tokens, seconds = mapping(run.account, "tokens"), mapping(run.account, "seconds")
    found = overhead(updates, seconds or None)
    last: Record = updates[-1] if updates else {}
    cost = {
        "complete": bool(seconds),
        "tokens": _numbers(tokens) or spent_by_agent(updates, "tokens"),
        "seconds": _numbers(seconds) or spent_by_agent(updates, "seconds"),
        "sampled_tokens": whole(last, "sampled_tokens_total") or 0,
        "episodes": whole(last, "episodes_total") or 0,
        "eval_tokens": sum(whole(r, "tokens") or 0 for r in run.evals),
        "eval_seconds": sum(number(r, "seconds") or 0.0 for r in run.evals),
        "overhead": {**asdict(found), "token_ratio": found.token_ratio, "seconds_ratio": found.seconds_ratio},
    }
    return {"cost": cost, "budget": _budget(run, last), "lost": _lost(run), "warmup": _warmup(run)}


def _warmup(run: Reading) -> list[dict[str, Any]]:
    """The warm-up of each agent before the first stage."""
    begun = [mapping(record, "warmup") for record in run.records if record.get("kind") == "start"]
    return [
        {
            "agent": agent,
            "source": str(mapping(found, agent).get("source")),
            **{name: whole(mapping(found, agent), name) for name in ("examples", "steps", "tokens")},
            **{name: number(mapping(found, agent), name) for name in ("loss_before", "loss_after", "seconds")},
        }
        for found in begun
        for agent in found
    ]


def _lost(run: Reading) -> list[dict[str, Any]]:
    """Engines lost during the run: where the run resumed, the reason, and the seconds of work that were repeated."""
    resumed = [(record, mapping(record, "lost")) for record in run.records if record.get("kind") == "resume"]
    return [
        {
            "updates": whole(record, "updates"),
            "why": str(lost.get("why")),
            "seconds": number(lost, "seconds"),
            "load": number(mapping(record, "seconds"), "load"),
        }
        for record, lost in resumed
        if lost
    ]


def _budget(run: Reading, last: Record) -> dict[str, Any] | None:
    """The budget spent and the budget that the run was matched to; None if nothing was matched, or an agent was
    replaced since, which ends the match.

    The tokens of the reference team are not known: its messages are assumed to be as long as this run's on average.
    """
    begun = [mapping(record, "budget") for record in run.records if record.get("kind") in ("start", "resume", "swap")]
    if not begun or not begun[-1]:
        return None
    planned, reference = mapping(begun[-1], "planned"), mapping(begun[-1], "reference")
    spent = {"rollouts": whole(last, "episodes_total") or 0, "updates": whole(last, "update") or 0}
    tokens, episodes = whole(last, "sampled_tokens_total") or 0, spent["rollouts"]
    rollouts, messages, theirs = number(planned, "rollouts"), number(planned, "messages"), number(reference, "messages")
    token_rate = tokens * rollouts / messages / episodes if rollouts and messages and episodes else None
    return {
        "match": str(begun[-1].get("match")),
        "sizes": {name: whole(begun[-1], name) for name in ("stages", "problems", "group_size")},
        "rows": [
            {"what": what, "spent": spent[what], "planned": whole(planned, what), "reference": whole(reference, what)}
            for what in spent
        ],
        "tokens": {
            "spent": tokens,
            "planned": None if token_rate is None or messages is None else round(token_rate * messages),
            "reference": None if token_rate is None or theirs is None else round(token_rate * theirs),
        },
    }


def _numbers(table: Mapping[str, object]) -> Spent:
    spent = {agent: mapping(table, agent) for agent in table}
    return {agent: {p: number(phases, p) or 0.0 for p in phases} for agent, phases in spent.items() if phases}


def answer(data: Data) -> Answer:
    cost = data["cost"]
    tokens, seconds = cost["overhead"]["token_ratio"], cost["overhead"]["seconds_ratio"]
    against = ""
    if tokens is not None and tokens > 1.001:
        when = "Sampling within stages" if data["run"]["fresh"] is False else "Sampling anew before every update"
        against = f" {when} took {tokens:.2f} times the tokens of naive sequential training"
        against += f" and about {seconds:.2f} times its time." if seconds else "."
    updates, episodes = counted(len(data["updates"]), "update"), counted(cost["episodes"], "episode")
    told = f"{updates} in {clock(data['run']['seconds'])}, {episodes}.{against}"
    return Answer("What did it cost?", "plain", f"{cost['sampled_tokens']:,} tokens", told)


def show(data: Data) -> list[Part]:
    cost = data["cost"]
    tokens, seconds = cost["overhead"]["token_ratio"], cost["overhead"]["seconds_ratio"]
    facts = [f"{num(cost['sampled_tokens'])} tokens sampled", f"{num(cost['episodes'])} episodes"]
    facts += [f"{tokens:.2f} × the tokens of naive sequential"] if tokens else []
    facts += [f"about {seconds:.2f} × its time"] if seconds else []
    incomplete = "" if cost["complete"] else "Without a checkpoint the log alone tells no sampling by agent. "
    return [
        Facts(tuple(map(Toned, facts))),
        Grid(
            [
                _by_agent("Tokens by agent and phase", cost["tokens"], lambda x: num(round(x))),
                _by_agent("Seconds by agent and phase", cost["seconds"], lambda x: num(round(x, 2), 4)),
            ]
        ),
        *_shown_warmup(data["warmup"]),
        *_matched(data["budget"]),
        *_shown_losses(data["lost"]),
        Text(
            f"{incomplete}Overhead: naive sequential training samples once a stage, so it is charged the tokens of "
            "each stage's first step; its time is ours less the same share of sampling. Evaluations are apart: "
            f"{num(cost['eval_tokens'])} tokens, {clock(cost['eval_seconds'])}."
        ),
    ]


def _shown_warmup(warmup: Sequence[Mapping[str, Any]]) -> list[Part]:
    if not warmup:
        return []
    rows = [
        (
            one["agent"],
            one["source"],
            *(_whole(one[name]) for name in ("examples", "steps", "tokens")),
            f"{num(one['loss_before'])} → {num(one['loss_after'])}",
            clock(one["seconds"]),
        )
        for one in warmup
    ]
    return [
        Table(
            ("agent", "examples from", "examples", "steps", "tokens", "loss, nats per token", "time"),
            rows,
            title="Warm-up",
            caption="Supervised training on worked examples before the first stage, outside of any trust region. Its "
            "tokens (prompts and completions) are no sampled tokens; success before the first update is that of the "
            "team that was warmed up.",
        )
    ]


def _shown_losses(lost: Sequence[Mapping[str, Any]]) -> list[Part]:
    if not lost:
        return []
    rows = [(_whole(one["updates"]), one["why"], clock(one["seconds"]), clock(one["load"])) for one in lost]
    return [
        Table(
            ("after update", "what was lost", "work done again", "to load anew"),
            rows,
            title="Workers that were lost",
            caption="Each time the run went on from its last commit: what it found is what it would have found anyway.",
        )
    ]


def _matched(budget: Mapping[str, Any] | None) -> list[Part]:
    if budget is None:
        return []
    counts = [(row["what"], *(_whole(row[key]) for key in ("spent", "planned", "reference"))) for row in budget["rows"]]
    tokens = budget["tokens"]
    about = ("tokens", _whole(tokens["spent"]), *(f"about {_whole(tokens[key])}" for key in ("planned", "reference")))
    sizes = budget["sizes"]
    return [
        Table(
            ("", "spent so far", "by the end", "the preset teamtr"),
            [*counts, about],
            title=f"Matched budget (plan.match: {budget['match']})",
            caption=(
                f"{counted(sizes['stages'], 'stage')}, batches of {counted(sizes['problems'], 'problem')} x "
                f"{sizes['group_size']} episodes. Good: the last two columns agree in the row that is matched. "
                "Rollouts and updates follow from the settings; tokens are this run's per message, times the messages "
                "of each."
            ),
        )
    ]


def _whole(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _by_agent(title: str, spent: Spent, form: Callable[[float], str]) -> Table:
    phases = list(dict.fromkeys(phase for row in spent.values() for phase in row))
    rows = [
        (agent, *(form(row[p]) if p in row else NONE for p in phases), form(sum(row.values())))
        for agent, row in spent.items()
    ]
    total = [sum(row.get(phase, 0.0) for row in spent.values()) for phase in phases]
    return Table(("", *phases, "all"), [*rows, ("all", *map(form, total), form(sum(total)))], title=title)


register(
    Section(
        key="cost",
        title="Accounting",
        place=80,
        lead="Where tokens and time went.",
        compute=compute,
        show=show,
        answer=answer,
    )
)
