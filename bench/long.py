"""Stages on long messages, phase by phase, beside the prediction: two adapters on one base.

    python bench/long.py --shape 1.7b --tokens 4096 --episodes 16 --radius 0.6 --json              # on a GPU
    python bench/long.py --shape 1.7b --tokens 32768 --pieces 4 --radius 5 --json                  # in minutes
    python bench/long.py --shape 8b --one-copy --tokens 16384 --pieces 4 --radius 2.5 --json
    python bench/long.py --shape 1.7b --tokens 16384 --words random --radius 2.5 --json            # training alone
    python bench/long.py --shape tiny --tokens 2048 --episodes 4                                   # on a CPU
    python bench/long.py --planned --markdown                                                      # nothing is run

Every message reaches its maximal length. The first agent speaks after a prompt that its group shares, the second after
the prompt and the first agent's message. Both are updated as in training: scores of the old policy, four steps, the
exact gate. "stage" counts the rollout before each of the two updates, as it takes the same time. "passed / asked" is 1
if no micro-batch was recomputed with a smaller loss scale. Before the clock starts, the longest step is rehearsed as in
a run, which fixes the micro-batch, the loss scale, and whether activations are recomputed (``--recompute``). "planned"
is the prediction for the same models, card and settings; the peak of a phase is shown beside the plan for all phases.

``--pieces``: messages are random tokens, and the sampling of a turn is timed in the given number of pieces (see
bench/pieces.py). ``--radius``: in nats per message; it should be one that the precision resolves at this length
(bench/precision.py), or the gate takes back every step. ``--planned``: the memory plan of 64 episodes on one H200, with
activations kept and recomputed: the table of docs/sizing.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from common import SHAPES, peak_gb, random_prompts, report, so_far, whole_number
from pieces import Timed, in_pieces
from stage import RADIUS, Said, play, team_of, update
from teamtr.engines.policy import Recompute
from teamtr.planning.cards import CARDS
from teamtr.planning.setup import Cluster, Setup
from teamtr.planning.stage import Prediction, predict
from teamtr.ports import GB
from throughput import settled_seconds, shape_of, team

GROUP = 8
LENGTHS = (4096, 8192, 16384, 32768)
BASES = {"1.7b": ("fp32", False), "8b": ("fp16", True)}
"""``learner.base``, and whether adapters are applied by row. The larger model's base is held once."""


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


def planned(a: argparse.Namespace) -> Setup:
    """The measured setup, as input of the planner."""
    found = team(
        shape_of(a.shape),
        2,
        a.problems,
        a.group,
        a.prompt,
        a.tokens,
        micro_batch=a.micro_batch,
        epochs=a.epochs,
        shared=0,
    )
    base, pages = "fp16" if a.one_copy else "fp32", int(a.pages_gb * GB) if a.pages_gb else None
    return replace(
        found,
        cluster=Cluster(CARDS["H200"] if torch.cuda.is_available() else CARDS["cpu"]),
        learning=replace(found.learning, precision=a.precision, base=base, recompute=a.recompute),
        sampling=replace(found.sampling, precision=a.sampler, memory=pages, by_row=a.one_copy),
    )


def measured(a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the result: the rollout, the phases of each agent's update, and the stage."""
    setup = planned(a)
    engine = team_of(a, 2, recompute=a.recompute)
    for learner in engine.learners.values():
        learner.policy.end_ids = frozenset()  # messages reach their maximal length
    rehearsal = engine.rehearse(setup.demand)
    plan = engine.memory_plan(setup.demand)  # with the outcome of the rehearsal
    if not plan.fits:
        so_far("does not fit by plan", {"tokens": a.tokens, "GB": plan.total / GB})
    expected, peaks = settled_seconds(setup, rehearsal.micro_batch, rehearsal.recomputed), []

    def row(agent: str, phase: str, seconds: float, wanted: float, **more: Any) -> dict[str, Any]:
        return {
            "tokens": a.tokens, "agent": agent, "phase": phase, "seconds": seconds, "planned s": wanted, **more,
            "planned GB": plan.total / GB,
        }  # fmt: skip

    def peak() -> float | None:
        found = peak_gb()
        if found is not None:
            peaks.append(found)
            torch.cuda.reset_peak_memory_stats()
        return found

    peak()
    if torch.cuda.is_available():
        # KV blocks are reserved, graphs captured and kernels compiled before the clock starts.
        play(engine, argparse.Namespace(**{**vars(a), "tokens": min(8, a.tokens)}), 0, Counter(), 2)
    sampled: float | None = None
    if a.words == "random" and not a.pieces:
        said = in_random_words(a, list(engine.learners))
    else:
        one = in_pieces(engine, a, 1, a.pieces) if a.pieces else Timed.of(lambda: play(engine, a, 1, Counter(), 2))
        said, sampled = one.found, one.wall
        yield row("all", "sample", sampled, expected["all", "sample"], **{"peak GB": peak()})
    took = planned_s = 0.0
    for k, (agent, learner) in enumerate(engine.learners.items()):
        passed = learner.passes.tokens["trained"]
        done = update(engine, a, agent, said, k, radius=a.radius)
        settled = {
            "messages at a time": rehearsal.micro_batch[agent], "recomputed": agent in rehearsal.recomputed,
            "peak GB": peak(),
        }  # fmt: skip
        asked = sum(map(len, said[agent][0])) + sum(map(len, said[agent][1]))
        trained = {"passed / asked": (learner.passes.tokens["trained"] - passed) / asked}
        gated = {
            "outcome": done.outcome,
            "KL, nats per message": done.kl_full,
            "messages measured": done.messages_measured,
        }
        for phase, extra in (("score", {}), ("train", trained), ("gate", gated)):
            took += done.seconds[phase]
            planned_s += expected[agent, phase]
            yield row(agent, phase, done.seconds[phase], expected[agent, phase], **settled, **extra)
    if sampled is not None:  # again before every update
        whole = len(engine.learners) * sampled + took
        whole_planned = len(engine.learners) * expected["all", "sample"] + planned_s
        yield row("all", "stage", whole, whole_planned, **{"peak GB": max(peaks, default=None)})


def in_random_words(a: argparse.Namespace, agents: Sequence[str]) -> Said:
    """What a rollout would leave, with random tokens as messages."""
    rng, vocabulary = np.random.default_rng(1), SHAPES[a.shape]["vocab_size"]
    problems = random_prompts(np.random.default_rng(7), a.problems, a.prompt, vocabulary)
    contexts, said = [problems[e // a.group] for e in range(a.episodes)], {}
    for agent in agents:
        messages = random_prompts(rng, a.episodes, a.tokens, vocabulary)
        said[agent] = (contexts, messages, [np.zeros(a.tokens, dtype=np.float32) for _ in messages])
        contexts = [np.concatenate([c, m]) for c, m in zip(contexts, messages, strict=True)]
    return said


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--tokens", type=whole_number, default=4096 if gpu else 2048, help="of a message")
    parser.add_argument("--episodes", type=whole_number, default=8 if gpu else 4)
    parser.add_argument("--prompt", type=whole_number, default=256)
    parser.add_argument("--micro-batch", type=whole_number, default=16)
    parser.add_argument("--precision", choices=["fp32", "tf32", "fp16", "bf16"], default="fp16" if gpu else "fp32")
    parser.add_argument("--sampler", choices=["fp32", "fp16", "bf16"], default="fp16" if gpu else "fp32")
    parser.add_argument("--one-copy", action="store_true", help="learner and sampler share one base, in fp16")
    parser.add_argument("--pages-gb", type=float, help="KV blocks (default: a share of what is free)")
    parser.add_argument("--recompute", choices=["auto", "always", "never"], default="auto")
    parser.add_argument("--radius", type=float, default=RADIUS, help="in nats per message (default: %(default)s)")
    parser.add_argument("--words", choices=["sampled", "random"], default="sampled", help="random: nothing is sampled")
    parser.add_argument("--pieces", type=whole_number, help="in which a turn's sampling is timed (default: all of it)")
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
    a.group, a.epochs, a.compiled = min(GROUP, a.episodes), 1, "auto"
    if a.pieces and a.words == "random":
        parser.error("--pieces measures sampling, which --words random leaves out: give one of them")
    if a.pieces and a.pieces > a.tokens:
        parser.error(f"--pieces: a message of {a.tokens} tokens has no {a.pieces} pieces")
    if a.episodes % a.group:
        parser.error(f"--episodes: whole groups of {GROUP}, or fewer than one")
    a.problems = a.episodes // a.group
    rows = []
    for found in measured(a):
        rows.append(found)
        so_far(f"{found['agent']} {found['phase']}", found)
    header = tuple(dict.fromkeys(name for found in rows for name in found))
    title = f"{a.shape}: {a.episodes} episodes of two agents, {a.precision}, sampled in {a.sampler}"
    record = {"benchmark": "long", **vars(a), "results": rows}
    report(title, header, [[found.get(name) for name in header] for found in rows], record, a.json)


if __name__ == "__main__":
    main()
