"""Which precisions can resolve a trust region: the KL that rounding alone produces, beside seconds per update.

    python bench/precision.py --shape 1.7b --lengths 16,256,1024              # on a GPU, random weights
    python bench/precision.py --model FOLDER --lengths 16,256,1024            # real weights
    python bench/precision.py --shape 1.7b --lengths 1024,4096,8192,16384 --floors --json     # long messages
    python bench/precision.py --shape tiny --lengths 4,16                     # on a CPU

For every precision: "floor" is the largest difference to float32 of the measured KL over perturbations of an adapter
whose true KL is at most the radius (what ``teamtr check`` measures). "negligible" is the KL measured after a
perturbation of relative size 1e-6. "halving" is the ratio of the KL of a step to that of half the step (4 if the KL is
quadratic, 1 if backtracking would never end). An update is one scoring pass, four steps and the gate. "seen from" is
the least radius whose tenth is above the floor, in nats per message and per token; it does not depend on ``--radius``.
"grows as" is the exponent of its growth with message length, over all lengths. ``--floors`` leaves out updates,
"halving" and the sampler. ``--words random`` does not sample the messages, which saves time if they are long. On a CPU,
half-precision products are accumulated in float32 and rounded once, as on a GPU, since few CPUs have instructions for
them.
"""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import SHAPES, adapted_team, device, make_batch, make_model, random_prompts, report, seconds, so_far
from teamtr.randomness import uniforms
from teamtr.theory.objective import Objective
from teamtr.theory.power_law import slope

PERTURBATIONS = (1e-5, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
MOST_TOKENS = 8192
"""Most tokens of all messages of one length together. At least four messages are used, or two if they are long."""
AT_ONCE = 16_384
"""Tokens of a micro-batch."""
SEEN = 10.0
"""A radius must be this many times the floor for the gate to resolve it."""


ATEN = torch.ops.aten
PRODUCTS = {
    ATEN.mm.default: ATEN.mm.default,
    ATEN.bmm.default: ATEN.bmm.default,
    ATEN.addmm.default: ATEN.addmm.default,
    ATEN.addmm_.default: ATEN.addmm.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default: ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


class RoundedOnce(TorchDispatchMode):
    """Computes products of half-precision matrices in float32, and rounds the result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        half = next((x.dtype for x in args if isinstance(x, torch.Tensor) and x.dtype.itemsize == 2), None)
        if func not in PRODUCTS or half is None:
            return func(*args, **(kwargs or {}))
        found = PRODUCTS[func](*(x.float() if isinstance(x, torch.Tensor) else x for x in args), **(kwargs or {}))
        if isinstance(found, tuple):
            return found[0].to(half), *found[1:]
        return args[0].copy_(found) if func is ATEN.addmm_.default else found.to(half)


def kl_of(learner: Any, batch: Any, precision: str, change: Any) -> float:
    """The mean KL per message measured in this precision after a change of the weights."""
    before = learner.snapshot()
    learner.policy.precision = precision
    try:
        learner.begin(batch)
        change()
        return float(learner.measure().full_M.mean())
    finally:
        learner.restore(before)
        learner.end()


def seen_from(true: dict[float, float], read: dict[float, float], negligible: float) -> float:
    """The least radius of at least ``SEEN`` times the largest error over all perturbations within it."""
    least = SEEN * negligible
    for size in sorted(true, key=true.__getitem__):
        if true[size] > least:
            break
        least = max(least, SEEN * abs(read[size] - true[size]))
    return least


def growth(results: list[dict[str, Any]], precision: str) -> float | None:
    """The exponent with which the resolvable radius grows with message length."""
    own = [(r["tokens"], r["seen from"]) for r in results if r["precision"] == precision and r["seen from"] > 0.0]
    return float(slope([n for n, _ in own], np.array([v for _, v in own]))) if len(own) > 1 else None


def halving(learner: Any, batch: Any, precision: str, size: float) -> float:
    """The KL of a perturbation divided by the KL of half of it, both measured in this precision."""
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
    """Differences of log-probabilities between sampler and learner (fp32) on the same tokens, by sampling precision."""
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
    with nullcontext() if torch.cuda.is_available() else RoundedOnce():
        measure()


def measure() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--model", help="a folder with real weights, instead of a shape")
    parser.add_argument("--lengths", default="16,256,1024" if gpu else "4,16")
    parser.add_argument("--messages", type=int, default=32 if gpu else 4)
    parser.add_argument("--radius", type=float, default=0.01)
    parser.add_argument("--precisions", default="bf16,fp16,tf32,fp32" if gpu else "bf16,fp16,fp32")
    parser.add_argument("--floors", action="store_true", help="no updates, no halving, not the sampler's distance")
    parser.add_argument("--words", choices=["sampled", "random"], default="sampled")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.model:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).to(device()).eval()
    else:
        model = make_model(a.shape)
    vocabulary = model.config.vocab_size
    plain = None if a.floors else copy.deepcopy(model)
    engine = adapted_team(model, 1, "fp32", micro_batch=16, sampler="bf16" if gpu else None, compiled=False)
    learner = engine.learner("a0")
    learner.perturb(0.3, seed=1)  # perturbed like a trained adapter, so that both of its factors matter
    rng = np.random.default_rng(0)
    results, apart = [], []
    for length in map(int, a.lengths.split(",")):
        messages = min(a.messages, max(4 if 4 * length <= AT_ONCE else 2, MOST_TOKENS // length))
        prompts = random_prompts(rng, messages, 64, vocabulary)
        learner.policy.precision = "fp32"
        learner.policy.end_ids = frozenset()
        learner.passes.micro_batch = max(1, min(16, AT_ONCE // length))
        if a.words == "random":
            said = random_prompts(rng, messages, length, vocabulary)
        else:
            said = [s.token_ids for s in engine.sample("a0", prompts, uniforms(0, len(prompts), length))]
        batch = make_batch("a0", prompts, said, group=4)
        if plain is not None:
            apart += mismatches(plain, prompts, length, gpu)
            so_far("sampler against learner", apart)

        def kls(precision: str, batch: Any = batch) -> dict[float, float]:
            return {
                size: kl_of(learner, batch, precision, lambda size=size: learner.perturb(size, seed=3))
                for size in PERTURBATIONS
            }

        true = kls("fp32")
        so_far(f"{messages} messages of {length} tokens, fp32", true)
        inside = [size for size, kl in true.items() if kl <= a.radius]
        largest = max(inside, default=PERTURBATIONS[0])
        for precision in a.precisions.split(","):
            read = true if precision == "fp32" else kls(precision)
            floor = max((abs(read[size] - true[size]) for size in inside), default=float("nan"))
            negligible = kl_of(learner, batch, precision, lambda: learner.perturb(1e-6, seed=3))
            seen = seen_from(true, read, negligible)
            result = {
                "tokens": length, "precision": precision, "floor": floor, "share of radius": floor / a.radius,
                "negligible": negligible, "seen from": seen, "per token": seen / length,
                "halving": None if a.floors else halving(learner, batch, precision, largest),
                "update s": None if a.floors else update_seconds(learner, batch, precision),
            }  # fmt: skip
            results.append(result)
            so_far("update", result)
    grows = {precision: growth(results, precision) for precision in a.precisions.split(",")}
    title = f"{a.model or a.shape}: {a.messages} messages, radius {a.radius} nats per message, LoRA"
    if apart:
        report("sampler against learner, nats", tuple(apart[0]), [tuple(r.values()) for r in apart], {}, as_json=False)
    report("grows as the length to the power of", tuple(grows), [tuple(grows.values())], {}, as_json=False)
    record = {"benchmark": "precision", **vars(a), "results": results, "mismatch": apart, "grows as": grows}
    report(title, tuple(results[0]), [tuple(r.values()) for r in results], record, a.json)


if __name__ == "__main__":
    main()
