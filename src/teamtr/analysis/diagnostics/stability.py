"""Stability of training: the spread of improvements, and the updates that lowered the return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from teamtr.analysis.diagnostics.tracking import gains
from teamtr.records import Record, accepted, number, numbers, whole


@dataclass(frozen=True)
class Stability:
    """``deviation`` is the paper's Stability (tab:ablation): the standard deviation of improvements of held-out success
    from evaluation to evaluation, lower is better; None with fewer than two. With ``eval.every: 1`` these are the
    paper's per-stage improvements. ``noise`` is the deviation expected from sampling K answers. ``judged`` updates have
    a known gain; ``regressing`` of them have their whole interval below zero (with 95 % intervals, one in forty by
    chance)."""

    stages: tuple[int, ...]
    """The stage of the evaluation that ends each improvement."""
    improvements: tuple[float, ...]
    deviation: float | None
    noise: float | None
    worst: float | None
    judged: int
    regressing: int


def stability(updates: Sequence[Record], evals: Sequence[Record]) -> Stability:
    """The stability of a run. It uses evaluations, which have the same problems, because batches of different stages
    differ in difficulty. An evaluation on other problems than the previous one is not compared with it."""
    pairs = [
        (before, after)
        for before, after in pairwise(record for record in evals if number(record, "avg_at_k") is not None)
        if _asked(before) == _asked(after) and whole(after, "stage") != whole(before, "stage")
    ]
    improvements = tuple((number(b, "avg_at_k") or 0.0) - (number(a, "avg_at_k") or 0.0) for a, b in pairs)
    noise = _noise(pairs)
    kept = {whole(update, "update") for update in updates if accepted(update)}
    judged = [gain for update, gain in gains(updates).items() if update in kept]
    return Stability(
        stages=tuple(whole(after, "stage") or 0 for _, after in pairs),
        improvements=improvements,
        deviation=float(np.std(improvements, ddof=1)) if len(improvements) > 1 else None,
        noise=None if noise is None or not np.isfinite(noise) else float(np.sqrt(noise)),
        worst=min(improvements) if improvements else None,
        judged=len(judged),
        regressing=sum(gain.upper < -1e-9 for gain in judged),
    )


def _noise(pairs: Sequence[tuple[Record, Record]]) -> float | None:
    """The mean square deviation of improvements that sampling alone would show; None without improvements.

    Each evaluation ends one improvement and begins the next, so these vary against each other. Their mean varies by the
    first and the last evaluation only, and their spread around it is larger than that of independent ones.
    """
    if not pairs:
        return None
    variance = {id(record): _variance(record) for pair in pairs for record in pair}
    each = sum(variance[id(before)] + variance[id(after)] for before, after in pairs)
    if len(pairs) == 1:
        return each
    counted = Counter(id(after) for _, after in pairs)
    counted.subtract(Counter(id(before) for before, _ in pairs))
    total = sum(times**2 * variance[record] for record, times in counted.items())
    return (each - total / len(pairs)) / (len(pairs) - 1)


def _asked(record: Record) -> tuple[str, ...]:
    ids = record.get("problem_ids")
    return tuple(map(str, ids)) if isinstance(ids, list | tuple) else ()


def _variance(record: Record) -> float:
    """The sampling variance of avg@K on fixed problems: p (1 - p) / (K - 1) is unbiased for one problem."""
    success_P, samples = numbers(record.get("success_P")), whole(record, "samples")
    if not success_P.size or samples is None or samples < 2:
        return float("nan")
    return float((success_P * (1.0 - success_P)).sum() / (samples - 1) / success_P.size**2)
