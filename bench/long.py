"""Long messages, phase by phase, beside the prediction: two adapters on one base, one of which is updated.

    python bench/long.py --shape 1.7b --tokens 4096,8192,16384 --episodes 16 --json       # on a GPU
    python bench/long.py --shape 8b --tokens 8192 --episodes 8 --precision bf16 --json
    python bench/long.py --shape 1.7b --tokens 16384 --words random --json                # training without sampling
    python bench/long.py --shape tiny --tokens 2048 --episodes 4                          # on a CPU
    python bench/long.py --planned --markdown                                             # nothing is run

Every message reaches its maximal length. The first agent speaks after a prompt that its group shares, the second after
the prompt and the first agent's message; the second is updated. "score" computes the old policy, "train" takes one step
on a quarter of the messages and then another (the first finds its loss scale and its kernels; "passed / asked" is 1 if
no micro-batch was recomputed with a smaller scale), and "gate" measures the exact KL of all messages. Before these, the
longest step is rehearsed as in a run, which fixes the micro-batch and whether activations are recomputed
(``--recompute``). "planned" is the prediction for the same models, card and settings; the peak of a phase is shown
beside the plan for all phases.

``--planned``: the memory plan of 64 episodes on one H200, with activations kept and recomputed: the table of
docs/sizing.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from common import (
    SHAPES,
    adapted_team,
    make_batch,
    make_model,
    peak_gb,
    random_prompts,
    report,
    so_far,
    wait,
    whole_number,
    whole_numbers,
)
from teamtr.engines.policy import Recompute
from teamtr.planning.cards import CARDS
from teamtr.planning.learning import LearnerCost, all_rows, step_rows
from teamtr.planning.memory import memory_of
from teamtr.planning.sampling import sample_seconds
from teamtr.planning.seconds import Load
from teamtr.planning.setup import Cluster, Setup
from teamtr.planning.stage import Prediction, predict
from teamtr.ports import GB
from teamtr.randomness import uniforms
from teamtr.theory.objective import Objective
from throughput import shape_of, team

GROUP = 8
LENGTHS = (4096, 8192, 16384, 32768)
BASES = {"1.7b": ("fp32", False), "8b": ("fp16", True)}
"""``learner.base``, and whether adapters are applied by row. The larger model's base is held once."""
STEPS = 4
"""Parts of a batch. A step takes one part; the benchmark takes this step twice."""


def on_one_card(shape: str, tokens: int, recompute: Recompute) -> Prediction:
    """The prediction for two agents, 8 problems x 8 episodes, training and sampling in fp16; with one message at a time
    if 16 do not fit."""
    base, by_row = BASES[shape]
    setup = team(replace(shape_of(shape), stored="bf16"), 2, 8, GROUP, 512, tokens, micro_batch=16)
    setup = replace(
        setup,
        learning=replace(setup.learning, precision="fp16", base=base, recompute=recompute),
        sampling=replace(setup.sampling, precision="fp16", by_row=by_row),
    )
    found = predict(setup)
    return found if found.memory.fits else predict(replace(setup, learning=replace(setup.learning, micro_batch=1)))


def plans() -> Iterator[dict[str, Any]]:
    """Rows with activations kept, and rows with activations recomputed where that is needed."""
    for shape, tokens in product(BASES, LENGTHS):
        yield _row(shape, tokens, on_one_card(shape, tokens, "never"))
        again = on_one_card(shape, tokens, "auto")
        if again.memory.plan.recomputed:
            yield _row(shape, tokens, again)


def _row(shape: str, tokens: int, found: Prediction) -> dict[str, Any]:
    fits, sizes = found.memory.fits, {item.what: item.gb for item in found.memory.plan.items}
    phases = ("sample", "score", "train", "gate")
    return {
        "model": shape, "tokens": tokens, "recomputed": len(found.memory.plan.recomputed),
        "fits": "yes" if fits else "no", "messages at a time": found.micro_batch, "waves": found.waves,
        "KV blocks": sizes["keys and values"], "old policy": sizes["old policy"], "a step": sizes["worst step"],
        "total": found.memory.plan.total / GB,
        **{f"{phase}, s": found.phases[phase].seconds if fits else None for phase in phases},
    }  # fmt: skip


def as_markdown(row: dict[str, Any]) -> str:
    return f"| {' | '.join(map(_told, row.values()))} |"


def _told(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def planned(a: argparse.Namespace, tokens: int) -> Setup:
    """The measured setup, as input of the planner."""
    gpu, group = torch.cuda.is_available(), min(GROUP, a.episodes)
    found = team(
        shape_of(a.shape), 2, a.episodes // group, group, a.prompt, tokens, micro_batch=a.micro_batch, shared=0
    )
    return replace(
        found,
        cluster=Cluster(CARDS["H200"] if gpu else CARDS["cpu"]),
        learning=replace(found.learning, precision=a.precision, recompute=a.recompute),
        sampling=replace(found.sampling, precision=a.sampler),
    )


def predicted(setup: Setup, micro_batch: int, recomputes: bool) -> dict[str, float]:
    """Predicted seconds of each phase, with the micro-batch that the rehearsal chose."""
    setup = replace(setup, learning=replace(setup.learning, micro_batch=micro_batch))
    learner, load = LearnerCost(setup, setup.members[1], recomputes), Load.learned(setup)
    episodes = setup.plan.problems * setup.plan.group_size
    return {
        "sample": sample_seconds(setup, memory_of(setup).pages, episodes).seconds,
        "score": learner.forward(all_rows(learner, load), 1).seconds,
        "train": learner.step(step_rows(learner, load)).seconds,
        "gate": learner.forward(all_rows(learner, load), 2).seconds,
    }


def timed(work: Callable[[], Any]) -> tuple[Any, float, float | None]:
    """The result of a call, its seconds, and its peak memory in GB."""
    wait()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    found = work()
    wait()
    return found, time.perf_counter() - started, peak_gb()


def measured(a: argparse.Namespace, tokens: int) -> Iterator[dict[str, Any]]:
    setup, vocabulary = planned(a, tokens), SHAPES[a.shape]["vocab_size"]
    engine = adapted_team(
        make_model(a.shape), 2, a.precision, micro_batch=a.micro_batch, sampler=a.sampler, recompute=a.recompute
    )
    for learner in engine.learners.values():
        learner.policy.end_ids = frozenset()
    rehearsal = engine.rehearse(setup.demand)
    plan = engine.memory_plan(setup.demand)  # with the outcome of the rehearsal
    if not plan.fits:
        so_far("does not fit by plan", {"tokens": tokens, "GB": plan.total / GB})
    micro_batch, recomputed = rehearsal.micro_batch["a1"], "a1" in rehearsal.recomputed
    expected = predicted(setup, micro_batch, recomputed)
    problems = random_prompts(np.random.default_rng(0), setup.plan.problems, a.prompt, vocabulary)
    contexts = [problems[e // setup.plan.group_size] for e in range(a.episodes)]

    def made_up() -> tuple[list[Any], list[Any]]:
        rng = np.random.default_rng(1)
        first, second = (random_prompts(rng, a.episodes, tokens, vocabulary) for _ in range(2))
        return [np.concatenate(pair) for pair in zip(contexts, first, strict=True)], second

    def play() -> tuple[list[Any], list[Any]]:
        first = engine.sample("a0", contexts, uniforms(1, a.episodes, tokens))
        grown = [np.concatenate([c, s.token_ids]) for c, s in zip(contexts, first, strict=True)]
        return grown, [s.token_ids for s in engine.sample("a1", grown, uniforms(2, a.episodes, tokens))]

    def row(phase: str, count: int, seconds: float, peak: float | None) -> dict[str, Any]:
        return {
            "tokens": tokens, "phase": phase, "seconds": seconds, "planned s": expected[phase.split(",")[0]],
            "tokens/s": count / seconds, "peak GB": peak, "planned GB": plan.total / GB,
            "messages at a time": micro_batch, "recomputed": recomputed,
        }  # fmt: skip

    if a.words == "random":
        grown, said = made_up()
    else:
        if torch.cuda.is_available():  # graphs are captured and kernels compiled before the clock starts
            engine.sample("a0", contexts, uniforms(3, a.episodes, 8))
        (grown, said), took, peak = timed(play)
        yield row("sample", 2 * a.episodes * tokens, took, peak)
    learner, read = engine.learner("a1"), sum(map(len, grown)) + a.episodes * tokens
    batch = make_batch("a1", grown, said, setup.plan.group_size)
    before, some = learner.snapshot(), np.arange(max(1, a.episodes // STEPS))
    _, took, peak = timed(lambda: learner.begin(batch))
    yield row("score", read, took, peak)
    ones = np.where(some % 2 == 0, 1.0, -1.0)
    asked = sum(len(grown[k]) + tokens for k in some)
    for phase in ("train", "train, second"):
        before_step = learner.passes.tokens["trained"]
        _, took, peak = timed(lambda: learner.step(some, ones, Objective(), beta=1.0, learning_rate=1e-5))
        passed = learner.passes.tokens["trained"] - before_step
        yield {**row(phase, asked, took, peak), "passed / asked": passed / asked}
    kl, took, peak = timed(learner.measure)
    yield {**row("gate", read, took, peak), "KL, nats per message": float(kl.full_M.mean())}
    learner.restore(before)
    learner.end()


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    lengths = (4096, 8192, 16384) if gpu else (2048,)
    parser.add_argument("--tokens", type=whole_numbers, default=lengths, help="of a message; several lengths, by comma")
    parser.add_argument("--episodes", type=whole_number, default=16 if gpu else 4)
    parser.add_argument("--prompt", type=whole_number, default=256)
    parser.add_argument("--micro-batch", type=whole_number, default=16)
    parser.add_argument("--precision", choices=["fp32", "tf32", "fp16", "bf16"], default="fp16" if gpu else "fp32")
    parser.add_argument("--sampler", choices=["fp32", "fp16", "bf16"], default="fp16" if gpu else "fp32")
    parser.add_argument("--recompute", choices=["auto", "always", "never"], default="auto")
    parser.add_argument("--words", choices=["sampled", "random"], default="sampled", help="random: nothing is sampled")
    parser.add_argument("--planned", action="store_true", help="only what one H200 is predicted to take")
    parser.add_argument(
        "--markdown", action="store_true", help="with --planned: the table of docs/sizing.md, to stdout"
    )
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.markdown and not a.planned:
        parser.error("--markdown goes with --planned: what is measured has no table in a document")
    if a.planned:
        found = list(plans())
        if a.markdown:
            print("\n".join(map(as_markdown, found)))
            return
        title = "two agents, 64 episodes, one H200, by plan"
        report(title, tuple(found[0]), [list(one.values()) for one in found], {"results": found}, a.json)
        return
    if a.episodes % min(GROUP, a.episodes):
        parser.error(f"--episodes: whole groups of {GROUP}, or fewer than one")
    rows = []
    for tokens in a.tokens:
        for found in measured(a, tokens):
            rows.append(found)
            so_far(found["phase"], found)
        if gpu:
            torch.cuda.empty_cache()
    header = tuple(dict.fromkeys(name for found in rows for name in found))
    title = f"{a.shape}: {a.episodes} episodes of two agents, {a.precision}, sampled in {a.sampler}"
    record = {"benchmark": "long", **vars(a), "results": rows}
    report(title, header, [[found.get(name) for name in header] for found in rows], record, a.json)


if __name__ == "__main__":
    main()
