"""Metrics with intervals over problems: avg@K, pass@K, pass^K, majority@K and consensus.

Samples of one problem share its difficulty, so every interval resamples whole problems, not single samples. Axis K: the
samples of one problem.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from teamtr.randomness import resampled_range
from teamtr.reports import EvalReport, Interval, LabelScores, MeanDeviation, MeanInterval
from teamtr.types import Floats, Verdict


def avg_at_k(correct_PK: ArrayLike) -> float:
    """avg@K of sec:exp:setup: the mean correctness over K samples of each problem."""
    return float(_matrix(correct_PK).mean())


def pass_at_k(correct_P: ArrayLike, n: int, k: int) -> Floats:
    """pass@k of each problem from its number of right samples among n: the probability that k of them, drawn without
    replacement, include a right one, 1 - C(n - c, k) / C(n, k).

    It is the unbiased estimate of the probability that k fresh samples include a right one. At k = n it is the paper's
    pass@K (sec:exp:setup): at least one of the K samples is right.
    """
    return 1.0 - _without(_counts(correct_P, n, k), n, k)


def pass_hat_k(correct_P: ArrayLike, n: int, k: int) -> Floats:
    """pass^k of each problem from its number of right samples among n: the probability that k of them, drawn without
    replacement, are all right, C(c, k) / C(n, k).

    It is the unbiased estimate of the probability that all of k fresh samples are right (tau-bench, arXiv 2406.12045).
    """
    return _without(n - _counts(correct_P, n, k), n, k)


@dataclass(frozen=True)
class OfTrials:
    """pass@k and pass^k over the problems that were tried at least k times, and the number of these problems."""

    problems: int
    pass_at_k: float
    pass_hat_k: float


def of_trials(trials: Iterable[tuple[int, int]]) -> dict[int, OfTrials]:
    """pass@k and pass^k by k, from (number of trials, number of right ones) of each problem; the number of trials may
    differ between problems."""
    known = list(trials)
    found = {}
    for k in _doublings(max(count for count, _ in known)) if known else ():
        some = [(count, right) for count, right in known if count >= k]
        any_P = [float(pass_at_k([right], count, k)[0]) for count, right in some]
        all_P = [float(pass_hat_k([right], count, k)[0]) for count, right in some]
        found[k] = OfTrials(len(some), float(np.mean(any_P)), float(np.mean(all_P)))
    return found


def majority_at_k(answers_PK: Sequence[Sequence[str | None]], right_PK: Sequence[Sequence[bool]]) -> Floats:
    """Whether the most frequent answer of each problem is right. Samples without an answer (None) do not vote.

    Ties are broken at random in expectation, so the value may lie between 0 and 1.
    """
    return np.array([_majority(a, r) for a, r in zip(answers_PK, right_PK, strict=True)], dtype=np.float64)


def consensus_on_correct(stated: Sequence[Sequence[bool | None]]) -> float:
    """The share of episodes in which every agent that stated an answer stated the right one (tab:ablation, Coord.).

    ``stated[e][a]`` says whether agent a was right in episode e; None if it stated no answer. An episode without any
    stated answer does not count as consensus.
    """
    if not stated:
        raise ValueError("consensus needs at least one episode")
    spoken = [[right for right in episode if right is not None] for episode in stated]
    return float(np.mean([bool(rights) and all(rights) for rights in spoken]))


def bootstrap_interval(
    values_P: ArrayLike, confidence: float = 0.95, draws: int = 2000, *, rng: np.random.Generator
) -> Interval:
    """Percentile bootstrap of the mean, resampling problems."""
    values = np.asarray(values_P, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"the bootstrap needs one value per problem, got an array of shape {values.shape}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is strictly between 0 and 1, got {confidence}")
    return Interval(*resampled_range(values, confidence, draws=draws, rng=rng))


def share_interval(
    values_P: ArrayLike, confidence: float = 0.95, draws: int = 2000, *, rng: np.random.Generator
) -> Interval:
    """The interval of a mean of values in [0, 1], valid also if all values are equal (``alike_interval``)."""
    values = np.asarray(values_P, dtype=np.float64)
    interval = bootstrap_interval(values, confidence, draws, rng=rng)
    if values.min() < 0 or values.max() > 1:
        raise ValueError(f"shares lie in [0, 1], got {values.min()} to {values.max()}")
    return alike_interval(float(values[0]), values.size, confidence) if are_alike(values) else interval


def alike_interval(
    value: float, problems: int, confidence: float = 0.95, *, least: float = 0.0, most: float = 1.0
) -> Interval:
    """The interval of a mean of values in [least, most] if all ``problems`` problems have the same value.

    The bootstrap has nothing to resample then and would claim certainty after a single problem. If a problem has the
    value v with probability p, all P have it with probability p^P, which is below 1 - confidence unless
    p >= q = (1 - confidence)^(1/P). With p >= q the mean is at least q v + (1 - q) least and at most
    q v + (1 - q) most, whatever the other values are. For v = 0 or 1 of [0, 1] it is the rule of three.
    """
    q = (1 - confidence) ** (1 / problems)
    return Interval(q * value + (1 - q) * least, q * value + (1 - q) * most)


def are_alike(values_P: ArrayLike) -> bool:
    """Whether all values are equal up to rounding: a third is another number as 1 - 2/3 than as 2/3 - 1/3."""
    return float(np.ptp(np.asarray(values_P, dtype=np.float64))) < 1e-9


def paired_difference(
    values_P: ArrayLike, other_P: ArrayLike, confidence: float = 0.95, draws: int = 2000, *, rng: np.random.Generator
) -> MeanInterval:
    """The mean of the first shares minus the second, paired by problem, with the bootstrap over problems: difficulty
    common to both cancels. If all differences are equal, the interval is that of ``alike_interval``."""
    values, others = (np.asarray(each, dtype=np.float64) for each in (values_P, other_P))
    if values.shape != others.shape:
        raise ValueError(f"a paired difference is of the same problems, got {values.shape} and {others.shape}")
    apart_P = values - others
    interval = bootstrap_interval(apart_P, confidence, draws, rng=rng)
    if are_alike(apart_P):
        interval = alike_interval(float(apart_P[0]), len(apart_P), confidence, least=-1.0)
    return MeanInterval(float(apart_P.mean()), interval)


def over_seeds(values: Sequence[float]) -> MeanDeviation:
    """The mean of one figure over seeds, and its sample standard deviation: that of single seeds, not of the mean."""
    if not values:
        raise ValueError("a mean over seeds needs at least one")
    return MeanDeviation(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def figures_over_seeds(reports: Sequence[EvalReport]) -> dict[str, MeanDeviation]:
    """The figures of the same evaluation with several seeds: ``{"avg@4": ..., "pass@2": ..., "pass^2": ...}``."""
    first = reports[0]
    found = {f"avg@{first.samples}": [report.avg_at_k for report in reports]}
    found |= {f"pass@{k}": [report.pass_at_k[k] for report in reports] for k in first.pass_at_k}
    found |= {f"pass^{k}": [report.pass_hat_k[k] for report in reports] for k in first.pass_hat_k if k > 1}
    found |= {f"majority@{first.samples}": [report.majority_at_k for report in reports]}
    return {name: over_seeds(values) for name, values in found.items()}


def summarise(
    verdicts_PK: Sequence[Sequence[Verdict]],
    answers_PK: Sequence[Sequence[str | None]],
    stated_PK: Sequence[Sequence[Sequence[bool | None]]] | None,
    rng: np.random.Generator,
    *,
    ks: Sequence[int] | None = None,
    confidence: float = 0.95,
    draws: int = 2000,
    labels_P: Sequence[Mapping[str, str]] | None = None,
    measures_PK: Sequence[Sequence[Mapping[str, float]]] | None = None,
    reward_range: float | None = 1.0,
) -> EvalReport:
    """All figures of one evaluation.

    Args:
        verdicts_PK: the verdict of each sample.
        answers_PK: the answer of each sample in a comparable form, None if it has none; for the majority vote.
        stated_PK: for each sample, whether each agent stated the right answer (``consensus_on_correct``); or None.
        rng: generator of the bootstrap.
        ks: for pass@k and pass^k; by default 1, 2, 4, ... and K.
        labels_P: the labels of each problem; there is a table for each label name.
        measures_PK: other measures of each sample, from 0 to 1.
        reward_range: largest minus smallest reward, None if unknown. Equal rewards get an interval only if it is at
            most 1 and they lie in [0, 1].
    """
    samples = len(verdicts_PK[0]) if verdicts_PK else 0
    if not samples or any(len(row) != samples for row in (*verdicts_PK, *answers_PK)):
        raise ValueError("an evaluation needs at least one problem, and equally many samples and answers of each")
    right_PK = [[verdict.right for verdict in row] for row in verdicts_PK]
    correct_PK = _matrix(right_PK)
    rewards = np.array([verdict.reward for row in verdicts_PK for verdict in row], dtype=np.float64)
    finite = rewards[np.isfinite(rewards)]
    counts_P, some = correct_PK.sum(axis=1), ks or _doublings(samples)
    pass_P = {k: pass_at_k(counts_P, samples, k) for k in some}
    all_P = {k: pass_hat_k(counts_P, samples, k) for k in some}
    majority_P = majority_at_k(answers_PK, right_PK)

    def interval(values_P: Floats) -> Interval:
        return share_interval(values_P, confidence, draws, rng=rng)

    return EvalReport(
        problems=len(verdicts_PK),
        samples=samples,
        confidence=confidence,
        avg_at_k=avg_at_k(correct_PK),
        avg_interval=interval(correct_PK.mean(axis=1)),
        pass_at_k={k: float(values_P.mean()) for k, values_P in pass_P.items()},
        pass_intervals={k: interval(values_P) for k, values_P in pass_P.items()},
        majority_at_k=float(majority_P.mean()),
        majority_interval=interval(majority_P),
        consensus_on_correct=None if stated_PK is None else consensus_on_correct([e for row in stated_PK for e in row]),
        mean_reward=float(finite.mean()) if finite.size else math.nan,
        reward_interval=_reward_interval(verdicts_PK, reward_range, confidence, draws, rng),
        rewards_non_finite=int(rewards.size - finite.size),
        verdicts=dict(Counter(verdict.kind for row in verdicts_PK for verdict in row)),
        success_P=tuple(correct_PK.mean(axis=1).tolist()),
        tables={
            name: {
                value: LabelScores(
                    problems=len(rows),
                    avg_at_k=avg_at_k(correct_PK[rows]),
                    avg_interval=interval(correct_PK[rows].mean(axis=1)),
                    pass_at_k=float((correct_PK[rows].sum(axis=1) > 0).mean()),
                )
                for value, rows in parts.items()
            }
            for name, parts in _by_label(labels_P or ()).items()
        },
        measures={
            name: MeanInterval(float(values_P.mean()), interval(values_P))
            for name, values_P in _by_measure(measures_PK or ()).items()
        },
        pass_hat_k={k: float(values_P.mean()) for k, values_P in all_P.items()},
        pass_hat_intervals={k: interval(values_P) for k, values_P in all_P.items()},
    )


def _counts(correct_P: ArrayLike, n: int, k: int) -> NDArray[np.int64]:
    """The numbers of right samples, after validating them and k."""
    counts_P = np.asarray(correct_P)
    if not 1 <= k <= n:
        raise ValueError(f"k of n samples needs 1 <= k <= n, got k={k} and n={n} samples: draw more samples or lower k")
    if counts_P.size and (counts_P.min() < 0 or counts_P.max() > n):
        raise ValueError(f"a problem has between 0 and n={n} right samples, got {counts_P.min()} to {counts_P.max()}")
    return counts_P.astype(np.int64)


def _without(counts_P: NDArray[np.int64], n: int, k: int) -> Floats:
    """The probability that k of n, drawn without replacement, include none of c: C(n - c, k) / C(n, k)."""
    # It is the product of (i - k) / i over i = n, n-1, ..., n-c+1, so no binomial coefficient is computed.
    i_c = np.arange(n, 0, -1, dtype=np.float64)
    none_c = np.concatenate([[1.0], np.cumprod(np.maximum(i_c - k, 0.0) / i_c)])
    return none_c[counts_P]


def _reward_interval(
    verdicts_PK: Sequence[Sequence[Verdict]],
    reward_range: float | None,
    confidence: float,
    draws: int,
    rng: np.random.Generator,
) -> Interval:
    """The interval of the mean reward; problems without any finite reward are excluded."""
    rewards = [[v.reward for v in row if math.isfinite(v.reward)] for row in verdicts_PK]
    means_P = [float(np.mean(row)) for row in rewards if row]
    if not means_P:
        return Interval(math.nan, math.nan)
    within = reward_range is not None and reward_range <= 1 and min(means_P) >= 0 and max(means_P) <= 1
    return (share_interval if within else bootstrap_interval)(means_P, confidence, draws, rng=rng)


def _by_label(labels_P: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Label name -> value -> the problems that have it, with values in natural sort order."""
    found: dict[str, dict[str, list[int]]] = {}
    for p, labels in enumerate(labels_P):
        for name, value in labels.items():
            found.setdefault(name, {}).setdefault(value, []).append(p)
    return {name: dict(sorted(parts.items(), key=lambda part: _natural(part[0]))) for name, parts in found.items()}


def _natural(text: str) -> list[tuple[int, str]]:
    """Key for natural sorting: numbers by value, so that 3*10 follows 3*9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def _by_measure(measures_PK: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Floats]:
    """Each measure's mean over the samples of each problem."""
    names = dict.fromkeys(name for row in measures_PK for measures in row for name in measures)
    return {
        name: np.array([np.mean([measures[name] for measures in row]) for row in measures_PK], dtype=np.float64)
        for name in names
    }


def _majority(answers: Sequence[str | None], rights: Sequence[bool]) -> float:
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, rights, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    if not votes:
        return 0.0
    most = max(len(group) for group in votes.values())
    return float(np.mean([np.mean(group) for group in votes.values() if len(group) == most]))


def _matrix(correct_PK: ArrayLike) -> NDArray[np.float64]:
    matrix = np.asarray(correct_PK, dtype=np.float64)
    if matrix.ndim != 2 or not matrix.size:
        raise ValueError(f"correctness is problems x samples, got an array of shape {matrix.shape}")
    return matrix


def _doublings(samples: int) -> list[int]:
    """1, 2, 4, ... below the number of samples, then that number."""
    return [2**e for e in range(samples.bit_length()) if 2**e < samples] + [samples]
