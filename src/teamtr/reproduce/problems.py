"""Accuracy problem by problem: how sure a line of a table is, and how far it is from another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from teamtr.analysis.figures import Run
from teamtr.analysis.report.compare import success_by_problem
from teamtr.evaluation.metrics import paired_difference, share_interval
from teamtr.randomness import generator
from teamtr.reports import Interval, MeanInterval

Shares = Mapping[str, float]
"""By problem: the share of its answers that were right."""


def at_the_end(run: Run) -> Shares:
    """Of the last evaluation of a run; empty where nothing was evaluated."""
    evals = [record for record in run.reading.records if record.get("kind") == "eval"]
    return success_by_problem(evals[-1]) if evals else {}


def of_answers(answers: Mapping[str, Any]) -> Shares:
    """Of what answering by a method came to."""
    return success_by_problem(answers["seeds"][0])


def interval(seeds: Sequence[Shares]) -> Interval | None:
    """At 95 %, over problems; each counts with its mean over seeds."""
    problems = _common(seeds)
    return share_interval(_means(seeds, problems), rng=_rng()) if problems else None


def difference(seeds: Sequence[Shares], others: Sequence[Shares]) -> MeanInterval | None:
    """Of the first less the others, paired by problem."""
    problems = _common([*seeds, *others]) if seeds and others else []
    return paired_difference(_means(seeds, problems), _means(others, problems), rng=_rng()) if problems else None


def _common(seeds: Sequence[Shares]) -> list[str]:
    """The problems that all of them have."""
    return sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []


def _means(seeds: Sequence[Shares], problems: Sequence[str]) -> list[float]:
    return [float(np.mean([seed[problem] for seed in seeds])) for problem in problems]


def _rng() -> np.random.Generator:
    return generator(0, "reproduce", "problems")
