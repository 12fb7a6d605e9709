"""Caches the training of the tiny base on the form of messages: the result depends only on its inputs."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from teamtr.store.cache import cached, keep
from teamtr.types import Ids

KIND = "taught"


def teach_once(
    model: Any, examples: Sequence[tuple[Ids, Ids]], teach: Callable[..., None], **settings: float | int
) -> None:
    """Run ``teach(model, examples, **settings)``, or load the weights of an earlier identical call: the same bits.

    The cache key is a hash of everything that determines them: the initial weights, the examples and their order, the
    settings, the source of ``teach``, and what affects rounding (libraries, processor, threads).
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    key = f"{_hash(weights, examples, teach, settings)}.safetensors"
    body = cached(KIND, key)
    if body is None:
        teach(model, examples, **settings)
        keep(KIND, key, save({name: weight.contiguous() for name, weight in weights.items()}))
        return
    for name, weight in load(body).items():
        weights[name].copy_(weight)
    model.eval()


def _hash(
    weights: dict[str, torch.Tensor],
    examples: Sequence[tuple[Ids, Ids]],
    teach: Callable[..., None],
    settings: dict[str, float | int],
) -> str:
    said = hashlib.sha256(json.dumps([settings, _rounding()], sort_keys=True).encode())
    said.update(Path(inspect.getfile(teach)).read_bytes())
    for name, weight in sorted(weights.items()):
        said.update(f"{name} {weight.device} {weight.dtype} {tuple(weight.shape)}".encode())
        said.update(weight.cpu().contiguous().numpy().tobytes())
    for prompt, message in examples:
        said.update(f"{len(prompt)} {len(message)} ".encode() + prompt.tobytes() + message.tobytes())
    return said.hexdigest()


def _rounding() -> list[str]:
    """What sums depend on besides their terms: the processor determines the kernels, which add in different orders."""
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    capability = torch.backends.cpu.get_cpu_capability()
    return [*libraries, platform.machine(), _processor(), capability, f"{torch.get_num_threads()} threads"]


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    return next((line for line in lines if line.startswith(("model name", "CPU part"))), platform.processor())
