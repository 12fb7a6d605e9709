"""vLLM as the sampler beside our own: what a start, a new adapter and new weights cost, and how far the two are apart.

    python bench/vllm_sampler.py --python .venv-vllm/bin/python [--model FOLDER] [--train lora] [--rows 64]
        [--tokens 48] [--json]

One agent on this machine's CPU. The distance is that of log-probabilities per token, sampler's against learner's, on
messages that vLLM wrote. Rows that differ: tokens of the same prompts and seeds, asked for in smaller batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import report
from teamtr.config import loads
from teamtr.ports import Engine
from teamtr.randomness import uniforms
from teamtr.session.build import build
from teamtr.types import AgentBatch, Ids, Sample

TEAM = """
name: vllm
task: {name: code, half_length: 1}
team: {max_tokens: 8, agents: [{name: left}, {name: right}, {name: speaker}]}
tiny: {heads: 2}
plan: {problems: 2, group_size: 2}
sampling: {engine: vllm, memory_gb: 1, vllm: {context_tokens: 1024}}
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--train", default="lora", choices=("lora", "full"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    own = (f"team.model={options.model}", f"team.train={options.train}", f"sampling.vllm.python={options.python}")
    session = build(loads(TEAM, "vllm", own).anchored(Path.cwd()))
    engine, codec = session.engine, session.context.codecs[AGENT]
    prompts = [
        codec.encode([{"role": "system", "content": ""}, {"role": "user", "content": f"Tell me of the number {k}."}])
        for k in range(options.rows)
    ]
    noise = uniforms(0, options.rows, options.tokens)
    rows: list[list[Any]] = []
    try:
        seconds, _ = timed(lambda: engine.sample(AGENT, prompts[:1], noise[:1]))
        rows.append(["start and first message, s", seconds])
        seconds, whole = timed(lambda: engine.sample(AGENT, prompts, noise))
        tokens = sum(len(sample.token_ids) for sample in whole)
        rows.append(["vLLM, tokens/s", tokens / seconds])
        seconds, plain = timed(lambda: engine.inner.sample(AGENT, prompts, noise))  # type: ignore[attr-defined]
        rows.append(["plain sampler, tokens/s", sum(len(sample.token_ids) for sample in plain) / seconds])
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
