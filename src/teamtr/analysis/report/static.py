"""The static report: the data of a run, a sample of its conversations, and what only they can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr.analysis.diagnostics.probes import token_kls
from teamtr.analysis.report.conversations import batch_payload, choose_batches, choose_groups, mean_length
from teamtr.analysis.report.headlines import headlines
from teamtr.analysis.report.reading import BatchFile, Reading, read_run
from teamtr.analysis.report.spelling import speller
from teamtr.analysis.report.staleness import StaleStep, stale_steps
from teamtr.analysis.report.summary import summarise
from teamtr.records import whole
from teamtr.store import StoreError, read_episodes
from teamtr.team import Agent, visibility
from teamtr.types import RolloutBatch

MOST_BATCHES = 18
MOST_EPISODES_OF_A_BATCH = 128
MOST_TOKENS = 1_200_000
"""Of all conversations in a file: at five to eight bytes each, it stays well under 15 MB."""


@dataclass(frozen=True)
class Report:
    """``data`` is the summary; ``conversations`` the sampled batches by name."""

    data: Mapping[str, Any]
    conversations: Mapping[str, Mapping[str, Any]]


def build_report(
    run: Path | str | Reading,
    *,
    most_batches: int = MOST_BATCHES,
    most_episodes: int = MOST_EPISODES_OF_A_BATCH,
) -> Report:
    """Read a run folder and compute everything that its report shows."""
    reading = run if isinstance(run, Reading) else read_run(run)
    data = summarise(reading)
    chosen = choose_batches(reading.batches, most_batches)
    batches = _read_batches(chosen, data["notes"])
    data["staleness"] = [step.as_record() for step in _stale(reading, chosen, batches)] or None
    conversations = _conversations(reading, chosen, batches, most_episodes)
    for row in data["batches"]:
        held = conversations.get(row["name"])
        row["problems"] = None if held is None else [problem["id"] for problem in held["problems"]]
    data["sample"] = {
        "batches": len(conversations),
        "stored_batches": len(reading.batches),
        "episodes": sum(len(held["episodes"]) for held in conversations.values()),
        "rule": (
            f"whole stages (first, last and evenly spaced ones), up to {most_batches} batches; of a batch at most "
            f"{most_episodes} episodes (fewer when they are long) in whole groups: problems that can be followed "
            "across stages, the most mixed group, the lowest and the highest mean reward, groups with probed "
            "tokens, then evenly spaced ones"
        ),
    }
    data["example"] = _example(conversations)
    data["headlines"] = headlines(data)
    return Report(data, conversations)


def _example(conversations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Who said what in an episode of the last batch that is held, and how it was judged."""
    for held in reversed(list(conversations.values())):
        for episode in held["episodes"]:
            said = [{"who": message["who"], "text": message["text"]} for message in episode["said"]]
            return {"verdict": episode["verdict"], "said": said}
    return None


def _read_batches(files: list[BatchFile], notes: list[str]) -> dict[str, RolloutBatch]:
    batches = {}
    for file in files:
        try:
            batches[file.name] = read_episodes(file.path)
        except StoreError as error:
            notes.append(f"A batch is left out: {file.name} ({type(error.__cause__ or error).__name__}).")
    return batches


def _stale(reading: Reading, files: list[BatchFile], batches: Mapping[str, RolloutBatch]) -> list[StaleStep]:
    plan, team_file = reading.plan, reading.team_file
    if plan is None or team_file is None or plan.order.kind == "together":
        return []
    agents = {agent.name: Agent(agent.name, "", sees=visibility(agent.sees)) for agent in team_file.team.agents}
    updated = {}
    for update in reading.updates:
        stage, step, agent = whole(update, "stage"), whole(update, "step"), agents.get(str(update.get("agent")))
        if stage is not None and step is not None and agent is not None:
            updated[stage, step] = agent
    return stale_steps(files, batches, updated, plan.gamma)


def _conversations(
    reading: Reading, files: list[BatchFile], batches: Mapping[str, RolloutBatch], most_episodes: int
) -> dict[str, dict[str, Any]]:
    spell = speller(reading)
    followed: list[str] = []
    probed = token_kls(reading.updates)
    held = {}
    for file in [f for f in files if f.name in batches]:
        batch = batches[file.name]
        room = int(MOST_TOKENS / len(files) / max(mean_length(batch), 1.0))
        kls = probed.get((file.stage, file.step), {})
        groups = choose_groups(batch, min(most_episodes, room), followed, [episode for episode, _ in kls])
        followed = followed or [batch.problems[p].id for p in groups]
        held[file.name] = batch_payload(file, batch, groups, reading.plan, reading.limits, spell, kls)
    return held
