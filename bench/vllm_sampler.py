"""vLLM beside our own sampler: speed, the cost of a start and of new weights, and the distance to the learner.

    python bench/vllm_sampler.py --python .venv-vllm/bin/python [--model FOLDER] [--train lora] [--rows 64]
        [--tokens 48] [--json]
    python bench/vllm_sampler.py --python VLLM --shape 1.7b --tokenizer FOLDER --rows 256 --tokens 256 --memory-gb 16

One agent, on a GPU or on this machine's CPU. With ``--shape``, weights are random and the tokenizer is that of the
model folder ``--tokenizer``. Our sampler is the one that training uses on that device. Both are warm when the clock
starts, and have none of the prompts cached. The distance is the difference of log-probabilities per token between vLLM
and the learner, on messages sampled by vLLM. Rows that differ: rows with other tokens for the same prompts and seeds
when sampled in smaller batches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import SHAPES, report, save_shape, so_far
from teamtr.answers import Sample
from teamtr.batches import AgentBatch
from teamtr.config import loads
from teamtr.ports import Codec, Engine
from teamtr.randomness import uniforms
from teamtr.session.build import build
from teamtr.types import Ids

TEAM = """
name: vllm
task: {name: code, half_length: 1}
team: {max_tokens: 8, agents: [{name: left}, {name: right}, {name: speaker}]}
tiny: {heads: 2}
plan: {problems: 2, group_size: 2}
sampling: {vllm: {context_tokens: 1024}}
"""
AGENT = "left"
PUBLISHED = {"lora": 8, "full": 2}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def batch_of(prompts: Sequence[Ids], samples: Sequence[Sample]) -> AgentBatch:
    number = np.arange(len(prompts))
    messages, logprobs = tuple(s.token_ids for s in samples), tuple(s.logprobs for s in samples)
    return AgentBatch(AGENT, tuple(prompts), messages, logprobs, number, number, 0 * number)


def distance(engine: Engine, prompts: Sequence[Ids], samples: Sequence[Sample]) -> np.ndarray:
    learner = engine.learner(AGENT)
    learner.begin(batch_of(prompts, samples))
    gaps = [np.abs(theirs - s.logprobs) for theirs, s in zip(learner.token_logprobs(), samples, strict=True)]
    learner.end()
    return np.concatenate(gaps)


def differing(engine: Engine, prompts: Sequence[Ids], noise: np.ndarray, whole: Sequence[Sample], size: int) -> float:
    parts: list[Sample] = []
    for start in range(0, len(prompts), size):
        parts += engine.sample(AGENT, prompts[start : start + size], noise[start : start + size])
    return float(np.mean([a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(whole, parts, strict=True)]))


def rate(engine: Engine, codec: Codec, options: argparse.Namespace) -> float:
    """Tokens per second with new prompts; the better of two calls."""
    noise, best = uniforms(1, options.rows, options.tokens), 0.0
    for k in range(3):  # the first warms up
        prompts = asked(codec, options.rows, f"Once more, for the {k}th time.")
        spent, samples = timed(lambda prompts=prompts: engine.sample(AGENT, prompts, noise))
        best = max(best, sum(len(sample.token_ids) for sample in samples) / spent) if k else 0.0
    return best


def asked(codec: Codec, rows: int, first: str) -> list[Ids]:
    return [
        codec.encode([{"role": "system", "content": first}, {"role": "user", "content": f"Tell me of the number {k}."}])
        for k in range(rows)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", choices=SHAPES, help="of a random model, instead of --model")
    parser.add_argument("--tokenizer", help="the folder of a model whose words are used with --shape")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="of keys and values")
    parser.add_argument("--train", default="lora", choices=("lora", "full"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.shape and not options.tokenizer:
        parser.error("--shape needs --tokenizer")
    with tempfile.TemporaryDirectory() as folder:
        if options.shape:
            options.model = save_shape(options.shape, options.tokenizer, folder)
        compare(options)


def compare(options: argparse.Namespace) -> None:
    own = (f"team.model={options.model}", f"team.train={options.train}", f"sampling.memory_gb={options.memory_gb}")
    theirs = (*own, "sampling.engine=vllm", f"sampling.vllm.python={options.python}")
    session = build(loads(TEAM, "vllm", theirs).anchored(Path.cwd()))
    engine, codec = session.engine, session.context.codecs[AGENT]
    prompts = asked(codec, options.rows, "")
    noise = uniforms(0, options.rows, options.tokens)
    rows: list[list[Any]] = []
    try:
        seconds, _ = timed(lambda: engine.sample(AGENT, prompts[:1], noise[:1]))
        rows.append(["start and first message, s", seconds])
        rows.append(["vLLM, tokens/s", rate(engine, codec, options)])
        so_far("vLLM", rows)
        ours = build(loads(TEAM, "ours", own).anchored(Path.cwd())).engine
        rows.append([f"our sampler ({ours.info(AGENT).sampling}), tokens/s", rate(ours, codec, options)])
        so_far("ours", rows)
        whole = engine.sample(AGENT, prompts, noise)
        gaps = distance(engine, prompts, whole)
        rows += [["distance, mean", float(gaps.mean())], ["distance, largest", float(gaps.max())]]
        for size in (options.rows, options.rows // 2, 8, 1):
            rows.append([f"rows that differ in batches of {size}", differing(engine, prompts, noise, whole, size)])
        spent = []
        for k in range(PUBLISHED[options.train]):
            engine.learner(AGENT).perturb(0.02, seed=k)
            version = engine.version(AGENT)
            spent.append(timed(lambda version=version: engine.publish(AGENT, version))[0])
        rows += [["new weights, median s", float(np.median(spent))], ["new weights, longest s", max(spent)]]
        gaps = distance(engine, prompts, engine.sample(AGENT, prompts, noise))
        rows += [["distance after it, mean", float(gaps.mean())], ["distance after it, largest", float(gaps.max())]]
    finally:
        engine.close()
    found = {str(name): value for name, value in rows}
    report(f"vLLM with {options.model}, {options.train}", ("what", "value"), rows, {"found": found}, options.json)


if __name__ == "__main__":
    main()
