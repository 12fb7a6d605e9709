"""Whether training is steady: the spread of stage gains, and the updates that lowered the return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.diagnostics.records import Record, accepted, number, whole
from teamtr.diagnostics.tracking import gains


@dataclass(frozen=True)
class Stability:
    """``deviation`` is the paper's Stability (tab:ablation): the standard deviation of per-stage improvements of the
    return, lower is better; None with fewer than two improvements. ``judged`` updates have a known gain; of these
    ``regressing`` lowered it with their whole interval below zero (of 95 % intervals, one in forty by chance)."""

    improvements: tuple[float, ...]
    deviation: float | None
    worst: float | None
    judged: int
    regressing: int


def stability(updates: Sequence[Record]) -> Stability:
    """A stage's return is the mean reward of its first batch, so that an improvement is between stage starts."""
    starts = {}
    for update in updates:
        stage, reward = whole(update, "stage"), number(update, "reward")
        if stage is not None and reward is not None and whole(update, "step") == 0:
            starts[stage] = reward
    pairs = [(starts[stage], starts[stage + 1]) for stage in sorted(starts) if stage + 1 in starts]
    improvements = tuple(after - before for before, after in pairs)
    kept = {whole(update, "update") for update in updates if accepted(update)}
    judged = [gain for update, gain in gains(updates).items() if update in kept]
    return Stability(
        improvements=improvements,
        deviation=float(np.std(improvements, ddof=1)) if len(improvements) > 1 else None,
        worst=min(improvements) if improvements else None,
        judged=len(judged),
        regressing=sum(gain.upper < -1e-9 for gain in judged),
    )
