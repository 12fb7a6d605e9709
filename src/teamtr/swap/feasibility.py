"""Results of an alignment (app:diagnostics, plug-in feasibility)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from teamtr.answers import Divergence
from teamtr.swap.align import Student
from teamtr.swap.steering import Alignment, Progress, path, within
from teamtr.types import Floats


def achieved(student: Student, progress: Progress, settings: Alignment) -> dict[str, Any]:
    """The best check, the checks that led to it, and all others. ``student`` is in the state that ``align`` leaves."""
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
    """The surrogate of the new agent under the old team's advantages: mean of (new / old) * advantage
    (app:diagnostics)."""
    return float(np.mean(np.exp(divergence.log_ratio_M) * advantages_M))


@dataclass(frozen=True)
class TextGap:
    """How much less probable the old agent's texts are under the new one, on held-out probes: a diagnostic only.

    The mean of log old(m) - log new(m) is an upper bound of the KL between the two distributions of texts, up to the
    entropy of the old agent's choice among tokenizations of one text. It is sampled, hence noisy, and no certificate
    uses it.
    """

    nats_per_message: float
    nats_per_character: float


def text_gap(student: Student) -> TextGap:
    probes, rows = student.probes, student.probes.held_out
    old_M = student.learner.teacher_logprobs(probes.old.rows(rows))
    gap_M = old_M - student.learner.measure(rows).log_ratio_M  # the teacher is certain: the ratio is log new(m)
    return TextGap(float(gap_M.mean()), float(gap_M.sum() / probes.characters_M[rows].sum()))
