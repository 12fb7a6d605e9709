"""The Rewards section: the composition of rewards, individual rewards of agents, and grader output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teamtr.analysis.report.parts import Axis, Chart, Code, Grid, Part, Text, agent_color, dots
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Data, Section, register
from teamtr.analysis.report.words import num
from teamtr.records import mapping, number, whole

LONGEST = 20_000
"""Maximum characters of grader output on a page; the last ones are kept."""


def compute(run: Reading) -> Data:
    """A row for every update whose rewards have parts, and all grader output."""
    rows: list[dict[str, Any]] = []
    printed: list[str] = []
    for update in run.updates:
        found, place = mapping(update, "rewards"), whole(update, "update")
        parts, agents = _numbers(mapping(found, "parts")), _numbers(mapping(found, "agents"))
        if parts or agents:
            rows.append({"update": place, "reward": number(update, "reward"), "parts": parts, "agents": agents})
        if text := str(found.get("printed", "")):
            printed.append(f"before update {place}:\n{text}")
    return {"rewards": {"rows": rows, "printed": "\n".join(printed)[-LONGEST:]}}


def _numbers(found: Data) -> dict[str, float]:
    return {str(name): value for name in found if (value := number(found, name)) is not None}


def show(data: Data) -> list[Part]:
    rows, printed, agents = data["rewards"]["rows"], data["rewards"]["printed"], data["run"]["agents"]
    charts: list[Chart] = []
    if names := list(dict.fromkeys(name for row in rows for name in row["parts"])):
        charts.append(
            _chart(
                "Parts of the reward",
                "parts",
                rows,
                names,
                [agent_color(names, name) for name in names],
                "Mean over the batch, each with its weight; together they are the reward. Good: the part that you care "
                "for rises, and not only one that is easy to earn.",
            )
        )
    if earning := [name for name in agents if any(name in row["agents"] for row in rows)]:
        charts.append(
            _chart(
                "What agents earned by themselves",
                "agents",
                rows,
                earning,
                [agent_color(agents, name) for name in earning],
                "Mean over the batch of the rewards that were given to an agent or to its turns.",
            )
        )
    shown: list[Part] = [Grid(charts)] if charts else []
    if printed:
        shown += [Text("What the grader printed:"), Code(printed)]
    return shown


def _chart(
    title: str, key: str, rows: Sequence[Data], names: Sequence[str], colors: Sequence[str], caption: str
) -> Chart:
    series = [
        dots(
            [{"update": row["update"], "y": row[key][name], "name": name} for row in rows if name in row[key]],
            "update",
            "y",
            tip=lambda row: f"{row['name']}, update {row['update']}: {num(row['y'])}",
            color=color,
            label=name,
        )
        for name, color in zip(names, colors, strict=True)
    ]
    return Chart(title, Axis("update", whole=True), Axis("reward"), series, caption)


register(
    Section(
        key="rewards",
        title="Rewards",
        place=16,
        lead="What are rewards made of?",
        compute=compute,
        show=show,
    )
)
