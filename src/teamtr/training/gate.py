"""The KL gate of an update: accepts a step within the radius, backtracks it, or restores the old weights.

The gate first checks some episodes of every problem, and all of them if those do not settle it. A step that does not
pass is moved back along the line to the old parameters, where the KL falls with the square of the step. If no candidate
passes, the old parameters are restored bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teamtr.answers import Divergence
from teamtr.ports import Learner, Snapshot
from teamtr.presets import Plan, Radii
from teamtr.randomness import generator
from teamtr.theory.control import backoff_fraction
from teamtr.theory.gain import gain_by_message
from teamtr.theory.intervals import SharedDraws, bootstrap_upper
from teamtr.training.batch import Optimization, TrainingBatch
from teamtr.types import Floats

FEWEST = 64
"""Minimum number of episodes in the first subsample."""
FIRST_DOUBT = 0.1
"""Share of the allowed error probability that the first subsample may use. It is small because a bootstrap bound of few
messages covers less than its nominal level: with skewed messages, two subsamples accept a KL at the radius up to 1.2
times as often as one would (``experiments/bound.py``)."""


@dataclass(frozen=True)
class Subsample:
    """The messages of whole episodes that a gate checks. ``episodes`` counts these episodes, including those in which
    the agent is silent."""

    rows: np.ndarray
    episodes: int


def subsamples_of(data: TrainingBatch, judge_M: NDArray[np.bool_], share: float, seed: int) -> tuple[Subsample, ...]:
    """Some episodes of every problem, equally many of each, then all episodes, which are checked if the first subsample
    does not settle the decision. Only the latter if the first would hold all messages, or none that judge the step."""
    problems, group = data.returns_PG.shape
    batch = data.messages
    everything = Subsample(np.arange(len(batch)), problems * group)
    wanted = max(int(np.ceil(share * group)), -(-FEWEST // problems))
    rng = generator(seed, "gate")
    chosen_PG = rng.permuted(np.tile(np.arange(group) < wanted, (problems, 1)), axis=1)
    rows = np.flatnonzero(chosen_PG.reshape(-1)[batch.episode_M])
    some = Subsample(rows, problems * wanted)
    enough = len(rows) < len(batch) and judge_M[rows].any()
    return (some, everything) if enough else (everything,)


@dataclass(frozen=True)
class GateCheck:
    """The measurements on one subsample; NaN if the divergence is not finite."""

    subsample: Subsample
    divergence: Divergence
    upper: float = float("nan")
    used: float = float("nan")  # mean KL in the unit of the radius
    gain: float = float("nan")  # since the fold began, on the messages that judge it
    gain_lower: float = float("nan")  # its lower bound over problems

    def inside(self, radius: float, *, last: bool) -> bool:
        """Whether the step is kept on the evidence of this subsample. The last subsample, all messages, needs a
        positive gain; an earlier one needs a positive lower bound of the gain, because near an optimum the surrogate of
        a few messages is positive by chance."""
        return self.upper <= radius and (self.gain if last else self.gain_lower) > 0.0


@dataclass(frozen=True)
class GateResult:
    accepted: bool
    reason: str
    subsample: Subsample
    divergence: Divergence
    upper: float
    used: float
    gain: float
    fraction: float
    backtracks: int
    reached: float  # KL of the first candidate, before backtracking; it steers the next update (see ``gate``)


@dataclass(frozen=True)
class Start:
    """Where a fold of the update starts and backtracking ends: the parameters, and the gain they already have."""

    parameters: Snapshot
    gain_M: Floats

    @staticmethod
    def frozen(parameters: Snapshot, data: TrainingBatch) -> Start:
        """The old policy, without any gain yet."""
        return Start(parameters, np.zeros(len(data.messages)))


def gate(
    learner: Learner,
    data: TrainingBatch,
    start: Start,
    judge_M: NDArray[np.bool_],
    plan: Plan,
    optimization: Optimization,
    radius: float,
    seed: int,
    *,
    moved: bool,
) -> GateResult:
    """Accept a step if the upper bound of its KL is within the radius and its surrogate is positive; else backtrack.

    Two checks are two chances of a wrong acceptance, so they share the allowed error probability. ``moved``: whether
    the optimizer steps changed the weights. ``judge_M``: the messages whose surrogate counts; the KL is over all
    messages. The KL reached by the first candidate steers the next update: its upper bound in plans with a gate, its
    mean over all messages where only beta holds it near the radius.
    """
    tried = learner.snapshot()
    share = 1.0 if plan.region.measures_all else optimization.gate_share
    subsamples = subsamples_of(data, judge_M, share, seed)
    if not moved:
        return _undone(learner, data, start, subsamples[-1], "the steps changed nothing", 0, 0.0)
    doubts = (1.0,) if len(subsamples) == 1 else (FIRST_DOUBT, 1.0 - FIRST_DOUBT)
    draws = SharedDraws(lambda: generator(seed, "bootstrap"))
    fraction, reached, reason = 1.0, 0.0, ""
    for attempt in range(optimization.max_backtracks + 1):
        for subsample, doubt in zip(subsamples, doubts, strict=True):
            confidence = 1.0 - doubt * (1.0 - optimization.confidence)
            checked = check_gate(learner, data, start, judge_M, subsample, plan.radii, confidence, draws)
            inside = checked.inside(radius, last=subsample is subsamples[-1])
            if inside or not plan.region.gate or not checked.divergence.finite():
                break
        if attempt == 0:
            reached = checked.upper if plan.region.gate else checked.used
        if inside or (checked.divergence.finite() and not plan.region.gate):
            return GateResult(
                True,
                "",
                subsample,
                checked.divergence,
                checked.upper,
                checked.used,
                checked.gain,
                fraction,
                attempt,
                reached,
            )
        reason = f"upper KL bound {checked.upper:.3g} against radius {radius:.3g}, surrogate {checked.gain:.3g}"
        fraction *= backoff_fraction(checked.upper, radius) if checked.upper > radius else 0.5
        learner.move(start.parameters, tried, fraction)
    return _undone(learner, data, start, subsamples[-1], reason, attempt, reached)


def _undone(
    learner: Learner,
    data: TrainingBatch,
    start: Start,
    subsample: Subsample,
    reason: str,
    attempt: int,
    reached: float,
) -> GateResult:
    learner.restore(start.parameters)
    unchanged = Divergence(*(np.zeros(len(data.messages)) for _ in range(4)))
    return GateResult(False, reason, subsample, unchanged, 0.0, 0.0, 0.0, 0.0, attempt, reached)


def check_gate(
    learner: Learner,
    data: TrainingBatch,
    start: Start,
    judge_M: NDArray[np.bool_],
    subsample: Subsample,
    radii: Radii,
    confidence: float,
    draws: SharedDraws,
) -> GateCheck:
    divergence = learner.measure(subsample.rows)
    if not divergence.finite():
        return GateCheck(subsample, divergence)
    kl_in_radius_units = data.kl_in_radius_units(divergence.full_M, radii, subsample.rows)
    upper = bootstrap_upper(
        kl_in_radius_units,
        data.messages.cluster_M[subsample.rows],
        weights_M=None if data.contexts_M is None else data.contexts_M[subsample.rows],
        confidence=confidence,
        rng=draws,
    )
    judges = judge_M[subsample.rows]
    gain_M = gain_by_message(divergence.log_ratio_M, data.advantages_M[subsample.rows]) - start.gain_M[subsample.rows]
    gain_lower = -bootstrap_upper(
        -gain_M[judges],
        data.messages.cluster_M[subsample.rows][judges],
        confidence=confidence,
        rng=draws,
    )
    used = data.mean(kl_in_radius_units, subsample.rows)
    return GateCheck(subsample, divergence, upper, used, float(gain_M[judges].mean()), gain_lower)
