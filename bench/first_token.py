"""Time from the command to the first sampled token, with an empty and with a warm kernel cache.

    python bench/first_token.py --shape 1.7b --json             # on a GPU: captured graphs, as in a run
    python bench/first_token.py --compiled yes --json           # compiled by torch; on a CPU with a C++ compiler
    python bench/first_token.py                                 # on a CPU: the tiny shape

Every process loads a model with random weights from a file, samples one token for every row, then ``--new`` tokens
(which captures the first decode step), then as many again. The first process starts with an empty kernel cache, the
others with what it left there (``teamtr.store.cache.keep_kernels``).

"imports" starts with the command and includes the start of Python. "compile" is the time that torch's compiler reports.
A hit is a graph found in its cache, a bypass one that it cannot cache. Triton reports no times for kernels outside
graphs (attention, norms): for them, cold and warm differ in the time of the calls.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import SHAPES, device, make_model, random_prompts, report, seconds, so_far
from teamtr.engines.paged.sampler import Server
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler
from teamtr.randomness import uniforms
from teamtr.store.cache import KERNELS, VARIABLE, keep_kernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PARTS = ("imports", "loading", "first token", "compile", "capture", "decode", "again")
COUNTED = {"inductor": ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"),
           "aot_autograd": ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")}  # fmt: skip


class TimedServer(Server):
    """Counts the seconds spent on capturing steps, without those of compiling them."""

    capturing = 0.0

    def _capture(self, size: int, drawing: TokenSampler) -> Any:
        made: list[Any] = []
        compiling = compile_seconds()
        elapsed = seconds(lambda: made.append(super(TimedServer, self)._capture(size, drawing)))
        self.capturing += elapsed - (compile_seconds() - compiling)
        return made[0]


def compile_seconds() -> float:
    """Seconds that torch's compiler reports for this process."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


def graphs() -> dict[str, int]:
    """Counts of graphs found in the cache, compiled, and not cacheable, so far in this process."""
    from torch._dynamo.utils import counters

    return {name: int(counters[kind][name]) for kind, names in COUNTED.items() for name in names}


def one_process(a: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each part from the command to a warm sampler."""
    keep_kernels()  # as a run does, before transformers is imported: later, torch's compiler uses its own cache folder
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 (its imports do not count as loading)

    imports = time.time() - a.began
    so_far("imports", imports)
    gpu, server = device().type == "cuda", None

    def load() -> None:
        nonlocal server
        model = AutoModelForCausalLM.from_pretrained(a.model, dtype=DTYPES[a.precision]).to(device()).eval()
        copy = SamplingCopy(model, DTYPES[a.precision], device(), joins_layers=a.compiled == "no")
        copy.fill(model, None, version="bench", base="")
        server = TimedServer(
            copy, pool_bytes=(40 << 30) if gpu else (1 << 28), graphs=gpu, compiled=a.compiled == "yes"
        )

    loading = seconds(load)
    so_far("loading", loading)
    assert server is not None
    prompts = random_prompts(np.random.default_rng(0), a.rows, a.prompt, SHAPES[a.shape]["vocab_size"])

    def call(version: str, tokens: int) -> float:
        noise = uniforms(1, a.rows, tokens)
        drawing = TokenSampler(0.8)
        return seconds(lambda: server.sample(version, prompts, noise, drawing=drawing, end_ids=frozenset()))

    first, compiling = call("v0", 1), compile_seconds()
    first_at = time.time() - a.began
    so_far("to first token", first_at)
    whole = call("v1", a.new)
    again = call("v2", a.new)
    later = compile_seconds() - compiling
    return {
        "to first token": first_at,
        "imports": imports,
        "loading": loading,
        "first token": first - compiling,
        "compile": compile_seconds(),
        "capture": server.capturing,
        "decode": whole - later - server.capturing,
        "again": again,
        "graphs": graphs(),
    }


def started(a: argparse.Namespace, model: Path, cache: str) -> dict[str, Any]:
    """Runs ``one_process`` in a new process and returns its measurements."""
    environment = {name: value for name, value in os.environ.items() if name not in KERNELS}
    environment[VARIABLE] = cache
    options = [f"--{name}={getattr(a, name)}" for name in ("shape", "rows", "prompt", "new", "precision", "compiled")]
    command = [sys.executable, __file__, *options, f"--model={model}", f"--began={time.time()}"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--rows", type=int, default=256 if gpu else 4)
    parser.add_argument("--prompt", type=int, default=256 if gpu else 16)
    parser.add_argument("--new", type=int, default=32 if gpu else 8)
    parser.add_argument("--precision", choices=DTYPES, default="fp16" if gpu else "fp32")
    parser.add_argument("--compiled", choices=("yes", "no"), default="no", help="by torch (default: as a run samples)")
    parser.add_argument("--warm", type=int, default=2, help="processes that find what the first one left")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.model is not None:
        print(json.dumps(one_process(a)))
        return
    with tempfile.TemporaryDirectory(prefix="first-token-") as folder:
        model, cache = Path(folder) / "model", str(Path(folder) / "cache")
        make_model(a.shape, DTYPES[a.precision]).save_pretrained(model)
        if gpu:
            torch.cuda.empty_cache()
        results = {}
        for name in ("cold", *(f"warm {k + 1}" for k in range(a.warm))):
            results[name] = started(a, model, cache)
            so_far(name, results[name])
    found = [(name, r["to first token"], *(r[part] for part in PARTS)) for name, r in results.items()]
    counts = [(r["graphs"]["fxgraph_cache_hit"], r["graphs"]["fxgraph_cache_miss"], r["graphs"]["fxgraph_cache_bypass"])
              for r in results.values()]  # fmt: skip
    rows = [(*row, "/".join(map(str, count))) for row, count in zip(found, counts, strict=True)]
    title = f"{a.shape}, {a.rows} rows of {a.prompt} + {a.new} tokens, {a.precision}, compiled: {a.compiled}; seconds"
    header = ("process", "to first token", *PARTS, "graphs found/made/bypassed")
    options = {name: value for name, value in vars(a).items() if name not in ("model", "began")}
    report(title, header, rows, {"benchmark": "first_token", **options, "results": results}, a.json)


if __name__ == "__main__":
    main()
