"""The Critic section: the critic's accuracy on the returns of each batch before training on them, in plans with one."""

from __future__ import annotations

from teamtr.analysis.report.parts import Axis, Chart, Grid, Part, Series, Text, agent_color, dots
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Data, Section, register
from teamtr.analysis.report.words import num
from teamtr.records import Record, mapping, number, whole


def compute(run: Reading) -> Data:
    return {"critic": [_row(update, found) for update in run.updates if (found := mapping(update, "critic"))]}


def _row(update: Record, found: Record) -> Data:
    return {
        "update": whole(update, "update"),
        "agent": str(update.get("agent")),
        **{name: number(found, name) for name in ("explained_variance", "value_error", "loss", "clip_rate")},
    }


def show(data: Data) -> list[Part]:
    rows, agents = data["critic"], data["run"]["agents"]
    if not rows:
        return []

    def by_agent(name: str) -> list[Series]:
        return [
            dots(
                [row for row in rows if row["agent"] == agent],
                "update",
                name,
                tip=lambda row: f"{row['agent']}, update {row['update']}: {num(row[name])}",
                color=agent_color(agents, agent),
                label=agent,
            )
            for agent in agents
        ]

    updates = Axis("update", whole=True)
    explained = Chart(
        "Explained variance",
        updates,
        Axis("share of the returns' variance", high=1.0),
        by_agent("explained_variance"),
        caption="Good: rises from 0 towards 1. Below 0: a constant would have been the better critic.",
        levels=[(0.0, "a constant")],
        nothing="All returns of every batch were equal.",
    )
    error = Chart(
        "Error of the values",
        updates,
        Axis("root mean square, reward", low=0),
        by_agent("value_error"),
        caption="Good: falls to what chance leaves. Before the critic learned from the batch.",
    )
    return [
        Grid([explained, error]),
        Text(
            "Values are compared with the returns that the critic learns from, token by token, on the batch of each "
            "update and before any step on it. A critic that explains nothing leaves the advantages right on average "
            "with plan.gae_lambda: 1, and only noisier; below 1 its errors are part of them."
        ),
    ]


register(
    Section(
        key="critic",
        title="Critic",
        place=27,
        lead="Does the critic know what an episode will be worth?",
        compute=compute,
        show=show,
    )
)
