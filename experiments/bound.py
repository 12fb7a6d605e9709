"""Coverage of the gate's upper bound, in simulated batches whose true mean KL is 1.

    python experiments/bound.py [--batches 2000]

KLs vary between problems and messages by log-normal factors with the given deviations. For every case, the table shows
the share of batches whose 95 % bound is at least the true mean, and the median bound, for the plain bootstrap quantile
and for ours. It then shows how often a gate with one check and with two (``training/gate.py``: a quarter of the
episodes first, at least 64) accepts a KL exactly at the radius, which should happen in 5 of 100 batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from teamtr.theory.intervals import bootstrap_upper
from teamtr.training.gate import FEWEST, FIRST_DOUBT

CASES = ((8, 0.5, 0.5), (8, 0.5, 1.0), (16, 0.5, 1.0), (32, 0.5, 0.5), (32, 0.5, 1.0), (32, 1.0, 1.0), (64, 0.5, 1.0))
GROUP = 8


def batches(count: int, problems: int, by_problem: float, by_message: float) -> Iterator[NDArray[np.float64]]:
    """KLs with mean 1: [P, G]."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield (
            np.exp(rng.normal(0, by_problem, (problems, 1)) - by_problem**2 / 2)
            * np.exp(rng.normal(0, by_message, (problems, GROUP)) - by_message**2 / 2)
        )


def plain_upper(kl_PG: NDArray[np.float64], confidence: float, rng: np.random.Generator) -> float:
    problems = len(kl_PG)
    drawn_DP = rng.multinomial(problems, np.full(problems, 1.0 / problems), size=1000)
    quantile = np.quantile(drawn_DP @ kl_PG.mean(1) / problems, confidence, method="higher")
    return max(float(kl_PG.mean()), float(quantile))


def our_upper(kl_PG: NDArray[np.float64], confidence: float, rng: np.random.Generator) -> float:
    problem_M = np.repeat(np.arange(len(kl_PG)), kl_PG.shape[1])
    return bootstrap_upper(kl_PG.reshape(-1), problem_M, confidence=confidence, rng=rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000)
    count = parser.parse_args().batches
    print("| problems | deviations | plain: held, bound | ours: held, bound | one look accepts | two looks accept |")
    print("|---|---|---|---|---|---|")
    for problems, by_problem, by_message in CASES:
        rng, plain, ours, twice = np.random.default_rng(1), [], [], 0
        some = max(GROUP // 4, -(-FEWEST // problems))
        for kl_PG in batches(count, problems, by_problem, by_message):
            plain.append(plain_upper(kl_PG, 0.95, rng))
            ours.append(our_upper(kl_PG, 0.95, rng))
            if some >= GROUP:
                twice += ours[-1] <= 1.0
                continue
            first = our_upper(kl_PG[:, :some], 1.0 - 0.05 * FIRST_DOUBT, rng)
            twice += first <= 1.0 or our_upper(kl_PG, 1.0 - 0.05 * (1.0 - FIRST_DOUBT), rng) <= 1.0
        held = [f"{100 * np.mean(np.array(found) >= 1):.1f} %, {np.median(found):.2f}" for found in (plain, ours)]
        accepted = [f"{100 * share:.1f}" for share in (np.mean(np.array(ours) < 1), twice / count)]
        print(f"| {problems} | {by_problem}, {by_message} | {' | '.join(held + accepted)} |")


if __name__ == "__main__":
    main()
