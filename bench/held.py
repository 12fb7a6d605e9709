"""Memory of a training pass on a GPU, counted on a CPU at the true shape, beside the memory plan.

    python bench/held.py --shape 1.7b --rows 4 --prompt 4352 --message 4096 --shared 256 --memory-gb 139.8
    python bench/held.py --shape 1.7b --rows 2 --prompt 16640 --message 16384 --recompute

Tensors have shapes but no values (torch's device "meta"). The learner takes the code path of a GPU in fp16: our own
kernels do nothing, layers that read the same x are one product, and attention is one operator that allocates the arrays
of flash attention's backward pass. Every tensor is counted from its allocation until nothing refers to it, except the
weights, which exist before. "kept" is what remains after the forward pass, including logits. GB are 2^30 bytes.
"""

from __future__ import annotations

import argparse
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from common import SHAPES, NoTokenizer, report, whole_number
from launches import by_the_way_of_a_card
from teamtr.config import LoraConfig
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.memory import _longest_batch
from teamtr.engines.passes import Reference
from teamtr.engines.torch import attention, fused_lora, head, joined_products, known_layers, policy, scoring
from teamtr.engines.torch.anatomy import Anatomy
from teamtr.engines.torch.loading import share_base
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.planning.cards import CARDS, Card
from teamtr.planning.memory import held
from teamtr.ports import GB, Lengths
from throughput import shape_of, team

BLOCK = 512
"""Granularity of the allocator, in bytes."""
META = torch.device("meta")


class Live(TorchDispatchMode):
    """Counts the live bytes of tensors allocated within this mode, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in given:
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: Any) -> None:
        if storage in self._seen:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK

        def gone(_: Any) -> None:
            self.bytes -= size

        self._seen[storage] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


class FlashAttention(torch.autograd.Function):
    """Attention over packed rows that only allocates the arrays of flash attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(query.shape)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        beside = [query.new_empty(query.shape[:2], dtype=torch.float32), query.new_empty(query.shape).float()]
        beside += [query.new_empty(query.shape) for _ in range(2 if len(key[0]) < len(query[0]) else 0)]  # all heads
        return tuple(x.new_empty(x.shape) for x in (query, key, value))


def half_product(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)


def below_each_other(tensors: Sequence[Tensor]) -> Tensor | None:
    """The joined weight of layers that read the same x, whose half-precision copies share one storage; else None."""
    first = tensors[0]
    if any(one.untyped_storage()._cdata != first.untyped_storage()._cdata for one in tensors):
        return None
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def known_attention(model: Any) -> dict[str, Anatomy]:
    found = {name: Anatomy.of(module) for name, module in model.named_modules() if hasattr(module, "q_norm")}
    return {name: one for name, one in found.items() if one is not None}


@contextmanager
def without_values() -> Iterator[None]:
    """Patches for tensors without values: layers are recognized by name, since nothing can be computed, and checks for
    a GPU succeed."""
    with ExitStack() as stack:
        for place, name, instead in (
            (fused_lora, "is_gated", lambda module: hasattr(module, "gate_proj")),
            (fused_lora, "inspect_attention", known_attention),
            (fused_lora, "is_rms_norm", lambda module: type(module).__name__.endswith("RMSNorm")),
            (known_layers, "is_rms_norm", lambda module: type(module).__name__.endswith("RMSNorm")),
            (joined_products, "below_each_other", below_each_other),
            (attention, "goes_end_to_end", lambda *_: True),
            (policy, "goes_end_to_end", lambda *_: True),
            (torch.nn.attention.varlen, "varlen_attn", lambda *given, **_: FlashAttention.apply(*given[:3])),
            (head, "half_product", half_product),
            (scoring, "half_product", half_product),
            (head.OutputLayer, "scores_in_half", True),
            (TransformerPolicy, "_half_of_head", lambda self, weight: self.fused.half_of(weight, torch.float16)),
            (TransformerPolicy, "_check", lambda _: None),
            (torch, "autocast", lambda *_, **__: nullcontext()),  # it does not support the device "meta"
            (torch, "is_autocast_enabled", lambda *_: False),
        ):
            stack.enter_context(patch.object(place, name, instead))
        stack.enter_context(by_the_way_of_a_card(Counter(), together=True))
        yield


def make_learner(shape: str, rows: int) -> PolicyLearner:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{"tie_word_embeddings": True, **SHAPES[shape]}, pad_token_id=0, bos_token_id=None)
    with META:
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32).eval()
        shared = share_base(model, {"a0": LoraConfig()}, seed=0).to(META)
    made = TransformerPolicy(shared, NoTokenizer(1), adapter="a0", precision="fp16", fused=fused_lora.fuse_lora(shared))
    return PolicyLearner("a0", made, micro_batch=rows)


@dataclass(frozen=True)
class Found:
    """Counts for one pass, in bytes."""

    kept: int
    peak: int
    planned: int


def count(shape: str, rows: int, lengths: Lengths, *, recompute: bool = False, card: Card = CARDS["H200"]) -> Found:
    """Counts the memory of a micro-batch of this many rows, forward and backward."""
    setup = team(shape_of(shape), 1, 1, rows, 1, 1, micro_batch=rows)
    setup = replace(setup, cluster=replace(setup.cluster, card=card))
    setup = replace(setup, learning=replace(setup.learning, precision="fp16"))
    plan = replace(held(setup).trained[0], recomputes=recompute)
    logits = 16 * min(rows * lengths.message, plan.head_chunk) * plan.vocabulary
    with without_values(), patch("teamtr.engines.passes.head_chunk", lambda *_: plan.head_chunk):
        learner = make_learner(shape, rows)
        if recompute:
            learner.policy.recompute_activations()
        kept, peak = _pass(learner, rows, lengths, plan.width)
    return Found(kept, peak, int(plan.step_bytes(lengths, rows)) + logits)


def _pass(learner: PolicyLearner, rows: int, lengths: Lengths, width: int) -> tuple[int, int]:
    passes = learner.passes
    for _ in range(2):  # makes the half-precision copies, and then finds them joined
        short = _longest_batch("a0", Lengths(8, 4), 2, processes=1)
        with learner.policy.computing():
            learner.policy.features(short.prompts, short.messages).sum().backward()
    batch = _longest_batch("a0", lengths, rows, processes=1)
    old = [torch.empty(lengths.message, width, device=META) for _ in range(rows)]  # the plan counts it outside the step
    reference = Reference(batch, old, learner.policy.frozen_head(), [])
    with Live() as live, learner.policy.computing():
        scored = passes.score(reference, np.arange(rows))
        kept = live.bytes
        (scored.logp_N.sum() + scored.kl_N.sum()).backward()
    return kept, live.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--rows", type=whole_number, default=4, help="passed at once")
    parser.add_argument("--prompt", type=whole_number, default=4352)
    parser.add_argument("--message", type=whole_number, default=4096)
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--recompute", action="store_true", help="activations")
    parser.add_argument("--card", choices=[name for name in CARDS if name != "cpu"], default="H200")
    parser.add_argument("--memory-gb", type=float, help="that it shows, where that is not what its data sheet says")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if not 0 <= a.shared < a.prompt:
        parser.error("--shared: a part of the prompt")
    lengths = Lengths(a.prompt, a.message, a.shared)
    card = CARDS[a.card] if a.memory_gb is None else replace(CARDS[a.card], memory=int(a.memory_gb * GB))
    found = count(a.shape, a.rows, lengths, recompute=a.recompute, card=card)
    sizes = {"kept": found.kept / GB, "peak": found.peak / GB, "planned": found.planned / GB}
    header = ("rows", "tokens", "shared", *(f"{name}, GB" for name in sizes), "planned / peak")
    row = [a.rows, lengths.whole, a.shared, *sizes.values(), found.planned / found.peak]
    report(f"{a.shape}, a pass in fp16 on {a.card}", header, [row], {"benchmark": "held", **vars(a), **sizes}, a.json)


if __name__ == "__main__":
    main()
