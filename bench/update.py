"""One agent's update: our packed learner with the exact KL, beside a plain implementation of padded training.

    python bench/update.py --shape 1.7b                    # on a GPU
    python bench/update.py --shape 1.7b --profile          # and the kernels of an optimizer step, to stderr
    python bench/update.py --shape 1.7b --score own,sampler     # both ways of scoring, on sampled messages
    python bench/update.py --shape tiny --messages 16 --context 32 --tokens 16      # on a CPU

Both train an adapter on the same messages in the same precision, with the same number of optimizer steps. Ours is a
whole update (``update_agent``): "score" includes the noise floor, "train" the measurements that size the first step and
stop early, "gate" the measurement that decides. Padded training pads every micro-batch to its longest row, computes the
full logits of the message tokens, and has no trust region: it scores and trains. "New lengths": the next update of
ours, with another batch, whose rows have lengths that no pass has had before. "KL" is the time that the
full-vocabulary KL adds to the steps, beyond the token log-probabilities that any method needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from common import (
    SCORES,
    SHAPES,
    adapted_team,
    device,
    kernels,
    make_batch,
    make_model,
    matrix_rate,
    peak_gb,
    report,
    seconds,
    so_far,
)
from teamtr.answers import Ended, Wanted
from teamtr.batches import AgentBatch
from teamtr.engines import passes
from teamtr.engines.scoring import token_logp
from teamtr.presets import PRESETS
from teamtr.randomness import uniforms
from teamtr.reports import UpdateReport
from teamtr.training.batch import Optimization, TrainingBatch
from teamtr.training.update import update_agent
from teamtr.types import AgentState

GROUP = 8
OURS = {"own": "ours", "sampler": "ours, scores of the sampler"}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def some_batch(rng: np.random.Generator, a: argparse.Namespace) -> AgentBatch:
    """Messages of half to all of ``--tokens`` tokens, after contexts of half to all of ``--context``."""
    vocabulary = SHAPES[a.shape]["vocab_size"]

    def rows(longest: int) -> list[np.ndarray]:
        return [
            rng.integers(2, vocabulary, size=rng.integers(longest // 2, longest + 1)).astype(np.int32)
            for _ in range(a.messages)
        ]

    return make_batch("a0", rows(a.context), rows(a.tokens), group=GROUP)


def team_of(a: argparse.Namespace) -> Any:
    sampler = a.sampler if "sampler" in a.score else None
    return adapted_team(
        make_model(a.shape), 1, a.precision, micro_batch=a.micro_batch, sampler=sampler, keeps=sampler is not None
    )


def sampled(engine: Any, batch: AgentBatch) -> AgentBatch:
    """Messages sampled for the same contexts, of at most the same lengths; the features of sampling are kept."""
    rows = [
        Wanted("a0", prompt, uniforms(k, 1, len(message))[0])
        for k, (prompt, message) in enumerate(zip(batch.prompts, batch.messages, strict=True))
    ]
    left, found = [rows], {}

    def more(ended: Sequence[Ended]) -> list[Wanted]:
        found.update({one.row: one.sample for one in ended})
        return left.pop() if left else []

    engine.keep_scores("a0")
    engine.stream(more)
    engine.keep_scores(None)
    samples = [found[row] for row in range(len(rows))]
    logprobs = [sample.logprobs for sample in samples]
    return make_batch("a0", batch.prompts, [sample.token_ids for sample in samples], GROUP, logprobs=logprobs)


def ours(a: argparse.Namespace, batch: AgentBatch, advantages: np.ndarray, score: str = "own") -> dict[str, Any]:
    engine = team_of(a)
    learner = engine.learner("a0")
    if "sampler" in a.score:
        batch = sampled(engine, batch)
    before = learner.snapshot()
    steps = np.array_split(np.arange(len(batch)), a.steps)
    plan = PRESETS["teamtr"]
    returns = advantages.reshape(-1, GROUP)
    optimization = Optimization(
        learning_rate=1e-5, epochs=a.epochs, minibatches=a.steps, gate_share=a.gate_share, score=score
    )

    state = AgentState(beta=1.0, step_scale=1.0, radius_nats=0.05)

    def update(batch: AgentBatch) -> UpdateReport:
        data = TrainingBatch(batch, plan.advantage.estimate(returns), returns)
        learner.restore(before)  # the kept features belong to these weights
        return update_agent(learner, data, plan, optimization, state, seed=0).report

    def train() -> None:
        for rows in steps:
            learner.step(rows, advantages[rows], plan.objective, beta=1.0, learning_rate=1e-5)

    first = sum(update(batch).seconds.values())  # compiles the kernels
    done, unseen = update(batch), update(some_batch(np.random.default_rng(1), a)).seconds["train"]
    score, train_s, gate = (done.seconds[phase] for phase in ("score", "train", "gate"))
    learner.begin(batch)
    train()
    with_kl = seconds(train)
    if a.profile:
        rows = steps[0]
        step = partial(learner.step, rows, advantages[rows], plan.objective, beta=1.0, learning_rate=1e-5)
        so_far("kernels", kernels(step, 1))
    peak = peak_gb()  # of our update: the code below keeps more logits
    exact = passes.score_features
    passes.score_features = lambda head, _, new, __, ids, keep: (
        token_logp(head(new), ids),
        torch.zeros(len(ids), device=new.device),
    )
    try:
        train()
        without_kl = seconds(train)
    finally:
        passes.score_features = exact
    whole = score + train_s + gate
    return {
        "score s": score, "train s": train_s, "train s, new lengths": unseen, "gate s": gate, "update s": whole,
        "one pass with KL s": with_kl, "one pass without KL s": without_kl,
        "first update s": first, "KL share": a.epochs * (with_kl - without_kl) / whole, "gate share": gate / whole,
        "peak GB": peak,
        "measured messages": done.messages_measured, "outcome": done.outcome, "micro-batch": learner.passes.micro_batch,
        "sampler scored": done.sampler_scored, "mismatch KL": done.mismatch_kl, "noise floor": done.noise_floor,
        "own scores": done.own_scores, "KL upper": done.kl_upper, "scored tokens": done.tokens["scored"],
    }  # fmt: skip


def padded(a: argparse.Namespace, batch: AgentBatch, advantages: np.ndarray) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    model = make_model(a.shape, HALF.get(a.precision, torch.float32))
    model = get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    size = a.rival_micro_batch

    def logp(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        whole = [np.concatenate([batch.prompts[i], batch.messages[i]]) for i in rows]
        longest, keep = max(map(len, whole)), max(len(batch.messages[i]) for i in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        inside = torch.zeros(len(rows), keep)
        for b, (i, row) in enumerate(zip(rows, whole, strict=True)):
            ids[b, longest - len(row) :] = torch.as_tensor(row)
            mask[b, longest - len(row) :] = 1
            inside[b, keep - len(batch.messages[i]) :] = 1
        ids, mask, inside = (x.to(device()) for x in (ids, mask, inside))
        with torch.autocast(device().type, dtype=HALF.get(a.precision), enabled=a.precision in HALF):
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits[:, :-1]
        return torch.log_softmax(logits.float(), -1).gather(2, ids[:, -keep:, None]).squeeze(2), inside

    @torch.no_grad()
    def score() -> list[torch.Tensor]:
        return [logp(rows)[0] for rows in np.array_split(np.arange(len(batch)), -(-len(batch) // size))]

    def train() -> None:
        for rows in np.array_split(np.arange(len(batch)), a.steps):
            for part in np.array_split(rows, -(-len(rows) // size)):
                new, inside = logp(part)
                gain = torch.exp(new - new.detach()) * torch.as_tensor(advantages[part], device=new.device)[:, None]
                (-(gain * inside).sum() / len(rows)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    train()
    score()
    scored, trained = seconds(score), a.epochs * seconds(train)
    return {"score s": scored, "train s": trained, "update s": scored + trained, "peak GB": peak_gb()}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--precision", default="fp16" if gpu else "fp32")
    parser.add_argument("--messages", type=int, default=256 if gpu else 16)
    parser.add_argument("--context", type=int, default=512 if gpu else 32)
    parser.add_argument("--tokens", type=int, default=256 if gpu else 16)
    parser.add_argument("--steps", type=int, default=4, help="in one pass over the messages")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--gate-share", type=float, default=0.25)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--rival-micro-batch", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="the kernels of our optimizer step, to stderr")
    parser.add_argument(
        "--sampler", default="fp16" if gpu else "fp32", help="precision of sampling, with --score sampler"
    )
    parser.add_argument("--score", default="own", help="who scores the old policy: own, sampler, or both, with a comma")
    parser.add_argument("--alone", action="store_true", help="no padded training beside it")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    scores = a.score.split(",")
    if unknown := set(scores) - set(SCORES):
        parser.error(f"--score: {', '.join(sorted(unknown))}; there are {', '.join(SCORES)}")
    rng = np.random.default_rng(0)
    batch = some_batch(rng, a)
    advantages = rng.normal(size=len(batch))
    results: dict[str, dict[str, Any]] = {}
    runs = {OURS[score]: partial(ours, score=score) for score in scores} | ({} if a.alone else {"padded": padded})
    for name, run in runs.items():
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        results[name] = run(a, batch, advantages)
        so_far(name, results[name])
    tokens = sum(len(p) + len(m) for p, m in zip(batch.prompts, batch.messages, strict=True))
    shape = SHAPES[a.shape]
    block = shape["hidden_size"] * shape["head_dim"] * 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    body = shape["num_hidden_layers"] * (block + 3 * shape["hidden_size"] * shape["intermediate_size"])
    head = shape["hidden_size"] * shape["vocab_size"]
    said = sum(map(len, batch.messages))
    # Adapters need no gradient of the base weights: a forward and one backward product, 4 operations per weight.
    operations = 4 * (body * tokens + head * said)
    rate = matrix_rate(HALF.get(a.precision, torch.float32))
    for r in results.values():
        r["train tokens/s"] = a.epochs * tokens / r["train s"]
        r["flops utilisation"] = a.epochs * operations / r["train s"] / rate
    keys = (
        "score s",
        "train s",
        "train s, new lengths",
        "gate s",
        "update s",
        "train tokens/s",
        "flops utilisation",
        "KL share",
        "gate share",
        "peak GB",
    )
    rows = [(name, *(r.get(k) for k in keys)) for name, r in results.items()]
    title = f"{a.shape}, {a.precision}, {a.messages} messages, {tokens} tokens, {a.epochs} x {a.steps} steps"
    record = {"benchmark": "update", **vars(a), "results": results, "matrix rate": rate}
    if not a.alone:
        record["times faster"] = results["padded"]["update s"] / results[OURS[scores[0]]]["update s"]
    report(title, ("", *keys), rows, record, a.json)


if __name__ == "__main__":
    main()
