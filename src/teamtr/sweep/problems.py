"""Accuracy by problem: intervals for a line of a table, and for its difference from another line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from teamtr.analysis.figures import Run
from teamtr.analysis.report.compare import success_by_problem
from teamtr.evaluation.metrics import alike_interval, are_alike, paired_difference, share_interval
from teamtr.randomness import generator
from teamtr.reports import Interval, MeanInterval

DRAWS = 2000
Shares = Mapping[str, float]
"""By problem: the share of its answers that were right."""


def at_the_end(run: Run) -> Shares:
    """The shares of the last evaluation of a run; empty if nothing was evaluated."""
    evals = [record for record in run.reading.records if record.get("kind") == "eval"]
    return success_by_problem(evals[-1]) if evals else {}


def of_answers(answers: Mapping[str, Any]) -> Shares:
    """The shares in the recorded results of a method."""
    return success_by_problem(answers["seeds"][0])


def interval(seeds: Sequence[Shares]) -> Interval | None:
    """A 95 % interval over problems; each counts with its mean over seeds. If seeds hold out different problems, a
    problem that several seeds share is resampled for all of them together."""
    if not all(seeds) or not seeds:
        return None
    problems = _common(seeds)
    if all(len(seed) == len(problems) for seed in seeds):
        return share_interval(_means(seeds, problems), rng=_rng())
    return _clustered(seeds, least=0.0)


def difference(seeds: Sequence[Shares], others: Sequence[Shares]) -> MeanInterval | None:
    """The mean difference, the first minus the others, paired by problem."""
    problems = _common([*seeds, *others]) if seeds and others else []
    return paired_difference(_means(seeds, problems), _means(others, problems), rng=_rng()) if problems else None


def difference_by_seed(own: Mapping[int, Shares], others: Mapping[int, Shares]) -> MeanInterval | None:
    """The mean difference, the first minus the others, paired by seed and problem: seeds may hold out different
    problems."""
    apart = _apart(own, others)
    if not apart:
        return None
    return MeanInterval(float(np.mean([np.mean([*seed.values()]) for seed in apart])), _clustered(apart, least=-1.0))


def paired_seeds(own: Mapping[int, Shares], others: Mapping[int, Shares]) -> int:
    """The number of seeds in ``difference_by_seed``: those that both have."""
    return len(_apart(own, others))


def are_of_the_same_problems(seeds: Iterable[Shares]) -> bool:
    return len({frozenset(seed) for seed in seeds}) == 1


def _apart(own: Mapping[int, Shares], others: Mapping[int, Shares]) -> list[Shares]:
    """The differences by problem, of each seed of which both have problems."""
    apart = [
        {problem: value - others[seed][problem] for problem, value in shares.items() if problem in others[seed]}
        for seed, shares in own.items()
        if seed in others
    ]
    return [seed for seed in apart if seed]


def _clustered(seeds: Sequence[Shares], *, least: float) -> Interval:
    """A bootstrap interval of the mean over seeds of each seed's mean. Problems are resampled, and one that several
    seeds share is drawn for all of them together. Values lie between ``least`` and 1."""
    problems = sorted(set().union(*seeds))
    values = [value for seed in seeds for value in seed.values()]
    if are_alike(values):
        return alike_interval(values[0], len(problems), least=least)
    value_SP = np.array([[seed.get(problem, 0.0) for problem in problems] for seed in seeds])
    there_SP = np.array([[problem in seed for problem in problems] for seed in seeds], dtype=np.float64)
    times_DP = _rng().multinomial(len(problems), np.full(len(problems), 1 / len(problems)), size=DRAWS)
    count_DS = times_DP @ there_SP.T
    mean_DS = np.divide(times_DP @ value_SP.T, count_DS, out=np.full(count_DS.shape, np.nan), where=count_DS > 0)
    means_D = np.nanmean(mean_DS, axis=1)  # every draw has a problem of at least one seed
    return Interval(*(float(end) for end in np.quantile(means_D, (0.025, 0.975))))


def _common(seeds: Sequence[Shares]) -> list[str]:
    """The problems that all of them have."""
    return sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []


def _means(seeds: Sequence[Shares], problems: Sequence[str]) -> list[float]:
    return [float(np.mean([seed[problem] for seed in seeds])) for problem in problems]


def _rng() -> np.random.Generator:
    return generator(0, "reproduce", "problems")
