"""A stage of a team of adapters on one GPU, phase by phase, beside the same stage with ``generate`` and with TRL.

    python bench/stage.py --shape 1.7b          # 3 agents, 64 problems x 8 episodes x 3 turns of 256 tokens
    python bench/stage.py --shape 1.7b --parts ours --sampler fp16 --score own,sampler      # both ways of scoring
    python bench/stage.py --shape 8b --parts ours --problems 32 --sampler fp16 --one-copy --pages-gb 8 --micro-batch 4
    python bench/stage.py --shape tiny --problems 2 --group 2 --tokens 8 --prompt 16        # on a CPU

Ours samples all turns again before every update and runs the whole update: scores, steps, the exact gate. Before the
clock starts it rehearses the longest steps, as a run does, which lowers an agent's micro-batch to what fits. The rivals
are measured on one turn of middle length and one update (padded training on a quarter of an update's messages), and
scaled up: ``generate`` + padded training, and TRL's GRPO step if trl is installed, each with the default cache and with
a static one, which transformers compiles and captures. All are warm when the clock starts. ``--parts plans`` runs the
same stage with plans that reuse rollouts, which decide as in training, and ``--parts memory`` measures the memory of
teams of 1 and of 8 agents in conversations of eight turns.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import update as update_bench
from common import (
    POSITIONS,
    SCORES,
    SHAPES,
    adapted_team,
    make_batch,
    make_model,
    peak_gb,
    random_prompts,
    report,
    seconds,
    so_far,
)
from rollout import DTYPES, generate
from teamtr.batches import AgentBatch, RolloutBatch
from teamtr.presets import PRESETS
from teamtr.randomness import uniforms
from teamtr.rollout import Ledger, RolloutContext
from teamtr.rollout import play as rollout_play
from teamtr.rollout.cost import Account, price_of_sampling
from teamtr.rollout.redraw import redraw
from teamtr.tasks import Task
from teamtr.team import Agent, Schedule, Team
from teamtr.training.algorithm import run_stage, schedule
from teamtr.training.batch import Optimization, TrainingBatch
from teamtr.training.update import update_agent
from teamtr.types import AgentState, Problem, Verdict
from throughput import shape_of, team
from trl_step import as_stage, grpo_step

PARTS = ("ours", "rivals", "plans", "memory")
PLANS = ("teamtr", "naive_sequential", "reweighted", "auto", "partial")
OURS = {"own": "ours", "sampler": "ours, scores of the sampler"}
RIVALS = {
    "generate-static": "generate, static cache + padded",
    "trl-static": "TRL, static cache",
    "generate": "generate + padded",
    "trl": "TRL",
}
RADIUS = 0.05
MEMORY_TURNS, MEMORY_PAGES_GB = 8, 12.0

Said = dict[str, tuple[list[Any], list[Any], list[Any]]]
"""Contexts, messages and their log-probabilities by agent."""


def team_of(a: argparse.Namespace, agents: int, **sampling: Any) -> Any:
    compiled = None if a.compiled == "auto" else a.compiled == "yes"
    settings = {"sampler": a.sampler, "pages_gb": a.pages_gb, "one_copy": a.one_copy, "compiled": compiled, **sampling}
    return adapted_team(_model(a, agents), agents, a.precision, micro_batch=a.micro_batch, **settings)


def _model(a: argparse.Namespace, agents: int) -> Any:
    """A base that is held once is created in fp16, since the float32 model may not fit on the card."""
    positions = max(POSITIONS, a.prompt + agents * a.tokens)
    if not a.one_copy:
        return make_model(a.shape, max_position_embeddings=positions)
    model = make_model(a.shape, torch.float16, max_position_embeddings=positions)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms
            parameter.data = parameter.data.float()
    return model


def play(engine: Any, a: argparse.Namespace, seed: int, clock: Counter[str], turns: int) -> Said:
    """A rollout in token ids: the agents speak in turn, each with the whole conversation as context."""
    rng = np.random.default_rng(seed)
    problems = random_prompts(np.random.default_rng(7), a.problems, a.prompt, SHAPES[a.shape]["vocab_size"])
    contexts = [problems[e // a.group] for e in range(a.problems * a.group)]
    said: Said = {agent: ([], [], []) for agent in engine.learners}
    for turn, agent in enumerate(islice(cycle(engine.learners), turns), start=1):
        started = time.perf_counter()
        samples = engine.sample(agent, contexts, uniforms(int(rng.integers(2**31)), len(contexts), a.tokens))
        messages = [s.token_ids for s in samples]
        clock[f"turn {turn}"] += time.perf_counter() - started
        for kept, new in zip(said[agent], (contexts, messages, [s.logprobs for s in samples]), strict=True):
            kept.extend(new)
        contexts = [np.concatenate([c, m]) for c, m in zip(contexts, messages, strict=True)]
    return said


def update(
    engine: Any, a: argparse.Namespace, agent: str, said: Said, seed: int, score: str = "own", radius: float = RADIUS
) -> Any:
    """A whole update of this agent, with random rewards."""
    plan = PRESETS["teamtr"]
    returns = np.random.default_rng(seed).random((a.problems, a.group))
    advantages = plan.advantage.estimate(returns)
    contexts, messages, logprobs = said[agent]
    batch = make_batch(agent, contexts, messages, a.group, episodes=returns.size, logprobs=logprobs)
    data = TrainingBatch(batch, advantages, returns)
    optimization = Optimization(learning_rate=1e-5, epochs=a.epochs, minibatches=4, score=score)
    state = AgentState(beta=1.0, step_scale=1.0, radius_nats=radius)
    return update_agent(engine.learner(agent), data, plan, optimization, state, seed=seed).report


def ours(a: argparse.Namespace, score: str) -> dict[str, Any]:
    keeps = score == "sampler"
    engine, phases = team_of(a, a.agents, keeps=keeps), Counter()
    rehearse(engine, a)
    warm(engine, play(engine, a, 0, Counter(), a.agents), a)
    sampled, told = 0, {}
    for k, agent in enumerate(engine.learners):
        said: Said = {}
        started = time.perf_counter()
        engine.keep_scores(agent if keeps else None)
        phases["sample"] += seconds(lambda k=k, said=said: said.update(play(engine, a, 1 + k, phases, a.agents)))
        sampled += sum(len(m) for _, messages, _ in said.values() for m in messages)
        engine.keep_scores(None)
        done = update(engine, a, agent, said, k, score)
        phases.update(done.seconds)
        phases["whole"] += time.perf_counter() - started
        phases[f"messages measured by {agent}"] = done.messages_measured
        names = ("sampler_scored", "mismatch_kl", "noise_floor", "own_scores", "kl_upper", "outcome", "tokens")
        told[agent] = {name: getattr(done, name) for name in names}
        engine.publish(agent, done.version_after)
        so_far(f"until {agent}", {**phases, "peak GB": peak_gb()})
    shares = {
        "micro-batch": {agent: engine.learner(agent).passes.micro_batch for agent in engine.learners},
        "sampled tokens/s": sampled / phases["sample"],
        "gate share of the stage": phases["gate"] / phases["whole"],
        "gate share without sampling": phases["gate"] / (phases["whole"] - phases["sample"]),
    }
    return {**phases, **shares, "peak GB": peak_gb(), "sampled tokens": sampled, "updates": told}


class Numbers:
    """A codec whose text is the token ids as numbers."""

    def encode(self, messages: Sequence[dict[str, str]]) -> Any:
        found = [int(x) for m in messages for x in re.findall(r"(?<![a-z0-9])\d+", m["content"])]
        return np.array(found, dtype=np.int32)

    def encode_message(self, text: str) -> Any:
        return self.encode([{"content": text}])

    def decode(self, token_ids: Any) -> str:
        return " ".join(map(str, token_ids))


class Coins(Task):
    """Random problems with a pseudo-random reward of 0 or 1, computed from the text."""

    def __init__(self, a: argparse.Namespace) -> None:
        prompts = random_prompts(np.random.default_rng(7), a.problems, a.prompt, SHAPES[a.shape]["vocab_size"])
        super().__init__({"train": [Problem(str(k), Numbers().decode(p)) for k, p in enumerate(prompts)]})

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        heads = [zlib.crc32(" ".join(texts).encode()) % 2 for _, _, texts in episodes]
        return [Verdict("right" if head else "wrong", float(head)) for head in heads]


def by_plan(a: argparse.Namespace, name: str, stages: int = 2) -> dict[str, Any]:
    """Two stages of the training loop; the second is measured, the first warms up and measures the cost of sampling.
    The first step of an update is shortened to its share of the radius, so that steps have the intended size."""
    engine, plan, task = team_of(a, a.agents), PRESETS[name], Coins(a)
    rehearse(engine, a)
    agents = tuple(Agent(n, engine.version(n), max_tokens=a.tokens) for n in engine.learners)
    context = RolloutContext(
        engine, dict.fromkeys(engine.learners, Numbers()), Schedule.repeated(tuple(engine.learners), 1), task
    )
    team, states = Team(agents), dict.fromkeys(engine.learners, AgentState(1.0, 1.0, RADIUS))
    optimization = Optimization(learning_rate=1e-3, epochs=a.epochs, minibatches=4)
    optimization = replace(optimization, gate_share=1.0 if plan.reuses_rollouts else optimization.gate_share)
    account = Account()
    found: dict[str, Any] = {}
    cost: float | None = None

    def collect(team: Team, step: int, worn: RolloutBatch | None) -> RolloutBatch:
        ledger = Ledger()
        if worn is None:
            batch = rollout_play(context, team, task.problems("train"), a.group, seed=step, ledger=ledger)
        else:
            ends = {n: engine.info(n).end_ids for n in team.names}
            batch = redraw(context, team, worn, seed=step, end_ids=ends, ledger=ledger).batch
        account.sampled(ledger)
        found["sample"] += sum(ledger.seconds.values())
        found["sampled tokens"] += sum(ledger.sampled_tokens.values())
        return batch

    def teach(agent: str, data: TrainingBatch) -> Any:
        done = update_agent(engine.learner(agent), data, plan, optimization, states[agent], seed=1)
        states[agent] = done.state
        account.updated(agent, done.report.tokens, done.report.seconds)
        found.update({phase: found.get(phase, 0.0) + spent for phase, spent in done.report.seconds.items()})
        return done

    def price(batch: RolloutBatch, own: AgentBatch) -> float | None:
        return price_of_sampling(cost if name == "auto" else None, batch, own, a.epochs)

    for stage in range(stages):
        found = {"sample": 0.0, "sampled tokens": 0}
        started = time.perf_counter()
        slots = schedule(plan.order, team.trainable, np.random.default_rng(stage))
        steps = list(run_stage(team, plan, collect, teach, slots, price=price))
        team, found["whole"] = steps[-1].team, time.perf_counter() - started
        cost = account.sampling_cost()
        so_far(f"{name}, stage {stage + 1} of {stages}", found)
    shares = [step.choice.share for step in steps if step.choice.share is not None]
    actions = " ".join(step.choice.action for step in steps)
    kl = float(np.mean([step.report.kl_full for step in steps]))
    worth = min(shares, default=None)
    return {**found, "actions": actions, "least share": worth, "KL": kl, "sampling cost": cost, "peak GB": peak_gb()}


def sizes(a: argparse.Namespace) -> tuple[int, ...]:
    return a.agents, a.problems, a.group, a.prompt, a.tokens


def rehearse(engine: Any, a: argparse.Namespace) -> None:
    """Rehearse the longest steps, as a run does, which lowers an agent's micro-batch to what fits."""
    done = engine.rehearse(team(shape_of(a.shape), *sizes(a), micro_batch=a.micro_batch).demand)
    so_far("rehearsed", {"micro-batch": done.micro_batch, "recomputed": done.recomputed})


def warm(engine: Any, said: dict[str, Any], a: argparse.Namespace) -> None:
    """Run one training step to choose its kernels, and restore the weights. Sampling is warm by then."""
    agent = next(iter(engine.learners))
    learner = engine.learner(agent)
    before = learner.snapshot()
    contexts, messages, _ = (part[: 2 * a.micro_batch] for part in said[agent])
    batch = make_batch(agent, contexts, messages, a.group)
    learner.begin(batch)
    learner.step(np.arange(len(batch)), np.ones(len(batch)), PRESETS["teamtr"].objective, beta=1.0, learning_rate=1e-5)
    learner.measure()
    learner.restore(before)
    learner.end()


def middle(a: argparse.Namespace) -> int:
    """Context length of a middle turn: the problem and half of the other agents' messages."""
    return a.prompt + (a.agents - 1) * a.tokens // 2


def half() -> str:
    return "bf16" if torch.cuda.is_available() else "fp32"


def rival(a: argparse.Namespace, training: Callable[[], dict[str, float]], kind: str | None) -> dict[str, Any]:
    """A stage composed of a middle turn sampled by ``generate`` with this cache, scaled up, and padded training."""
    rows, vocabulary = a.problems * a.group, SHAPES[a.shape]["vocab_size"]
    options = {"cache_implementation": kind} if kind else {}
    model = make_model(a.shape, DTYPES[half()])
    with torch.no_grad():
        prompts = random_prompts(np.random.default_rng(3), rows, middle(a), vocabulary)
        rate = generate(model, prompts, a.tokens, **options)["whole"]
    so_far(f"generate, {kind or 'dynamic'} cache, tokens/s", rate)
    del model
    phases = {"sample": a.agents * a.agents * rows * a.tokens / rate, **training()}
    return {**phases, "whole": sum(phases.values()), "peak GB": peak_gb()}


def padded_training(a: argparse.Namespace) -> dict[str, float]:
    """Seconds of a stage's padded training, scaled up from a quarter of one update."""
    rows, vocabulary, rng = a.problems * a.group, SHAPES[a.shape]["vocab_size"], np.random.default_rng(4)
    part = max(4, rows // 4)
    args = SimpleNamespace(
        shape=a.shape, precision=half(), steps=1, rival_micro_batch=a.rival_micro_batch, epochs=a.epochs
    )
    batch = make_batch(
        "a0", random_prompts(rng, part, middle(a), vocabulary), random_prompts(rng, part, a.tokens, vocabulary), a.group
    )
    trained = update_bench.padded(args, batch, rng.normal(size=part))
    return {phase: a.agents * rows / part * trained[f"{phase} s"] for phase in ("score", "train")}


def trl(a: argparse.Namespace, kind: str | None) -> dict[str, Any]:
    """A stage composed of TRL's GRPO steps with a middle context."""
    step = grpo_step(
        a.shape, problems=a.problems, group=a.group, prompt=middle(a), tokens=a.tokens, cache=kind,
        micro_batch=a.rival_micro_batch, precision=half(), steps=1,
    )  # fmt: skip
    return as_stage(step, agents=a.agents, epochs=a.epochs)


def beside(a: argparse.Namespace, name: str, training: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """The rival of this name."""
    library, _, kind = name.partition("-")
    return trl(a, kind or None) if library == "trl" else rival(a, training, kind or None)


def memory(a: argparse.Namespace, agents: int) -> dict[str, Any]:
    """Peak memory of a small stage with this many agents. The number of turns is fixed, so that contexts and messages
    are the same and only the number of agents differs. All are updated on the same conversations. Micro-batches and KV
    memory are small, so that neither hides the cost of an agent."""
    sizes = {"problems": max(2, a.problems // 8), "tokens": a.tokens // 2, "micro_batch": max(1, a.micro_batch // 4)}
    small = argparse.Namespace(**{**vars(a), **sizes})
    engine = team_of(small, agents, compiled=False, pages_gb=MEMORY_PAGES_GB)
    said = play(engine, small, 0, Counter(), MEMORY_TURNS)
    for k, agent in enumerate(engine.learners):
        update(engine, small, agent, said, k)
    return {
        "peak GB": peak_gb(),
        "micro-batch": min(engine.learner(agent).passes.micro_batch for agent in engine.learners),
    }


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
    parser.add_argument("--sampler", default="bf16" if gpu else "fp32", help="precision of sampling")
    parser.add_argument("--score", default="own", help="who scores the old policy: own, sampler, or both, with a comma")
    parser.add_argument("--micro-batch", type=int, default=64, help="of ours, lowered to what fits (default: 64)")
    parser.add_argument("--one-copy", action="store_true", help="the base once, in fp16, for learner and sampler")
    parser.add_argument("--pages-gb", type=float, help="memory for keys and values (default: a share of what is free)")
    parser.add_argument(
        "--compiled", choices=("auto", "yes", "no"), default="auto", help="our sampling (auto: by size)"
    )
    parser.add_argument("--rival-micro-batch", type=int, default=8)
    parser.add_argument("--rivals", default=",".join(RIVALS), help="which of them (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them to run (default: %(default)s)")
    parser.add_argument("--plans", default=",".join(PLANS), help="which plans to compare (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    parts = a.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    plans = a.plans.split(",")
    if unknown := set(plans) - set(PLANS):
        parser.error(f"--plans: {', '.join(sorted(unknown))}; there are {', '.join(PLANS)}")
    scores = a.score.split(",")
    if unknown := set(scores) - set(SCORES):
        parser.error(f"--score: {', '.join(sorted(unknown))}; there are {', '.join(SCORES)}")
    rivals = a.rivals.split(",")
    if unknown := set(rivals) - set(RIVALS):
        parser.error(f"--rivals: {', '.join(sorted(unknown))}; there are {', '.join(RIVALS)}")
    results: dict[str, dict[str, Any]] = {}
    lost: list[str] = []
    training = cache(partial(padded_training, a))
    for name, part, run in (
        *((OURS[score], "ours", partial(ours, a, score)) for score in scores),
        *((RIVALS[name], "rivals", partial(beside, a, name, training)) for name in rivals),
        *((f"plan {name}", "plans", partial(by_plan, a, name)) for name in plans),
    ):
        if part not in parts:
            continue
        if gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            results[name] = run()
        except Exception as error:  # a failing TRL must not lose what was measured before
            if not name.startswith("TRL"):
                raise
            lost.append(f"{name}: not measured: {type(error).__name__}: {error}")
            print(lost[-1], file=sys.stderr, flush=True)
            continue
        so_far(name, results[name])
    peaks: dict[int, dict[str, Any]] = {}
    for agents in (1, 8) if "memory" in parts else ():
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        peaks[agents] = memory(a, agents)
        so_far(f"{agents} agents", peaks[agents])
    keys = ("sample", "score", "train", "gate", "whole", "sampled tokens", "gate share of the stage", "peak GB")
    rows = [(name, *(r.get(k) for k in keys)) for name, r in results.items()]
    title = f"{a.shape}: {a.agents} agents, {a.problems} problems x {a.group}, turns of {a.tokens} tokens; seconds"
    record = {"benchmark": "stage", **vars(a), "results": results, "memory by agents": peaks}
    if {"ours", "rivals"} <= set(parts):
        theirs = {name: r["whole"] for name, r in results.items() if not name.startswith(("ours", "plan "))}
        record["times faster"] = min(theirs.values()) / results[OURS[scores[0]]]["whole"]
        title += f"; {record['times faster']:.1f} times faster than the fastest rival"
    report(title, ("", *keys), rows, record, a.json)
    most = {agents: found["peak GB"] for agents, found in peaks.items()}
    if most.get(1) and most.get(8):
        print(
            f"peak memory: 8 agents {most[8]:.1f} GB, 1 agent {most[1]:.1f} GB, ratio {most[8] / most[1]:.2f}",
            file=sys.stderr,
        )
    if lost:
        sys.exit("\n".join(lost))


if __name__ == "__main__":
    main()
