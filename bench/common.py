"""Shared code of the benchmarks: model shapes, timing that synchronizes the device, a table and a JSON line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    "1m": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
    "6m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512},
    "25m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512},
    "small": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
              "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
}  # fmt: skip
"""Shapes of Qwen3 models by size, and of SmolLM2-135M as ``small``; weights are random. Output layers are tied unless a
shape says otherwise. ``tiny``, ``1m``, ``6m`` and ``25m`` (named by their parameters) are for a CPU."""

END = 1
"""The token that ends a message. With random weights all tokens are about equally likely, so long messages of a small
vocabulary end early, unless a model is made with ``eos_token_id=NEVER``."""
NEVER = 1 << 30
"""A token outside every vocabulary: messages always reach their maximal length."""
POSITIONS = 40960
"""Position limit, as in Qwen3: enough for prompts and messages of 32,768 tokens."""


KEPT_BYTES = 8 << 30
"""Most memory for features that sampling keeps for an update."""
SCORES = ("own", "sampler")
"""Sources of log-probabilities under the old policy, as in ``learner.score``."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(shape: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Qwen3 of this shape with random weights, on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    usual = {"tie_word_embeddings": True, "max_position_embeddings": POSITIONS, "eos_token_id": END}
    config = Qwen3Config(**{**usual, **SHAPES[shape], **changes}, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device()):
        return Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()


def save_shape(shape: str, tokenizer: str, folder: str) -> str:
    """Save a random model of this shape with another model's tokenizer in ``folder``, in half precision."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    model = make_model(shape, torch.bfloat16, vocab_size=max(SHAPES[shape]["vocab_size"], len(words)))
    model.config.eos_token_id = model.generation_config.eos_token_id = words.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = words.pad_token_id
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def seconds(work: Callable[[], Any]) -> float:
    """Seconds of one call, including the work of the device."""
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_prompts(rng: np.random.Generator, count: int, length: int, vocabulary: int) -> list[np.ndarray]:
    return [rng.integers(2, vocabulary, size=length).astype(np.int32) for _ in range(count)]


def kernels(work: Callable[[], Any], steps: int) -> str:
    """Profile of one call: the time of each kernel on the device, in milliseconds per step."""
    from torch.profiler import ProfilerActivity, profile

    gpu = device().type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        elapsed = seconds(work)
    spent = sorted(
        ((e.self_device_time_total if gpu else e.self_cpu_time_total, e.count, e.key) for e in found.key_averages()),
        reverse=True,
    )
    whole = sum(us for us, _, _ in spent)
    title = f"a step: {1000 * elapsed / steps:.3f} ms of the clock, {whole / steps / 1000:.3f} ms in kernels"
    rows = [f"{us / steps / 1000:8.3f} ms {count / steps:7.1f} times  {key[:110]}" for us, count, key in spent[:45]]
    return "\n".join([title, *rows])


def peak_gb() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def bandwidth() -> float:
    """Measured bytes per second of a large copy, counting reads and writes."""
    buffer = torch.empty((1 << 30) if torch.cuda.is_available() else (1 << 26), dtype=torch.uint8, device=device())
    target = torch.empty_like(buffer)
    target.copy_(buffer)
    return 2 * buffer.numel() * 10 / seconds(lambda: [target.copy_(buffer) for _ in range(10)])


def matrix_rate(dtype: torch.dtype) -> float:
    """Measured floating-point operations per second of a large matrix product."""
    n = 8192 if torch.cuda.is_available() else 512
    a, b = (torch.randn(n, n, device=device()).to(dtype) for _ in range(2))
    a @ b
    return 2 * n**3 * 5 / seconds(lambda: [a @ b for _ in range(5)])


def whole_number(text: str) -> int:
    """Parses an option: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parses an option: several such numbers, comma-separated."""
    return tuple(map(whole_number, text.split(",")))


def so_far(name: str, result: Any) -> None:
    """Print a result at once, so that an interrupted run still leaves its results so far."""
    print(name, result, file=sys.stderr, flush=True)


def versions() -> dict[str, str | None]:
    """Installed versions of the libraries that affect the measurements; None if not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in ("torch", "transformers", "peft", "trl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def report(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], record: dict[str, Any], as_json: bool
) -> None:
    """Print the table to stderr and, with ``as_json``, the record to stdout."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(str(cell)) for cell in column) for column in zip(header, *texts, strict=True)]
    lines = ["  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (header, *texts)]
    sys.stderr.write(title + "\n" + "\n".join(lines) + "\n")
    if as_json:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        sys.stdout.write(json.dumps({**record, "device": where, "versions": versions()}) + "\n")


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


class NoTokenizer:
    """Stands in for a tokenizer: benchmarks use token ids, and messages end as the model's config says."""

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id


def adapted_team(
    model: Any,
    agents: int,
    precision: str,
    *,
    micro_batch: int,
    sampler: str | None = None,
    compiled: bool | None = None,
    pages_gb: float | None = None,
    keeps: bool = False,
    one_copy: bool = False,
    recompute: Any = "auto",
) -> Any:
    """A LocalEngine of adapters a0, a1, ... on one base, with ``sampler`` precision for the paged engine. ``keeps``:
    features computed by sampling can be kept for the update. ``one_copy``: the base is held once, in fp16, as with
    ``learner.base: fp16`` and ``sampling.adapters: by_row``. ``recompute``: as ``learner.recompute``."""
    from teamtr.config import LoraConfig
    from teamtr.engines.learner import PolicyLearner
    from teamtr.engines.local import LocalEngine
    from teamtr.engines.paged.pool import SamplerPool
    from teamtr.engines.torch.fused_lora import fuse_lora
    from teamtr.engines.torch.loading import share_base
    from teamtr.engines.torch.policy import TransformerPolicy
    from teamtr.engines.torch.short_base import keep_short

    pages = int(pages_gb * 2**30) if pages_gb else None
    adapters: Any = "by_row" if one_copy else "merged"
    room = SamplerPool(sampler, device(), pages, compiled, adapters=adapters, keeps=keeps) if sampler else None
    words = NoTokenizer(model.config.eos_token_id)
    shared = share_base(model, {f"a{k}": LoraConfig() for k in range(agents)}, seed=0)
    fused = fuse_lora(shared)
    if one_copy:
        keep_short(model, fused, torch.float16, rounded=True)
    return LocalEngine(
        {
            f"a{k}": PolicyLearner(
                f"a{k}",
                TransformerPolicy(
                    shared, words, adapter=f"a{k}", base_version="base", precision=precision,
                    temperature=1.0, serving=room, fused=fused,
                ),
                micro_batch=micro_batch,
                recompute=recompute,
                kept_bytes=KEPT_BYTES if keeps else 0,
            )
            for k in range(agents)
        }
    )  # fmt: skip


def make_batch(
    agent: str,
    prompts: Sequence[Any],
    messages: Sequence[Any],
    group: int,
    episodes: int | None = None,
    logprobs: Sequence[Any] | None = None,
) -> Any:
    """A batch of one agent's messages: the first message of every episode, then the second of every episode, and so on,
    with the episodes of a group adjacent. ``logprobs``: those of the sampler, if it wrote the messages."""
    from teamtr.batches import AgentBatch

    count = len(messages)
    turn_M, episode_M = np.divmod(np.arange(count), episodes or count)
    return AgentBatch(
        agent=agent,
        prompts=tuple(prompts),
        messages=tuple(messages),
        sampler_logprobs=tuple(logprobs or (np.zeros(len(m), dtype=np.float32) for m in messages)),
        episode_M=episode_M,
        problem_M=episode_M // group,
        turn_M=turn_M,
    )
