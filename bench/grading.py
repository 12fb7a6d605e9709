"""Throughput of the math grader with and without pathological answers among the honest ones.

    python bench/grading.py [--json] [--answers 1000] [--rounds 3]

The honest answers are generated here: plain numbers, and formulas that need algebra, right and wrong. Five in a hundred
are pathological: power towers, factorials of factorials, a megabyte of text, and deep nesting. Reports for each grader
the answers per second without and with them, the ratio (the target is at least 0.8), all verdicts, and the number of
processes left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

from teamtr.grading.math.rules import RULES, MathGrader

PATHOLOGICAL = (
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{9**9**9**9}",
    r"\boxed{\left(10^{9}\right)!}",
    r"\boxed{99999999!}",
    r"\boxed{((((10!)!)!)!)!}",
    "word " * 200_000,
    r"\boxed{" + "1+" * 500_000 + "1}",
    r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    r"\boxed{" + r"\frac{1}{" * 200 + "2" + "}" * 200 + "}",
    r"\boxed{" + r"\sqrt{" * 250 + "2" + "}" * 250 + "}",
)

Pair = tuple[str, str]


def honest(rng: random.Random) -> Pair:
    """A (reply, truth) as a model writes it: reasoning, then a box."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 9)
    said, truth = rng.choice(
        [
            (str(a * b), str(a * b)),
            (str(a * b + 1), str(a * b)),
            (rf"\dfrac{{{a}}}{{{a + 1}}}", rf"\frac{{{a}}}{{{a + 1}}}"),
            (rf"{c}\sqrt{{{b}}}", rf"\sqrt{{{c * c * b}}}"),
            (rf"{a}+{b}\sqrt{{{c}}}", rf"{b}\sqrt{{{c}}}+{a}"),
            (rf"\frac{{{a}\pi}}{{{2 * b}}}", rf"\frac{{{a}}}{{{2 * b}}}\pi"),
            (rf"x^2+{a + b}x+{a * b}", rf"(x+{a})(x+{b})"),
            (rf"x^2+{a + b}x+{a * b + 1}", rf"(x+{a})(x+{b})"),
            (rf"({a},{b})", rf"\left( {a}, {b} \right)"),
            (rf"{a}-{b}i", rf"{a}+{b}i"),
        ]
    )
    return "We think about it. " * 50 + rf"So the answer is \boxed{{{said}}}.", truth


def pathological(rng: random.Random) -> Pair:
    return rng.choice(PATHOLOGICAL), rf"\frac{{{rng.randint(2, 99)}\sqrt{{2}}}}{{3}}"


def answers(count: int, bad: int, seed: int) -> list[Pair]:
    rng = random.Random(seed)
    pairs = [honest(rng) for _ in range(count)]
    for place in rng.sample(range(count), bad):
        pairs[place] = pathological(rng)
    return pairs


def timed(name: str, pairs: list[Pair], rounds: int) -> tuple[float, Counter[str]]:
    """The best time of several rounds with warm workers, and the verdicts of one round."""
    times = []
    with MathGrader(RULES[name]) as grader:
        grader.grade([(r"\boxed{x^2}", r"x \cdot x")] * 2)
        for _ in range(rounds):
            grader.counts.clear()
            started = time.perf_counter()
            grader.grade(pairs)
            times.append(time.perf_counter() - started)
        return min(times), Counter(grader.counts)


def children() -> int:
    """Processes whose parent is this one, zombies included."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += int(fields[1]) == os.getpid()
    return found


def measure(name: str, count: int, rounds: int) -> dict[str, object]:
    bad = count // 20
    clean_s, clean_verdicts = timed(name, answers(count, 0, seed=1), rounds)
    mixed_s, mixed_verdicts = timed(name, answers(count, bad, seed=1), rounds)
    return {
        "grader": name,
        "answers": count,
        "pathological": bad,
        "clean_per_s": round(count / clean_s, 1),
        "mixed_per_s": round(count / mixed_s, 1),
        "ratio": round(clean_s / mixed_s, 3),
        "clean_verdicts": dict(clean_verdicts),
        "mixed_verdicts": dict(mixed_verdicts),
        "processes_left": children(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    results = [measure(name, settings.answers, settings.rounds) for name in ("default", "deepscaler")]
    if settings.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print(
            f"{result['grader']}: {result['clean_per_s']} answers/s clean, {result['mixed_per_s']} with "
            f"{result['pathological']} pathological of {result['answers']} (ratio {result['ratio']}), "
            f"{result['mixed_verdicts']}, {result['processes_left']} processes left"
        )


if __name__ == "__main__":
    main()
