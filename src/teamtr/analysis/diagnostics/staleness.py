"""Staleness from stored episodes: how far contexts and returns moved since the start of the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from teamtr.analysis.diagnostics.contexts import FORMS, Heard, finest_repeating, heard_by
from teamtr.analysis.diagnostics.drift import Drift, context_drift
from teamtr.batches import RolloutBatch
from teamtr.randomness import generator
from teamtr.team import Agent
from teamtr.theory.intervals import Measured, measured_gain


@dataclass(frozen=True)
class StaleStep:
    """One update with a batch of its own, compared with the first batch of its stage."""

    stage: int
    step: int
    agent: str
    drifts: Mapping[str, Drift]
    """D_occ of the contexts in which this agent speaks, by form; empty if it did not speak in both batches."""
    moved: Measured | None
    """The change of the mean return since the start of the stage, on the same problems."""

    @property
    def form(self) -> str | None:
        """The finest form in which at least half of the contexts repeat; None if there is none."""
        return finest_repeating([(form, drift.repeated) for form, drift in self.drifts.items()])

    def as_record(self) -> dict[str, object]:
        drifts = {
            form: {**asdict(drift), "excess": drift.excess, "corrected": drift.corrected}
            for form, drift in self.drifts.items()
        }
        return {**asdict(self), "drifts": drifts, "form": self.form, "drift": drifts.get(self.form or "")}


def stale_steps(
    batches: Mapping[tuple[int, int], RolloutBatch], updated: Mapping[tuple[int, int], Agent], gamma: float
) -> list[StaleStep]:
    """Compares every batch with the first batch of its stage. Both mappings are by stage and step; ``updated`` holds
    the updated agents."""
    found = []
    for (stage, step), now in batches.items():
        agent, start = updated.get((stage, step)), batches.get((stage, 0))
        if step == 0 or start is None or agent is None:
            continue
        drifts = context_drifts(heard_by(agent, start), heard_by(agent, now), stage, step)
        found.append(StaleStep(stage, step, agent.name, drifts, _moved(start, now, gamma)))
    return found


def context_drifts(before: Sequence[Heard], after: Sequence[Heard], stage: int, step: int) -> dict[str, Drift]:
    """D_occ by every form of contexts, each with the chance level within problems."""
    if not before or not after:
        return {}
    strata = [heard.problem for heard in before], [heard.problem for heard in after]
    return {
        form: context_drift(
            [reduce(heard) for heard in before],
            [reduce(heard) for heard in after],
            rng=generator(0, "drift", stage, step),
            strata=strata,
        )
        for form, reduce in FORMS.items()
    }


def _moved(start: RolloutBatch, now: RolloutBatch, gamma: float) -> Measured | None:
    same = [p.id for p in start.problems] == [p.id for p in now.problems]
    before_PG, after_PG = start.returns_PG(gamma), now.returns_PG(gamma)
    if not same or len(before_PG) < 2 or not (np.isfinite(before_PG).all() and np.isfinite(after_PG).all()):
        return None
    return measured_gain(before_PG, after_PG)
