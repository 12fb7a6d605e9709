"""A few conversations of a stage, as a table that every tracker can show."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from teamtr.batches import RolloutBatch
from teamtr.store import read_episodes
from teamtr.text import in_markdown, visible

COLUMNS = ("stage", "question", "conversation", "answer", "verdict", "reward")
LONGEST = 4000
"""Maximum number of characters of a cell."""


@dataclass(frozen=True)
class Table:
    """Rows with a value for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]


def conversations_of(run: Path, stage: int, most: int) -> Table:
    """At most ``most`` conversations of the stage's last stored batch: the first episode of each problem, then the
    second ones, and so on. Raises what reading the file raises; a stage without a stored batch has no rows."""
    form = re.compile(rf"stage-0*{stage}-step-\d+\.jsonl\.gz")
    folder = run / "episodes"
    files = sorted(file for file in folder.iterdir() if form.fullmatch(file.name) and not file.is_symlink())
    if not files:
        return Table(COLUMNS, ())
    batch = read_episodes(files[-1])
    return Table(COLUMNS, tuple(_row(stage, batch, place) for place in _chosen(batch)[:most]))


def _chosen(batch: RolloutBatch) -> list[int]:
    """Indices of episodes, in an order in which the first few cover many problems."""
    group = batch.group_size
    return sorted(range(len(batch.episodes)), key=lambda place: (place % group, place // group))


def _row(stage: int, batch: RolloutBatch, place: int) -> tuple[str | int | float, ...]:
    episode, problem = batch.episodes[place], batch.problems[place // batch.group_size]
    verdict = episode.verdict
    return (
        stage,
        _cell(problem.prompt),
        _cell("\n".join(f"{message.author}: {message.text}" for message in episode.messages)),
        _cell(episode.answer or ""),
        verdict.kind,
        verdict.reward,
    )


def _cell(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def in_markdown_table(table: Table) -> str:
    """The table as Markdown, with all cells escaped."""
    lines = [" | ".join(table.columns), " | ".join("---" for _ in table.columns)]
    lines += [" | ".join(in_markdown(str(value)) for value in row) for row in table.rows]
    return "".join(f"| {line} |\n" for line in lines)
