"""Sampling speed of our sampler beside that of transformers: same model, same prompts, one run.

    python bench/rollout.py --shape 1.7b                    # on a GPU: 256 rows of 256 + 128 tokens, bf16
    python bench/rollout.py --shape tiny --rows 16 --prompt 64 --new 32     # on a CPU
    python bench/rollout.py --profile                       # and the kernels of a decode step
    python bench/rollout.py --by-rows 8,64,256              # our decode step alone, by the number of rows

"decode" is tokens per second of decoding only; "whole" includes the prefill. The floor is the time to read the weights
and all keys and values once per token, at the bandwidth of a copy measured in the same run. Ours is the better of two
warm calls, ``generate`` one warm call, continuous batching one call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from common import (
    SHAPES,
    bandwidth,
    device,
    kernels,
    make_model,
    matrix_rate,
    peak_gb,
    random_prompts,
    report,
    seconds,
    so_far,
    wait,
    whole_numbers,
)
from teamtr.engines.paged.sampler import Server
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler
from teamtr.randomness import uniforms

TEMPERATURE = 0.8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def our_server(model: Any, *, compiled: bool) -> Server:
    gpu = device().type == "cuda"
    copy = SamplingCopy(model, next(model.parameters()).dtype, device(), joins_layers=not compiled)
    copy.fill(model, None, version="bench", base="")
    return Server(copy, pool_bytes=(40 << 30) if gpu else (1 << 30), graphs=gpu, compiled=compiled)


def sampling(server: Server, prompts: list[np.ndarray], tokens: int, version: str) -> Callable[[], Any]:
    """A call of our sampler. A new version has no cached KV blocks: prompts are computed again."""
    noise = uniforms(1, len(prompts), tokens)
    return lambda: server.sample(version, prompts, noise, drawing=TokenSampler(TEMPERATURE), end_ids=frozenset())


def ours(model: Any, prompts: list[np.ndarray], new: int, *, compiled: bool, profiled: bool) -> dict[str, float]:
    server, calls = our_server(model, compiled=compiled), count()

    def sample(tokens: int, rows: list[np.ndarray] = prompts, version: str | None = None) -> Callable[[], Any]:
        return sampling(server, rows, tokens, version or f"v{next(calls)}")

    started = seconds(sample(new))
    first = seconds(sample(1))
    whole = min(seconds(sample(new)) for _ in range(2))
    sample(new, version="known")()
    group = 8
    shared = [prompts[i // group * group] for i in range(len(prompts))]
    in_groups = min(seconds(sample(new, shared)) for _ in range(3))  # the first captures its graph
    if profiled:
        for title, given in (("different prompts", prompts), ("groups of 8", shared)):
            print(f"{title}, {kernels(sample(new, given, 'known'), new)}", file=sys.stderr, flush=True)
    rows = len(prompts)
    return {
        "decode": rows * (new - 1) / (whole - first),
        "whole": rows * new / whole,
        "groups of 8": rows * new / in_groups,
        "groups, decode": rows * (new - 1) / (in_groups - seconds(sample(1, shared))),
        "prompts known": rows * new / seconds(sample(new, version="known")),
        "first call s": started,
    }


def step_ms(server: Server, prompts: list[np.ndarray], new: int, calls: Iterator[int]) -> float:
    """Milliseconds of our decode step: the fastest of three calls without the fastest of three prefills."""

    def sample(tokens: int) -> float:
        return seconds(sampling(server, prompts, tokens, f"v{next(calls)}"))

    for tokens in (new, 1):
        sample(tokens)  # captures what is replayed later
    whole, first = (min(sample(tokens) for _ in range(3)) for tokens in (new, 1))
    return 1000 * (whole - first) / (new - 1)


def by_rows(model: Any, rows: Sequence[int], prompt: int, new: int) -> list[tuple[int, float, float]]:
    """For each number of rows: milliseconds of our decode step, and tokens per second."""
    server, calls = our_server(model, compiled=False), count()
    prompts = random_prompts(np.random.default_rng(0), max(rows), prompt, model.config.vocab_size)
    found = [(n, step_ms(server, prompts[:n], new, calls)) for n in rows]
    return [(n, ms, 1000 * n / ms) for n, ms in found]


def generate(model: Any, prompts: list[np.ndarray], new: int, **options: Any) -> dict[str, float]:
    """transformers' ``generate``, with a dynamic cache unless the options set another."""
    ids = torch.as_tensor(np.stack(prompts), dtype=torch.int64, device=device())
    common = {
        "attention_mask": torch.ones_like(ids), "do_sample": True, "temperature": TEMPERATURE, "top_k": 0,
        "top_p": 1.0, "pad_token_id": 0, "eos_token_id": None, **options,
    }  # fmt: skip

    def call(tokens: int) -> Callable[[], Any]:
        return lambda: model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **common)

    for tokens in (1, new) if options else (min(new, 8),):  # a static cache is compiled for each length
        call(tokens)()
    first, whole = seconds(call(1)), seconds(call(new))
    return {"decode": len(prompts) * (new - 1) / (whole - first), "whole": len(prompts) * new / whole}


def continuous(model: Any, prompts: list[np.ndarray], new: int) -> dict[str, float]:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=new, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    rows = [p.tolist() for p in prompts]
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("paged|sdpa")
        whole = seconds(lambda: model.generate_batch(inputs=rows, generation_config=settings))
    finally:
        model.set_attn_implementation(before)
    return {"whole": len(prompts) * new / whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rows", type=int, default=256 if torch.cuda.is_available() else 16)
    parser.add_argument("--prompt", type=int, default=256 if torch.cuda.is_available() else 64)
    parser.add_argument("--new", type=int, default=128 if torch.cuda.is_available() else 32)
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="not to run; may be repeated")
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), default="bf16" if torch.cuda.is_available() else "fp32"
    )
    parser.add_argument("--by-rows", type=whole_numbers, help="only our decode step, for each of these --rows")
    parser.add_argument("--profile", action="store_true", help="the kernels of our decode step, to stderr")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.new < 2:
        parser.error("--new: a decode step needs at least 2 new tokens")
    gpu = torch.cuda.is_available()
    dtype = DTYPES[a.precision]
    model = make_model(a.shape, dtype)
    if a.by_rows:
        found = by_rows(model, a.by_rows, a.prompt, a.new)
        title = f"{a.shape}, {a.prompt} + {a.new} tokens, {a.precision}: a decode step"
        report(
            title,
            ("rows", "ms", "tokens/s"),
            found,
            {"benchmark": "rollout", **vars(a), "rows": a.by_rows, "steps": found},
            a.json,
        )
        return
    prompts = random_prompts(np.random.default_rng(0), a.rows, a.prompt, SHAPES[a.shape]["vocab_size"])

    shape = SHAPES[a.shape]
    parameters = sum(p.numel() for p in model.parameters())
    cached = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * dtype.itemsize
    per_step = parameters * dtype.itemsize + a.rows * (a.prompt + a.new / 2) * cached
    floor = a.rows / (per_step / bandwidth())
    # The embedding is also the head; the products within attention, a few per cent here, are left out.
    most = matrix_rate(dtype) / (2 * parameters)

    sampler = partial(ours, model, prompts, a.new, profiled=a.profile)
    contestants: dict[str, Callable[[], dict[str, float]]] = {
        "ours": partial(sampler, compiled=False),
        "ours, compiled by torch": partial(sampler, compiled=True),
        "generate": lambda: generate(model, prompts, a.new),
        "generate, static cache": lambda: generate(model, prompts, a.new, cache_implementation="static"),
        "continuous batching": lambda: continuous(model, prompts, a.new),
    }
    if unknown := set(a.skip) - set(contestants):
        parser.error(f"--skip: {', '.join(sorted(unknown))}; there are {'; '.join(contestants)}")
    if not gpu:
        rivals = ("generate", "generate, static cache")
        contestants = {name: contestants[name] for name in ("ours", *rivals)}
    results: dict[str, dict[str, Any]] = {}
    for name, run in contestants.items():
        if name in a.skip:
            continue
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            with torch.no_grad():
                results[name] = {**run(), "peak GB": peak_gb()}
        except Exception as error:  # a rival that fails is a result too
            results[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        wait()
        so_far(name, results[name])
    for r in results.values():
        if "decode" in r:
            r |= {"share of floor": r["decode"] / floor, "flops utilisation": r["decode"] / most}
        for kind in ("decode", "whole"):
            if kind in r and kind in results.get("generate", {}):
                r[f"{kind} x generate"] = r[kind] / results["generate"][kind]
    header = (
        "decode", "share of floor", "flops utilisation", "whole", "decode x generate", "whole x generate",
        "groups of 8", "groups, decode", "prompts known", "peak GB",
    )  # fmt: skip
    rows = [(name, *(r.get(kind) for kind in header), r.get("error", "")) for name, r in results.items()]
    title = f"{a.shape}, {a.rows} rows of {a.prompt} + {a.new} tokens; bandwidth floor {floor:,.0f} tokens/s"
    report(
        title, ("tokens/s", *header, ""), rows, {"benchmark": "rollout", **vars(a), "floor": floor, "results": results},
        a.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
