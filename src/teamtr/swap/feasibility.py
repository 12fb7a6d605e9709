"""What an alignment came to (app:diagnostics, plug-in feasibility)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from teamtr.answers import Divergence
from teamtr.swap.align import Student
from teamtr.swap.steering import Alignment, Progress, path, within
from teamtr.types import Floats


def achieved(student: Student, progress: Progress, settings: Alignment) -> dict[str, Any]:
    """The best look, how it was come by, and every look there was. ``student`` is as ``align`` leaves it."""
    probes, best = student.probes, progress.looks[progress.best]
    led = path(progress)
    return {
        "loss": "kl_old_to_new" if probes.exact else "cross_entropy",
        "unit": "token" if settings.per_token else "message",
        "probes": len(probes.old),
        "held_out": len(probes.held_out),
        "steps": best.step,
        "steps_in_all": progress.spent,
        "learning_rate": best.learning_rate,
        "doubled": best.doubled,
        "kl": best.kl,
        "kl_upper": best.upper,
        "train_kl": best.train_kl,
        "radius": settings.radius,
        "within_radius": within(best, settings) if probes.exact else None,
        "curve": [asdict(look) for look in led],
        "trials": [asdict(look) for look in progress.looks if look not in led],
    }


def surrogate(divergence: Divergence, advantages_M: Floats) -> float:
    """What the old team's advantages say of the new agent: mean of (new / old) * advantage (app:diagnostics)."""
    return float(np.mean(np.exp(divergence.log_ratio_M) * advantages_M))


@dataclass(frozen=True)
class TextGap:
    """How much less likely the new agent finds the old one's texts, on held-out probes: a diagnostic, no trust region.

    The mean of log old(m) - log new(m) bounds the KL between the two laws of texts from above, up to the entropy of
    the old agent's choice among spellings of one text. It is sampled, so it is noisy, and no certificate uses it.
    """

    nats_per_message: float
    nats_per_character: float


def text_gap(student: Student) -> TextGap:
    probes, rows = student.probes, student.probes.held_out
    old_M = student.learner.teacher_logprobs(probes.old.rows(rows))
    gap_M = old_M - student.learner.measure(rows).log_ratio_M  # its reference is certain, so the ratio is log new(m)
    return TextGap(float(gap_M.mean()), float(gap_M.sum() / probes.characters_M[rows].sum()))
