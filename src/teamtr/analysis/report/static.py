"""The static report: the data of a run and a sample of its conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teamtr.analysis.diagnostics.probes import token_kls
from teamtr.analysis.report.conversations import batch_payload, choose_batches, choose_groups, mean_length
from teamtr.analysis.report.reading import BatchFile, Reading, Sample, read_run
from teamtr.analysis.report.spelling import speller
from teamtr.analysis.report.summary import summarise
from teamtr.batches import RolloutBatch
from teamtr.store import StoreError, TornRead, read_episodes

MOST_BATCHES = 18
MOST_EPISODES_OF_A_BATCH = 128
MOST_TOKENS = 1_200_000
"""Maximum tokens of all conversations in a file: at five to eight bytes each, it stays well under 15 MB."""


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
    """Read a run folder and compute the contents of its report."""
    reading = run if isinstance(run, Reading) else read_run(run)
    sample, notes = _read_sample(reading, most_batches, most_episodes)
    return Report(summarise(replace(reading, notes=(*reading.notes, *notes), sample=sample)), sample.held)


def _read_sample(reading: Reading, most_batches: int, most_episodes: int) -> tuple[Sample, list[str]]:
    """The sample of stored batches, and notes on batches that cannot be read."""
    batches, notes = _read_batches(choose_batches(reading.batches, most_batches))
    rule = (
        f"whole stages (first, last and evenly spaced ones), up to {most_batches} batches; of a batch at most "
        f"{most_episodes} episodes (fewer when they are long) in whole groups: problems that can be followed across "
        "stages, the most mixed group, the lowest and the highest mean reward, groups with probed tokens, then evenly "
        "spaced ones"
    )
    return Sample(batches, _held(reading, batches, most_episodes), rule), notes


def _read_batches(files: Sequence[BatchFile]) -> tuple[list[tuple[BatchFile, RolloutBatch]], list[str]]:
    """The batches that can be read, and notes on the others."""
    batches, notes = [], []
    for file in files:
        try:
            batches.append((file, read_episodes(file.path)))
        except (StoreError, TornRead) as error:
            notes.append(f"A batch is left out: {file.name} ({type(error.__cause__ or error).__name__}).")
    return batches, notes


def _held(
    reading: Reading, batches: Sequence[tuple[BatchFile, RolloutBatch]], most_episodes: int
) -> dict[str, dict[str, Any]]:
    spell = speller(reading)
    followed: list[str] = []
    probed = token_kls(reading.updates)
    held = {}
    for file, batch in batches:
        room = int(MOST_TOKENS / len(batches) / max(mean_length(batch), 1.0))
        kls = probed.get((file.stage, file.step), {})
        groups = choose_groups(batch, min(most_episodes, room), followed, [episode for episode, _ in kls])
        followed = followed or [batch.problems[p].id for p in groups]
        held[file.name] = batch_payload(file, batch, groups, reading.plan, reading.limits, spell, kls)
    return held
