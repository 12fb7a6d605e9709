"""The gate of an update: is the exact KL of the tried parameters within the radius?

It looks at some episodes of every problem first, and at all of them where those do not settle it. Outside, it moves
back along the line to the old parameters, where KL falls with the square of the step, and restores them bit for bit
when nothing is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teamtr.ports import Learner
from teamtr.presets import Radii, Region
from teamtr.randomness import generator
from teamtr.theory.control import backoff_fraction
from teamtr.theory.intervals import bootstrap_upper
from teamtr.theory.surrogate import gain_by_message
from teamtr.training.batch import Lesson, Optimisation
from teamtr.types import Divergence, Floats

FEWEST = 64
"""Episodes that the first look takes at least."""
FIRST_DOUBT = 0.1
"""Share of the allowed doubt that the first look may use. Small, because a bootstrap bound of few messages covers less
than it says: with skewed messages, two looks accept a KL at the radius up to 1.2 times as often as one would
(``experiments/bound.py``)."""


@dataclass(frozen=True)
class Look:
    """Messages of whole episodes that a gate looks at; ``episodes`` counts those, silent ones among them."""

    rows: np.ndarray
    episodes: int


def looks_at(lesson: Lesson, judge_M: NDArray[np.bool_], share: float, seed: int) -> tuple[Look, ...]:
    """Some episodes of every problem, equally many of each, then all: the second look is for what the first does not
    settle."""
    problems, group = lesson.returns_PG.shape
    batch = lesson.batch
    everything = Look(np.arange(len(batch)), problems * group)
    wanted = max(int(np.ceil(share * group)), -(-FEWEST // problems))
    rng = generator(seed, "gate")
    chosen_PG = rng.permuted(np.tile(np.arange(group) < wanted, (problems, 1)), axis=1)
    rows = np.flatnonzero(chosen_PG.reshape(-1)[batch.episode_M])
    some = Look(rows, problems * wanted)
    enough = len(rows) < len(batch) and judge_M[rows].any()
    return (some, everything) if enough else (everything,)


@dataclass(frozen=True)
class Seen:
    """What one look found; not finite where the divergence is not."""

    look: Look
    divergence: Divergence
    upper: float = float("nan")
    used: float = float("nan")  # mean KL in the unit of the radius
    gain: float = float("nan")  # since the leg began, on the messages that judge it
    gain_lower: float = float("nan")  # its lower bound over problems

    def inside(self, radius: float, *, last: bool) -> bool:
        """Whether this look settles that the step is kept. Some messages must show that it gains, all of them only
        that it does not lose: near the top a surrogate of few messages is above zero by luck."""
        return self.upper <= radius and (self.gain if last else self.gain_lower) > 0.0


@dataclass(frozen=True)
class Kept:
    accepted: bool
    reason: str
    look: Look
    divergence: Divergence
    upper: float
    used: float
    gain: float
    fraction: float
    backtracks: int
    reached: float  # KL of the candidate before any backing off, as it steers the next update: see ``gate``


@dataclass(frozen=True)
class Start:
    """Where a leg of the update begins, and the way back ends: parameters, and the surrogate they already gained."""

    parameters: Any
    gain_M: Floats

    @staticmethod
    def frozen(parameters: Any, lesson: Lesson) -> Start:
        """At the old policy: nothing was gained yet."""
        return Start(parameters, np.zeros(len(lesson.batch)))


def gate(
    learner: Learner,
    lesson: Lesson,
    start: Start,
    judge_M: NDArray[np.bool_],
    region: Region,
    radii: Radii,
    optimisation: Optimisation,
    radius: float,
    seed: int,
    *,
    moved: bool,
) -> Kept:
    """Accept when the upper bound is within the radius and the surrogate is positive; else go back.

    Looking twice is two chances to be wrong, so the two share the doubt. ``moved``: whether the steps changed anything.
    ``judge_M``: the messages whose surrogate counts; the KL is that of all. What is reached steers the next update: the
    upper bound where a gate holds it within the radius, the mean over all messages where beta alone does.
    """
    tried = learner.snapshot()
    all_at_once = region.adapt_beta and not region.gate
    looks = looks_at(lesson, judge_M, 1.0 if all_at_once else optimisation.gate_share, seed)
    if not moved:
        return _undone(learner, lesson, start, looks[-1], "the steps changed nothing", 0, 0.0)
    doubts = (1.0,) if len(looks) == 1 else (FIRST_DOUBT, 1.0 - FIRST_DOUBT)
    fraction, reached, reason = 1.0, 0.0, ""
    for attempt in range(optimisation.max_backtracks + 1):
        for look, doubt in zip(looks, doubts, strict=True):
            confidence = 1.0 - doubt * (1.0 - optimisation.confidence)
            seen = see(learner, lesson, start, judge_M, look, radii, confidence, seed)
            inside = seen.inside(radius, last=look is looks[-1])
            if inside or not region.gate or not seen.divergence.finite():
                break
        if attempt == 0:
            reached = seen.upper if region.gate else seen.used
        if inside or (seen.divergence.finite() and not region.gate):
            return Kept(True, "", look, seen.divergence, seen.upper, seen.used, seen.gain, fraction, attempt, reached)
        reason = f"upper KL bound {seen.upper:.3g} against radius {radius:.3g}, surrogate {seen.gain:.3g}"
        fraction *= backoff_fraction(seen.upper, radius) if seen.upper > radius else 0.5
        learner.move(start.parameters, tried, fraction)
    return _undone(learner, lesson, start, looks[-1], reason, attempt, reached)


def _undone(
    learner: Learner,
    lesson: Lesson,
    start: Start,
    look: Look,
    reason: str,
    attempt: int,
    reached: float,
) -> Kept:
    learner.restore(start.parameters)
    unchanged = Divergence(*(np.zeros(len(lesson.batch)) for _ in range(4)))
    return Kept(False, reason, look, unchanged, 0.0, 0.0, 0.0, 0.0, attempt, reached)


def see(
    learner: Learner,
    lesson: Lesson,
    start: Start,
    judge_M: NDArray[np.bool_],
    look: Look,
    radii: Radii,
    confidence: float,
    seed: int,
) -> Seen:
    divergence = learner.measure(look.rows)
    if not divergence.finite():
        return Seen(look, divergence)
    charged_M = lesson.charged_M(divergence.full_M, radii, look.rows)
    upper = bootstrap_upper(
        charged_M,
        lesson.batch.cluster_M[look.rows],
        weights_M=None if lesson.weights_M is None else lesson.weights_M[look.rows],
        confidence=confidence,
        rng=generator(seed, "bootstrap"),
    )
    judges = judge_M[look.rows]
    gain_M = gain_by_message(divergence.log_ratio_M, lesson.advantages_M[look.rows]) - start.gain_M[look.rows]
    gain_lower = -bootstrap_upper(
        -gain_M[judges],
        lesson.batch.cluster_M[look.rows][judges],
        confidence=confidence,
        rng=generator(seed, "bootstrap"),
    )
    used = lesson.mean(charged_M, look.rows)
    return Seen(look, divergence, upper, used, float(gain_M[judges].mean()), gain_lower)
