"""One optimizer step of a stage, kernel by kernel, for the agent that speaks first and for the one that speaks third.

    python bench/step.py --shape 1.7b                                               # on a GPU: 64 problems x 8 episodes
    python bench/step.py --shape tiny --problems 2 --group 2 --tokens 8             # on a CPU

Problems and messages, those of earlier speakers included, are random tokens, each ``--tokens`` long. A step takes a
random quarter of the messages, as in an update. "begin" scores the old policy, "step" is the mean of the four steps of
a pass, and "measure" measures the KL of a quarter of the messages, all warm. The kernels of one step go to stderr.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch

from common import (
    SHAPES,
    adapted_team,
    kernels,
    make_batch,
    make_model,
    peak_gb,
    random_prompts,
    report,
    seconds,
    so_far,
    whole_number,
)
from teamtr.presets import PRESETS

STEPS = 4
BEFORE = {"first": 0, "third": 2}
"""Number of messages before the agent's own."""


def said(a: argparse.Namespace, before: int, rng: np.random.Generator) -> Any:
    words, episodes = SHAPES[a.shape]["vocab_size"], a.problems * a.group
    problems = random_prompts(rng, a.problems, a.tokens, words)
    heard = [random_prompts(rng, before, a.tokens, words) for _ in range(episodes)]
    prompts = [np.concatenate([problems[e // a.group], *heard[e]]) for e in range(episodes)]
    return make_batch("a0", prompts, random_prompts(rng, episodes, a.tokens, words), a.group)


def measured(a: argparse.Namespace, learner: Any, speaker: str) -> dict[str, Any]:
    rng, objective = np.random.default_rng(0), PRESETS["teamtr"].objective
    batch = said(a, BEFORE[speaker], rng)
    advantages = rng.normal(size=len(batch))
    parts = [np.sort(rows) for rows in np.array_split(rng.permutation(len(batch)), STEPS)]
    start = learner.snapshot()

    def step(rows: np.ndarray) -> None:
        learner.step(rows, advantages[rows], objective, beta=1.0, learning_rate=1e-5)

    found: dict[str, Any] = {}
    for _ in range(2):  # the first round chooses kernels
        begin = seconds(partial(learner.begin, batch))
        took = [seconds(partial(step, rows)) for rows in parts]
        found = {
            "begin, s": begin,
            "step, s": float(np.mean(took)),
            "measure, s": seconds(lambda: learner.measure(parts[0])),
        }
    so_far(f"{speaker}, kernels", kernels(partial(step, parts[0]), 1))
    learner.restore(start)
    learner.end()
    return {"speaks": speaker, "tokens": int(batch.sizes_M.sum()), **found, "peak GB": peak_gb()}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--precision", default="fp16" if gpu else "fp32")
    parser.add_argument("--problems", type=whole_number, default=64 if gpu else 2)
    parser.add_argument("--group", type=whole_number, default=8 if gpu else 2)
    parser.add_argument("--tokens", type=whole_number, default=256 if gpu else 8)
    parser.add_argument("--micro-batch", type=whole_number, default=32)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    engine = adapted_team(make_model(a.shape), 1, a.precision, micro_batch=a.micro_batch)
    rows = [measured(a, engine.learner("a0"), speaker) for speaker in BEFORE]
    title = f"{a.shape}, {a.precision}: a quarter of {a.problems} x {a.group} messages of {a.tokens} tokens a step"
    record = {"benchmark": "step", **vars(a), "results": rows}
    report(title, tuple(rows[0]), [list(row.values()) for row in rows], record, a.json)


if __name__ == "__main__":
    main()
