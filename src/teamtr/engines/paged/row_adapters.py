"""Adapters applied row by row: rows of several agents in one step, over a base that nothing is merged into.

The adapters of all agents of a base are stacked: for every product, all A below the base's weight, and all B side by
side. One product gives the base's output for a row's x, and x through all A. The columns of other agents are set to
zero; the rest goes through all B and is added. Both products have fixed shapes for any mix of agents, so a captured
step needs only a tensor with each row's adapter index. The cost is the sum of all agents' ranks, which is little
compared with the base, and a row depends on the other rows only by rounding. A weight in 8 bits is cast on the fly, so
nothing can be stored below it; there, x through all A is a product of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from teamtr.engines.paged.buffers import NOBODY
from teamtr.engines.paged.fused_linears import Siblings, as_one, joined_weight, siblings_in
from teamtr.engines.paged.one_copy import plain_name
from teamtr.engines.torch.row_scaled import FrozenWeight, RowScaled, kept_weight


class RowAdapters:
    """The adapters of one base, stacked in a sampling copy of it."""

    def __init__(self, model: Any, causal_lm: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._causal_lm, self._adapted = causal_lm, adapted_linears(causal_lm)
        names, rank = adapters_in(self._adapted.values())
        self.number = {name: k for k, name in enumerate(names)}
        self.index_N = torch.full((1,), NOBODY, device=device)
        """The adapter of every token of the current pass."""
        self._versions: dict[str, str] = {}
        self._places: dict[str, tuple[_Product, int]] = {}
        theirs = {plain_name(name): weight for name, weight in causal_lm.named_parameters()}
        name_of = {layer: name for name, layer in model.named_modules()}
        made: dict[nn.Module, _Product] = {}
        for name in self._adapted:
            layer = model.get_submodule(name)
            siblings: Siblings | None = getattr(layer, "siblings", None)
            layers = [layer] if siblings is None else siblings.layers
            if layers[0] not in made:
                learners = [theirs[f"{name_of[one]}.weight"] for one in layers]
                made[layers[0]] = _Product(self, layers, learners, len(names), rank, dtype)
                if siblings is not None:
                    siblings.weight, siblings.bias = made[layers[0]].of_base
                    siblings.product = made[layers[0]]
                else:
                    layer.forward = made[layer]
            self._places[name] = (made[layers[0]], layers.index(layer))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the freed blocks are too small for a weight with adapters below it

    def applies(self, causal_lm: Any, adapter: str | None) -> bool:
        """Whether this adapter, of this same model, is one of them."""
        return causal_lm is self._causal_lm and adapter in self.number

    @torch.no_grad()
    def put(self, adapter: str, version: str) -> None:
        """Copy the adapter's current weights, which ``version`` names. Does nothing if it holds that version; an empty
        version is always copied."""
        if version and self._versions.get(adapter) == version:
            return
        for name, (product, part) in self._places.items():
            module = self._adapted[name]
            if adapter in module.lora_A:
                up = module.lora_B[adapter].weight.float() * module.scaling[adapter]
                product.put(part, self.number[adapter], module.lora_A[adapter].weight, up)
        self._versions[adapter] = version

    def of_tokens(self, adapters: Sequence[int], counts: Sequence[int]) -> None:
        """Set the adapters of the next pass: ``counts`` tokens of each of ``adapters``, one after the other."""
        self.index_N = torch.repeat_interleave(torch.tensor(adapters), torch.tensor(counts)).to(self.index_N.device)


def adapted_linears(causal_lm: Any) -> dict[str, Any]:
    """Layers with adapters, by their names without adapters."""
    return {
        re.sub(r"\.base_layer\b", "", name): module
        for name, module in causal_lm.named_modules()
        if getattr(module, "lora_A", None)
    }


def adapters_in(adapted: Iterable[Any]) -> tuple[list[str], int]:
    """The names of the adapters in these layers, sorted, and the largest rank of any of them in any layer."""
    factors = [(name, len(down.weight)) for module in adapted for name, down in module.lora_A.items()]
    return sorted({name for name, _ in factors}), max((rank for _, rank in factors), default=0)


def numbers_of(products: Iterable[Sequence[tuple[int, int]]], adapters: int, rank: int) -> int:
    """Number of weights of this many stacked adapters. ``products`` are groups of fused layers, each layer as (outputs,
    inputs)."""
    found = 0
    for layers in products:
        columns = len(layers) * adapters * rank
        found += columns * (layers[0][1] + sum(outputs for outputs, _ in layers))
    return found


def adapter_numbers(causal_lm: Any) -> int:
    """``numbers_of`` the adapters of a loaded model."""
    modules = adapted_linears(causal_lm).values()
    adapted, (names, rank) = {module.base_layer for module in modules}, adapters_in(modules)
    joined = [layers for _, _, layers in siblings_in(causal_lm)]
    alone = adapted - {layer for layers in joined for layer in layers}
    groups = [*(layers for layers in joined if adapted & set(layers)), *([layer] for layer in alone)]
    sizes = [[(layer.out_features, layer.in_features) for layer in layers] for layers in groups]
    return numbers_of(sizes, len(names), rank)


def why_not(causal_lm: Any) -> str | None:
    """Why the adapters of this model cannot be applied row by row; None if they can."""
    head = causal_lm.get_output_embeddings()
    adapted = adapted_linears(causal_lm)
    if not adapted:
        return "it has none"
    for name, module in adapted.items():
        if type(module.base_layer) is not nn.Linear or module.base_layer is getattr(head, "base_layer", head):
            return f"{name} is no plain linear layer of the body"
        if "expert" in name:
            return f"{name} does not see every token"
        if any(getattr(module, "use_dora", {}).values()) or any(getattr(module, "lora_bias", {}).values()):
            return f"{name} has more than a low-rank product"
    return None


class _OfBase(NamedTuple):
    """The layers without adapters."""

    weight: FrozenWeight
    bias: Tensor | None


class _Together(NamedTuple):
    """The same with A below the weight, and zeros below the bias."""

    weight: Tensor
    bias: Tensor | None


class _Product:
    """A product of the copy, of one layer or of fused layers, with the adapters of all agents.

    The layers' weights move into ``together``, which has room for A below them. ``learners`` are the learner's own
    weights, which move along if the copy reads them in place. Weights in 8 bits stay where they are.
    """

    def __init__(
        self,
        rows: RowAdapters,
        layers: Sequence[nn.Linear],
        learners: Sequence[Tensor],
        adapters: int,
        rank: int,
        dtype: torch.dtype,
    ) -> None:
        self.rows, self.rank, self.adapters = rows, rank, adapters
        sizes = [layer.out_features for layer in layers]
        self.outputs, columns = sum(sizes), len(layers) * adapters * rank
        self.parts = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        empty = partial(torch.zeros, dtype=dtype, device=layers[0].weight.device)
        self.up = empty(self.outputs, columns)
        self.adapter_of_column = torch.arange(columns, device=self.up.device) % (adapters * rank) // rank
        self.together: _Together | None = None
        if isinstance(kept_weight(layers[0]), RowScaled):
            self.down = empty(columns, layers[0].in_features)
            self.of_base = _OfBase(
                joined_weight(layers), None if layers[0].bias is None else as_one([layer.bias for layer in layers])
            )
            return
        weight = empty(self.outputs + columns, layers[0].in_features)
        bias = None if layers[0].bias is None else empty(self.outputs + columns)
        self.together, self.down = _Together(weight, bias), weight[self.outputs :]
        self.of_base = _OfBase(weight[: self.outputs], None if bias is None else bias[: self.outputs])
        for layer, theirs, part in zip(layers, learners, self.parts, strict=True):
            one_copy = theirs.data_ptr() == layer.weight.data_ptr()
            _move(layer.weight, weight[part])
            if one_copy:
                theirs.data = layer.weight.data
            if bias is not None:
                _move(layer.bias, bias[part])

    def put(self, part: int, adapter: int, down: Tensor, up: Tensor) -> None:
        start = (part * self.adapters + adapter) * self.rank
        mine = slice(start, start + len(down))
        self.down[mine].copy_(down)
        self.up[self.parts[part], mine].copy_(up)

    def __call__(self, x: Tensor) -> Tensor:
        product = self._wide_and_narrow(x)
        index_N = self.rows.index_N
        if product.is_cuda and product.dtype != torch.float32:
            return _with_own_adapter(product, self.up, index_N, self.rank, self.adapters)
        found, narrow = product.split([self.outputs, self.up.shape[1]], -1)
        # Masked, not multiplied by zero: another agent's adapter may overflow on this row.
        return found + linear(torch.where(index_N[:, None] == self.adapter_of_column, narrow, 0.0), self.up)

    def _wide_and_narrow(self, x: Tensor) -> Tensor:
        """The base's output for x, and beside it x through all A."""
        if self.together is not None:
            return linear(x, self.together.weight, self.together.bias)
        weight, bias = self.of_base
        return torch.cat([linear(x, weight.to(x.dtype), bias), linear(x, self.down)], -1)


def _move(weight: Tensor, place: Tensor) -> None:
    place.copy_(weight.detach())
    weight.data = place


@torch.library.custom_op("teamtr::with_own_adapter", mutates_args=())
def _with_own_adapter(product: Tensor, up: Tensor, index_N: Tensor, rank: int, adapters: int) -> Tensor:
    """The same in one kernel, which is opaque to the compiler."""
    from teamtr.engines.paged.adapter_kernel import with_own_adapter

    return with_own_adapter(product, up, index_N, rank, adapters)


@_with_own_adapter.register_fake
def _(product: Tensor, up: Tensor, index_N: Tensor, rank: int, adapters: int) -> Tensor:
    return product.new_empty(*product.shape[:-1], len(up))
