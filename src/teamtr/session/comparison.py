"""Compares inference-time methods on the same problems, attempts and seeds: what each spent, and paired differences.

With a token budget, every method draws the number of independent tries that comes nearest to it; a short pilot on the
first problems measures the tokens of one try. Methods that choose among several answers anyway draw more or fewer of
them; all others are repeated, and their answers vote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.baselines import Method
from teamtr.baselines.voting import repeated
from teamtr.evaluation.metrics import over_seeds, paired_difference, share_interval
from teamtr.randomness import generator
from teamtr.reports import EvalReport, Interval, MeanDeviation, MeanInterval
from teamtr.rollout import Ledger
from teamtr.session.evaluations import Evaluated, Evaluation, Progress, Spent
from teamtr.types import Floats

PILOT_PROBLEMS = 16
"""Number of problems in the pilot that measures the tokens of one try."""


@dataclass(frozen=True)
class Compared:
    """The results of one method. ``runs`` holds its evaluation with each seed. ``difference`` is its success minus that
    of the first method, paired by problem; None for the first method itself."""

    method: Method
    folders: tuple[Path, ...]
    runs: tuple[Evaluated, ...]
    interval: Interval
    difference: MeanInterval | None

    @property
    def reports(self) -> tuple[EvalReport, ...]:
        return tuple(run.report for run in self.runs)

    @property
    def spent(self) -> Spent:
        """Total over all seeds."""
        return sum((run.spent for run in self.runs), Spent())

    @property
    def success(self) -> MeanDeviation:
        """avg@K: mean and deviation over the seeds."""
        return over_seeds([report.avg_at_k for report in self.reports])

    def as_record(self) -> dict[str, Any]:
        spent = self.spent
        return {
            "method": self.method.name,
            "settings": self.method.settings,
            "tries": self.method.tries,
            "avg_at_k": self.success.mean,
            "avg_interval": self.interval,
            "deviation_over_seeds": self.success.deviation,
            "difference": None if self.difference is None else self.difference.value,
            "difference_interval": None if self.difference is None else self.difference.interval,
            "answers": spent.answers,
            "tokens_per_answer": spent.sampled_tokens / spent.answers,
            "prompt_tokens_per_answer": spent.prompt_tokens / spent.answers,
            "seconds_per_answer": None if spent.seconds is None else spent.seconds / spent.answers,
            "seeds": [report.as_record() for report in self.reports],
            "folders": [str(folder) for folder in self.folders],
        }


@dataclass(frozen=True)
class Comparison:
    """Methods to evaluate with the same settings. ``evaluation`` creates the evaluation of a ``method`` with the
    randomness of a ``repeat``, and with other ``samples`` if given. ``budget`` is in sampled tokens per answer."""

    evaluation: Callable[..., Evaluation]
    methods: Sequence[Method]
    seeds: int = 1
    budget: int | None = None

    def run(
        self,
        *,
        regrade: bool = False,
        ledger: Ledger | None = None,
        progress: Callable[[Method], Progress] = lambda method: lambda done, of, scores: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> tuple[Compared, ...]:
        """Evaluate all methods in order; stored episodes are read, not sampled again. ``tell`` receives messages for
        the user."""
        for asked in self.methods:
            self.evaluation(method=asked).require()  # before hours are spent on earlier methods
        found: list[Compared] = []
        for asked in self.methods:
            method = self._within_budget(asked, regrade, ledger, tell)
            evaluations = [self.evaluation(method=method, repeat=seed) for seed in range(self.seeds)]
            runs = tuple(
                each.run(regrade=regrade, ledger=ledger, progress=progress(method), tell=tell) for each in evaluations
            )
            first = evaluations[0]
            rng = generator(first.seed, "comparison")
            success_P = _success_P(runs)
            other = paired_difference(success_P, _success_P(found[0].runs), rng=rng) if found else None
            folders = tuple(each.folder for each in evaluations)
            found.append(Compared(method, folders, runs, share_interval(success_P, rng=rng), other))
        return tuple(found)

    def _within_budget(
        self, method: Method, regrade: bool, ledger: Ledger | None, tell: Callable[[str], None]
    ) -> Method:
        if self.budget is None:
            return method
        pilot = self.evaluation(method=repeated(method, 1), samples=1)
        pilot = replace(pilot, limit=min(PILOT_PROBLEMS, pilot.limit or PILOT_PROBLEMS))
        spent = pilot.run(regrade=regrade, ledger=ledger, tell=tell).spent
        each = spent.sampled_tokens / spent.answers
        tries = max(1, round(self.budget / max(each, 1.0)))
        tell(
            f"{method.name}: one try samples {each:.1f} tokens by a pilot on {spent.answers} problems; "
            + ("it is over the budget" if each > self.budget else f"tries near the budget: {tries}")
        )
        return repeated(method, tries)


def _success_P(runs: Sequence[Evaluated]) -> Floats:
    """The share of right attempts at each problem, over all seeds."""
    return np.mean([run.report.success_P for run in runs], axis=0, dtype=np.float64)
