"""Kernel launches in a pass of the learner, and the host time to issue them: per layer, counted on a CPU.

    python bench/launches.py                    # 28 layers, prompts shared by four messages and not shared
    python bench/launches.py --layers 8 --kind Llama

A tiny model takes the code path of a GPU, in half precision. Our own kernels are counted where triton would launch
them, and do nothing; torch operators are counted if they would launch a kernel. Attention counts as one. "together":
layers that read the same x are one product; "apart": each has its own. Microseconds are processor time of the host code
between kernels, without matrix products and without the launches themselves. Compare only results of one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from common import NoTokenizer, report, whole_number
from teamtr.engines.torch import fused_lora, packing
from teamtr.engines.torch.fused_lora import FusedLora, fuse_lora
from teamtr.engines.torch.loading import share_base
from teamtr.engines.torch.policy import TransformerPolicy

STARTS_NOTHING = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided",
    "expand", "new_empty", "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
PASSES = 30


class Counting(TorchDispatchMode):
    def __init__(self, started: Counter[str]) -> None:
        super().__init__()
        self.started = started

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in STARTS_NOTHING:
            self.started[name] += 1
        return func(*args, **(kwargs or {}))


def make_policy(kind: str, layers: int) -> TransformerPolicy:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_size=64, intermediate_size=96,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    shared = share_base(model, {"agent": SimpleNamespace(rank=8, alpha=8.0, targets="all-linear")}, seed=0)
    fused = fuse_lora(shared)
    return TransformerPolicy(shared, NoTokenizer(2), adapter="agent", precision="bf16", fused=fused)


@contextmanager
def by_the_way_of_a_card(started: Counter[str], *, together: bool) -> Iterator[None]:
    def start(self: Any, *_: Any, **__: Any) -> None:
        started[self.__name__] += 1

    spread, whole = packing.Spread.of, FusedLora._whole
    with (
        patch.object(JITFunction, "run", start),
        patch.object(FusedLora, "fuses", lambda *_: True),
        patch.object(FusedLora, "_whole", whole if together else lambda *_: None),
        patch.object(fused_lora, "computed_by_kernels", lambda _: True),
        patch.object(packing.Spread, "of", lambda *given, **_: spread(*given, in_runs=True)),
    ):
        yield


@contextmanager
def without_products() -> Iterator[None]:
    def shaped(a: Tensor, b: Tensor) -> Tensor:
        return a.new_empty(a.shape[0], b.shape[1])

    with (
        patch.object(torch, "addmm", lambda _, a, b, **__: shaped(a, b)),
        patch.object(Tensor, "addmm_", lambda self, *_, **__: self),
        patch.object(Tensor, "__matmul__", shaped),
    ):
        yield


def rows_of(shared: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    prompts = [np.array([5, 6, 7, 8 if shared else 8 + k]) for k in range(4 if shared else 1)]
    return [p.astype(np.int32) for p in prompts], [np.array([4 + k, 9], dtype=np.int32) for k in range(len(prompts))]


def both_ways(policy: TransformerPolicy, shared: bool, between: Callable[[], Any]) -> list[Any]:
    """Values of ``between`` before the forward pass, after it, and after the backward pass."""
    with policy.computing():
        said = [between()]
        features = policy.features(*rows_of(shared))
        said.append(between())
        features.float().sum().backward()
        said.append(between())
    for parameter in policy.parameters().values():
        parameter.grad = None
    return said


def counted(kind: str, shared: bool, together: bool) -> list[int]:
    """Kernels of one layer, forward and backward: the difference that one more layer makes."""
    found = []
    for layers in (3, 4):
        policy, started = make_policy(kind, layers), Counter[str]()
        with by_the_way_of_a_card(started, together=together):
            both_ways(policy, shared, lambda: None)  # later passes round factors for all layers at once
            started.clear()
            with Counting(started):
                before, forward, back = both_ways(policy, shared, started.total)
        found.append((forward - before, back - forward))
    return [more - less for less, more in zip(*found, strict=True)]


def timed(policy: TransformerPolicy, shared: bool, together: bool) -> list[float]:
    """Microseconds of a whole forward and backward pass."""
    took = []
    with by_the_way_of_a_card(Counter(), together=together), without_products():
        for _ in range(PASSES):
            before, forward, back = both_ways(policy, shared, time.process_time)
            took.append((1e6 * (forward - before), 1e6 * (back - forward)))
    return [statistics.median(column) for column in zip(*took, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=whole_number, default=28)
    parser.add_argument("--kind", default="Qwen3", help="an architecture of transformers")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    policy, rows = make_policy(a.kind, a.layers), []
    for shared in (True, False):
        for together in (False, True):
            forward, back = counted(a.kind, shared, together)
            took = [found / a.layers for found in timed(policy, shared, together)]
            rows.append([shared, "together" if together else "apart", forward, back, *took])
    header = ("prompts shared", "layers that read the same x", "forward", "back", "forward, us", "back, us")
    record = {"benchmark": "launches", **vars(a), "results": [dict(zip(header, row, strict=True)) for row in rows]}
    report(f"{a.kind}, {a.layers} layers: kernels a layer, and microseconds of the host", header, rows, record, a.json)


if __name__ == "__main__":
    main()
