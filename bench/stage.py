"""A stage of a team of adapters on one card, phase by phase, beside the same stage on ``generate`` and padding.

    python bench/stage.py --shape 1.7b          # 3 agents, 64 problems x 8 episodes x 3 turns of 256 tokens
    python bench/stage.py --shape tiny --problems 2 --group 2 --tokens 8 --prompt 16        # on a CPU

Ours plays all turns anew before every update and takes the whole update: scores, steps, the exact gate. The rivals are
measured on one turn of middle length and one update (the padded one on a quarter of an update's messages), and
multiplied: ``generate`` + padded training, and TRL's GRPO step where trl is installed. Then the memory of teams of
1 and of 8 agents.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import update as update_bench
from common import SHAPES, adapted_team, make_batch, make_model, peak_gb, random_prompts, report, seconds, so_far
from rollout import generate
from teamtr.lesson import Lesson, Optimisation
from teamtr.presets import PRESETS
from teamtr.theory.advantages import group_advantages
from teamtr.update import update_agent
from trl_step import as_stage, grpo_step


def play(engine: Any, a: argparse.Namespace, seed: int, clock: Counter[str]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Every agent speaks once, in turn, on what the earlier ones said: token ids only."""
    rng = np.random.default_rng(seed)
    problems = random_prompts(np.random.default_rng(7), a.problems, a.prompt, SHAPES[a.shape]["vocab_size"])
    contexts = [problems[e // a.group] for e in range(a.problems * a.group)]
    said: dict[str, tuple[list[Any], list[Any]]] = {}
    for turn, agent in enumerate(engine.learners, start=1):
        started = time.perf_counter()
        samples = engine.sample(agent, contexts, max_tokens=a.tokens, seed=int(rng.integers(2**31)))
        messages = [s.token_ids for s in samples]
        clock[f"turn {turn}"] += time.perf_counter() - started
        said[agent] = (contexts, messages)
        contexts = [np.concatenate([c, m]) for c, m in zip(contexts, messages, strict=True)]
    return said


def ours(a: argparse.Namespace) -> dict[str, Any]:
    engine = adapted_team(
        make_model(a.shape), a.agents, a.precision, micro_batch=a.micro_batch,
        sampler="bf16" if torch.cuda.is_available() else "fp32", compiled=getattr(a, "compiled", None),
    )  # fmt: skip
    plan, phases = PRESETS["teamtr"], Counter()
    optimisation = Optimisation(learning_rate=1e-5, epochs=a.epochs, minibatches=4)
    play(engine, a, 0, Counter())  # compile and capture
    sampled = 0
    for k, agent in enumerate(engine.learners):
        said: dict[str, Any] = {}
        started = time.perf_counter()
        phases["sample"] += seconds(lambda k=k, said=said: said.update(play(engine, a, 1 + k, phases)))
        sampled += sum(len(m) for _, messages in said.values() for m in messages)
        contexts, messages = said[agent]
        returns = np.random.default_rng(k).random((a.problems, a.group))
        advantages = group_advantages(returns, a_clip=plan.a_clip, eps_norm=plan.eps_norm)
        lesson = Lesson(make_batch(agent, contexts, messages, a.group), advantages, returns)
        done = update_agent(
            engine.learner(agent), lesson, region=plan.region, objective=plan.objective, radii=plan.radii,
            optimisation=optimisation, gamma=1.0, a_clip=plan.a_clip, eps_norm=plan.eps_norm,
            normalise=plan.normalise, seed=k,
        )  # fmt: skip
        phases.update(done.report.seconds)
        phases["whole"] += time.perf_counter() - started
        phases[f"messages measured by {agent}"] = done.report.messages_measured
    phases["micro-batch"] = min(engine.learner(agent).micro_batch for agent in engine.learners)
    return {**phases, "peak GB": peak_gb(), "sampled tokens": sampled}


def rival(a: argparse.Namespace) -> dict[str, Any]:
    """One turn in the middle with ``generate``, a quarter of one update's padded training, multiplied."""
    rows, vocabulary = a.problems * a.group, SHAPES[a.shape]["vocab_size"]
    context = a.prompt + (a.agents - 1) * a.tokens // 2
    model = make_model(a.shape, torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    rng = np.random.default_rng(3)
    with torch.no_grad():
        rate = generate(model, random_prompts(rng, rows, context, vocabulary), a.tokens)["whole"]
    del model
    part = max(4, rows // 4)
    args = SimpleNamespace(
        shape=a.shape, precision="bf16" if torch.cuda.is_available() else "fp32", steps=1,
        rival_micro_batch=a.rival_micro_batch, epochs=a.epochs,
    )  # fmt: skip
    batch = make_batch(
        "a0", random_prompts(rng, part, context, vocabulary), random_prompts(rng, part, a.tokens, vocabulary), a.group
    )
    trained = update_bench.padded(args, batch, rng.normal(size=part))
    updates, turns, whole_batch = a.agents, a.agents, rows / part
    phases = {
        "sample": updates * turns * rows * a.tokens / rate,
        "score": updates * whole_batch * trained["score s"],
        "train": updates * whole_batch * trained["train s"],
    }
    return {**phases, "whole": sum(phases.values()), "peak GB": peak_gb()}


def trl(a: argparse.Namespace) -> dict[str, Any]:
    """A stage composed of TRL's GRPO steps at middle context."""
    step = grpo_step(
        a.shape, problems=a.problems, group=a.group, prompt=a.prompt + (a.agents - 1) * a.tokens // 2, tokens=a.tokens,
        micro_batch=a.rival_micro_batch, precision="bf16" if torch.cuda.is_available() else "fp32", steps=1,
    )  # fmt: skip
    return as_stage(step, agents=a.agents, epochs=a.epochs)


def memory(a: argparse.Namespace, agents: int) -> float | None:
    """Peak of a small stage with this many agents."""
    small = {"agents": agents, "problems": max(2, a.problems // 8), "epochs": 1, "compiled": False}
    small = argparse.Namespace(**{**vars(a), **small})
    return ours(small)["peak GB"]


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--problems", type=int, default=64 if gpu else 2)
    parser.add_argument("--group", type=int, default=8 if gpu else 2)
    parser.add_argument("--prompt", type=int, default=256 if gpu else 16)
    parser.add_argument("--tokens", type=int, default=256 if gpu else 8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--precision", default="fp16" if gpu else "fp32")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--rival-micro-batch", type=int, default=8)
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name, run in (("ours", ours), ("generate + padded", rival), ("TRL", trl)):
        if name != "ours" and a.no_rival:
            continue
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            results[name] = run(a)
        except (ImportError, RuntimeError) as error:
            if name != "TRL":
                raise
            print(f"TRL: not measured: {error}", file=sys.stderr)
            continue
        so_far(name, results[name])
    peaks: dict[int, float | None] = {}
    for agents in () if a.no_memory else (1, 8):
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        peaks[agents] = memory(a, agents)
        so_far(f"peak GB of {agents} agents", peaks[agents])
    keys = ("sample", "score", "train", "gate", "whole", "sampled tokens", "peak GB")
    rows = [(name, *(r.get(k) for k in keys)) for name, r in results.items()]
    title = f"{a.shape}: {a.agents} agents, {a.problems} problems x {a.group}, turns of {a.tokens} tokens; seconds"
    record = {"benchmark": "stage", **vars(a), "results": results, "memory GB by agents": peaks}
    if not a.no_rival:
        fastest = min(r["whole"] for name, r in results.items() if name != "ours")
        record["times faster"] = fastest / results["ours"]["whole"]
        title += f"; {record['times faster']:.1f} times faster than the fastest rival"
    report(title, ("", *keys), rows, record, a.json)
    if peaks.get(1) and peaks.get(8):
        print(f"peak memory: 8 agents {peaks[8]:.1f} GB, 1 agent {peaks[1]:.1f} GB, ratio {peaks[8] / peaks[1]:.2f}")


if __name__ == "__main__":
    main()
