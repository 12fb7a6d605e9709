"""The Health section: whether the run has a learning signal, and advice if it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
)
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Answer, Data, Section, register
from teamtr.analysis.report.words import num, percent
from teamtr.records import decode_health, whole
from teamtr.reports import Health
from teamtr.training.advice import advise, untaught_share


@dataclass(frozen=True)
class _Figure:
    """A health figure of each agent, drawn over updates."""

    key: str
    title: str
    unit: str
    caption: str
    is_share: bool = False

    def words(self, value: float) -> str:
        return percent(value) if self.is_share else num(value)


_FIGURES = (
    _Figure(
        "cut",
        "Messages cut at the limit",
        "messages, %",
        "Good: few. A message that is cut has no end, and often no answer.",
        is_share=True,
    ),
    _Figure("mean", "Length of messages", "tokens", "Mean by agent. Good: as long as the task needs, and no longer."),
    _Figure("entropy", "Entropy", "nats per token", "Good: falls slowly, and not to 0 before success is high."),
)


def compute(run: Reading) -> Data:
    """A row for every update, and the latest advice on each figure from the last updates of all agents."""
    rows: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    advised: dict[str, dict[str, str]] = {}
    for update in run.updates:
        health, agent = decode_health(update), str(update.get("agent"))
        if health is None:
            continue
        rows.append({"update": whole(update, "update"), "agent": agent, **_row(health)})
        last.update({name: asdict(found) for name, found in health.agents.items()})
        advised[agent] = {advice.about: advice.text for advice in advise(health, agent, untaught_share(update))}
    latest = {about: text for own in advised.values() for about, text in own.items()}
    return {"health": {"rows": rows, "last": last, "advice": list(latest.values())}}


def _row(health: Health) -> dict[str, Any]:
    """The figures that are drawn; only these, because a log may have many updates."""
    return {
        "without_signal": health.without_signal,
        "unparsed": health.unparsed,
        "kl_share": health.kl_share,
        "cut": None if health.messages is None else health.messages.cut,
        "agents": {
            name: {figure.key: getattr(found, figure.key) for figure in _FIGURES}
            for name, found in health.agents.items()
        },
    }


def answer(data: Data) -> Answer:
    question, rows, advice = "Is the run healthy?", data["health"]["rows"], data["health"]["advice"]
    if not rows:
        return Answer(question, "plain", "not known", "No update of this log tells the health of its batch.")
    if not advice:
        return Answer(question, "good", "healthy", f"The last batches: {_told(rows[-1])}.")
    more = f" and {len(advice) - 1} more below" if len(advice) > 1 else ""
    return Answer(question, "bad", f"{len(advice)} to mend", f"{advice[0]}{more}.")


def show(data: Data) -> list[Part]:
    rows, advice, agents = data["health"]["rows"], data["health"]["advice"], data["run"]["agents"]
    if not rows:
        return []
    told = tuple(Toned(text, "bad") for text in advice) or (Toned("nothing to mend", "good"),)
    return [
        Facts(told),
        _by_agent(data["health"], agents),
        Grid(
            [
                *(_chart(figure, rows, agents) for figure in _FIGURES),
                _batches(rows),
            ]
        ),
    ]


def _told(row: Data) -> str:
    lengths = "" if row["cut"] is None else f"{percent(row['cut'])} of messages cut, "
    return f"{lengths}{percent(row['without_signal'])} of groups without signal, {percent(row['unparsed'])} unparsed"


def _by_agent(health: Data, agents: Sequence[str]) -> Table:
    rows, last = health["rows"], health["last"]
    steps = {row["agent"]: row["kl_share"] for row in rows}
    return Table(
        ("agent", "messages", "mean length", "p95", "limit", "cut", "entropy", "KL of radius", "reward"),
        [
            (
                name,
                num(found["messages"]),
                num(found["mean"]),
                num(found["p95"]),
                num(found["limit"]),
                percent(found["cut"]),
                num(found["entropy"]),
                percent(steps.get(name)),
                num(found["reward"]),
            )
            for name in [*agents, *(name for name in last if name not in agents)]
            if (found := last.get(name)) is not None
        ],
        title="The last batch",
        caption=(
            f"{_told(rows[-1])}. Lengths in tokens, entropy in nats per token by the sampler's own log-probabilities; "
            "the KL is the upper bound of the agent's last update; the reward is that of the episodes in which the "
            "agent spoke."
        ),
    )


def _chart(figure: _Figure, rows: Sequence[Data], agents: Sequence[str]) -> Chart:
    series = [
        dots(
            [
                {"agent": agent, "update": row["update"], "y": found[figure.key]}
                for row in rows
                if (found := row["agents"].get(agent))
            ],
            "update",
            "y",
            tip=lambda row: f"{row['agent']}, update {row['update']}: {figure.words(row['y'])}",
            color=agent_color(agents, agent),
            label=agent,
        )
        for agent in agents
    ]
    axis = Axis(figure.unit, percent=figure.is_share, low=0, high=1.0 if figure.is_share else None)
    return Chart(figure.title, Axis("update", whole=True), axis, series, figure.caption)


def _batches(rows: Sequence[Data]) -> Chart:
    def series(key: str, label: str, color: str) -> Series:
        return dots(
            rows,
            "update",
            key,
            tip=lambda row: f"update {row['update']}: {percent(row[key])} {label}",
            color=color,
            label=label,
        )

    return Chart(
        "What cannot teach",
        Axis("update", whole=True),
        Axis("share, %", percent=True, low=0, high=1),
        [series("without_signal", "groups without signal", "agent-0"), series("unparsed", "unparsed answers", "exact")],
        "Good: both low. A team that solves everything has no signal either.",
    )


register(
    Section(
        key="health",
        title="Health",
        place=5,
        lead="Can the team learn from what its agents say?",
        compute=compute,
        show=show,
        answer=answer,
    )
)
