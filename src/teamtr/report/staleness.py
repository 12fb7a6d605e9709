"""What stored episodes tell about staleness: how far contexts and returns moved since the stage began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from teamtr.diagnostics.drift import Drift, context_drift
from teamtr.randomness import generator
from teamtr.report.reading import BatchFile
from teamtr.theory.certificates import Measured, measured_gain
from teamtr.types import RolloutBatch


@dataclass(frozen=True)
class StaleStep:
    """One update that had a batch of its own: what the batch of the stage's start would have shown it instead."""

    stage: int
    step: int
    agent: str
    drift: Drift | None
    """Of the contexts in which this agent speaks; None when it spoke in only one of the batches."""
    moved: Measured | None
    """The change of the mean return since the stage began, on the same problems."""

    def as_record(self) -> dict[str, object]:
        drift = None if self.drift is None else {**asdict(self.drift), "excess": self.drift.excess}
        return {**asdict(self), "drift": drift}


def stale_steps(
    files: Sequence[BatchFile], batches: Mapping[str, RolloutBatch], agents: Mapping[tuple[int, int], str], gamma: float
) -> list[StaleStep]:
    """Every batch of these that is not its stage's first, against that first. ``agents``: who was updated, by stage
    and step."""
    starts = {file.stage: batches[file.name] for file in files if file.step == 0 and file.name in batches}
    found = []
    for file in files:
        agent = agents.get((file.stage, file.step))
        if file.step == 0 or file.stage not in starts or file.name not in batches or agent is None:
            continue
        start, now = starts[file.stage], batches[file.name]
        drift = _drift(start, now, agent, generator(0, "drift", file.stage, file.step))
        found.append(StaleStep(file.stage, file.step, agent, drift, _moved(start, now, gamma)))
    return found


def _drift(start: RolloutBatch, now: RolloutBatch, agent: str, rng: np.random.Generator) -> Drift | None:
    heard = [batch.of(agent) for batch in (start, now)]
    before, after = ([context.tobytes() for context in own.prompts] for own in heard)
    problems = tuple(
        [batch.problems[p].id for p in own.problem_M] for batch, own in zip((start, now), heard, strict=True)
    )
    return context_drift(before, after, rng=rng, strata=(problems[0], problems[1])) if before and after else None


def _moved(start: RolloutBatch, now: RolloutBatch, gamma: float) -> Measured | None:
    same = [p.id for p in start.problems] == [p.id for p in now.problems]
    before_PG, after_PG = start.returns_PG(gamma), now.returns_PG(gamma)
    if not same or len(before_PG) < 2 or not (np.isfinite(before_PG).all() and np.isfinite(after_PG).all()):
        return None
    return measured_gain(before_PG, after_PG)
