"""Which arithmetic can see a trust region: the KL that rounding alone produces, beside seconds per update.

    python bench/precision.py --shape 1.7b --lengths 16,256,1024              # on a GPU, random weights
    python bench/precision.py --model FOLDER --lengths 16,256,1024            # real weights
    python bench/precision.py --shape tiny --lengths 4,16                     # on a CPU

For every arithmetic: "floor" is the largest difference to float32 of the measured KL over perturbations of an
adapter whose true KL is at most the radius (what ``teamtr check`` measures); "negligible" the KL read after a
perturbation of relative size 1e-6; "halving" the ratio of the KL of a step to that of half the step (4 where the
square law holds, 1 where back-off would never end). An update is one scoring pass, four steps and the gate.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import numpy as np
import torch

from common import SHAPES, adapted_team, device, make_batch, make_model, report, seconds, so_far
from teamtr.randomness import uniforms
from teamtr.theory.objective import Objective

PERTURBATIONS = (1e-5, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
MOST_TOKENS = 8192
"""Of all messages of one length together."""


def kl_of(learner: Any, batch: Any, precision: str, change: Any) -> float:
    """The mean KL per message that this arithmetic reads after a change of the weights."""
    before = learner.snapshot()
    learner.policy.precision = precision
    try:
        learner.begin(batch)
        change()
        return float(learner.measure().full_M.mean())
    finally:
        learner.restore(before)
        learner.end()


def halving(learner: Any, batch: Any, precision: str, size: float) -> float:
    """KL of a perturbation over KL of half of it, both read in this arithmetic."""
    before = learner.snapshot()
    learner.perturb(size, seed=5)
    after = learner.snapshot()
    learner.restore(before)
    whole = kl_of(learner, batch, precision, lambda: learner.move(before, after, 1.0))
    half = kl_of(learner, batch, precision, lambda: learner.move(before, after, 0.5))
    return whole / half if half > 0 else float("nan")


def update_seconds(learner: Any, batch: Any, precision: str) -> float:
    learner.policy.precision = precision
    before = learner.snapshot()
    advantages = np.random.default_rng(0).normal(size=len(batch))

    def update() -> None:
        learner.begin(batch)
        for rows in np.array_split(np.arange(len(batch)), 4):
            learner.step(rows, advantages[rows], Objective(), beta=1.0, learning_rate=1e-6)
        learner.measure()

    update()
    taken = seconds(update)
    learner.restore(before)
    learner.end()
    return taken


def mismatches(model: Any, prompts: list[Any], length: int, gpu: bool) -> list[dict[str, Any]]:
    """Sampler against learner (fp32) log-probabilities of the same tokens, for each arithmetic of sampling."""
    found = []
    for sampler in ("bf16", "fp16") if gpu else ("fp32",):
        engine = adapted_team(copy.deepcopy(model), 1, "fp32", micro_batch=16, sampler=sampler, compiled=False)
        learner = engine.learner("a0")
        learner.policy.end_ids = frozenset()
        samples = engine.sample("a0", prompts, uniforms(0, len(prompts), length))
        learner.begin(make_batch("a0", prompts, [s.token_ids for s in samples], group=4))
        gaps = [a - s.logprobs for a, s in zip(learner.token_logprobs(), samples, strict=True)]
        learner.end()
        tokens = np.abs(np.concatenate(gaps))
        found.append(
            {
                "tokens": length, "sampler": sampler, "median per token": float(np.median(tokens)),
                "largest per token": float(tokens.max()),
                "median per message": float(np.median([abs(g.sum()) for g in gaps])),
                "largest per message": float(max(abs(g.sum()) for g in gaps)),
            }
        )  # fmt: skip
    return found


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--model", help="a folder with real weights, instead of a shape")
    parser.add_argument("--lengths", default="16,256,1024" if gpu else "4,16")
    parser.add_argument("--messages", type=int, default=32 if gpu else 4)
    parser.add_argument("--radius", type=float, default=0.01)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.model:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).to(device()).eval()
    else:
        model = make_model(a.shape)
    vocabulary = model.config.vocab_size
    plain = copy.deepcopy(model)
    engine = adapted_team(model, 1, "fp32", micro_batch=16, sampler="bf16" if gpu else None, compiled=False)
    learner = engine.learner("a0")
    learner.perturb(0.3, seed=1)  # an adapter that has learnt something, so that both of its factors matter
    precisions = ("bf16", "fp16", "tf32", "fp32") if gpu else ("fp32", "bf16")
    rng = np.random.default_rng(0)
    rows, results, apart = [], [], []
    for length in map(int, a.lengths.split(",")):
        messages = min(a.messages, max(4, MOST_TOKENS // length))
        prompts = [rng.integers(2, vocabulary, size=64).astype(np.int32) for _ in range(messages)]
        learner.policy.precision = "fp32"
        learner.policy.end_ids = frozenset()
        said = [s.token_ids for s in engine.sample("a0", prompts, uniforms(0, len(prompts), length))]
        batch = make_batch("a0", prompts, said, group=4)
        apart += mismatches(plain, prompts, length, gpu)
        so_far("sampler against learner", apart)
        true = {
            size: kl_of(learner, batch, "fp32", lambda size=size: learner.perturb(size, seed=3))
            for size in PERTURBATIONS
        }
        inside = [size for size, kl in true.items() if kl <= a.radius]
        largest = max(inside, default=PERTURBATIONS[0])
        for precision in precisions:
            read = {
                size: kl_of(learner, batch, precision, lambda size=size: learner.perturb(size, seed=3))
                for size in inside
            }
            floor = max((abs(read[size] - true[size]) for size in inside), default=float("nan"))
            result = {
                "tokens": length, "precision": precision, "floor": floor, "share of radius": floor / a.radius,
                "negligible": kl_of(learner, batch, precision, lambda: learner.perturb(1e-6, seed=3)),
                "halving": halving(learner, batch, precision, largest),
                "update s": update_seconds(learner, batch, precision),
            }  # fmt: skip
            results.append(result)
            so_far("update", result)
            rows.append(tuple(result.values()))
    title = f"{a.model or a.shape}: {a.messages} messages, radius {a.radius} nats per message, LoRA"
    report("sampler against learner, nats", tuple(apart[0]), [tuple(r.values()) for r in apart], {}, as_json=False)
    record = {"benchmark": "precision", **vars(a), "results": results, "mismatch": apart}
    report(title, tuple(results[0]), rows, record, a.json)


if __name__ == "__main__":
    main()
