"""Adapters applied row by row: rows of several agents in one step, over a base that nothing is merged into.

The adapters of all agents of one base stand side by side: for every product, all A below each other and all B beside
each other. A row's x goes through all A in one product; what is not its own agent's is set to zero; the rest goes
through all B in a second one. Two products of fixed shapes, whoever speaks: a captured step needs only the number of
each row's adapter, in a tensor. It computes as many ranks as all agents have together, which is little beside the base,
and no row depends on who is beside it but by rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from teamtr.engines.paged.buffers import NOBODY
from teamtr.engines.paged.fused_linears import Siblings, siblings_in


class RowAdapters:
    """The adapters of one base, beside each other in a sampling copy of it."""

    def __init__(self, model: Any, causal_lm: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._causal_lm, self._adapted = causal_lm, adapted_linears(causal_lm)
        ranks = {name: down.weight.shape[0] for m in self._adapted.values() for name, down in m.lora_A.items()}
        self.number = {name: k for k, name in enumerate(sorted(ranks))}
        self.index_N = torch.full((1,), NOBODY, device=device)
        """The adapter of every token of the present pass."""
        self._versions: dict[str, str] = {}
        self._places: dict[str, tuple[_Product, int]] = {}
        made: dict[int, _Product] = {}
        for name in self._adapted:
            layer = model.get_submodule(name)
            siblings = getattr(layer, "siblings", None)
            layers = [layer] if siblings is None else siblings.layers
            if id(layers[0]) not in made:
                product = _Product(self, layers, len(ranks), max(ranks.values()), dtype, device)
                made[id(layers[0])] = product
                _add_to(layer, siblings, product)
            self._places[name] = (made[id(layers[0])], layers.index(layer))

    def applies(self, causal_lm: Any, adapter: str | None) -> bool:
        """Whether this adapter, of this very model, is one of them."""
        return causal_lm is self._causal_lm and adapter in self.number

    @torch.no_grad()
    def put(self, adapter: str, version: str) -> None:
        """Take over the adapter's present weights, which ``version`` names; without a name, every time."""
        if version and self._versions.get(adapter) == version:
            return
        for name, (product, part) in self._places.items():
            module = self._adapted[name]
            if adapter in module.lora_A:
                up = module.lora_B[adapter].weight.float() * module.scaling[adapter]
                product.put(part, self.number[adapter], module.lora_A[adapter].weight, up)
        self._versions[adapter] = version

    def of_tokens(self, adapters: Sequence[int], counts: Sequence[int]) -> None:
        """The next pass is over so many tokens of each of these adapters, one after the other."""
        self.index_N = torch.repeat_interleave(torch.tensor(adapters), torch.tensor(counts)).to(self.index_N.device)


def adapted_linears(causal_lm: Any) -> dict[str, Any]:
    """Layers with adapters by the name that they have without them."""
    return {
        re.sub(r"\.base_layer\b", "", name): module
        for name, module in causal_lm.named_modules()
        if getattr(module, "lora_A", None)
    }


def numbers_of(products: Iterable[Sequence[tuple[int, int]]], adapters: int, rank: int) -> int:
    """How many numbers so many adapters take beside each other, for products of layers that are joined; of each layer
    (outputs, inputs)."""
    found = 0
    for layers in products:
        columns = len(layers) * adapters * rank
        found += columns * (layers[0][1] + sum(outputs for outputs, _ in layers))
    return found


def adapter_numbers(causal_lm: Any) -> int:
    """The same for the adapters of a loaded model."""
    adapted = {module.base_layer for module in adapted_linears(causal_lm).values()}
    ranks = [len(down.weight) for m in adapted_linears(causal_lm).values() for down in m.lora_A.values()]
    names = {name for module in adapted_linears(causal_lm).values() for name in module.lora_A}
    joined = [layers for _, _, layers in siblings_in(causal_lm)]
    alone = adapted - {layer for layers in joined for layer in layers}
    groups = [*(layers for layers in joined if adapted & set(layers)), *([layer] for layer in alone)]
    sizes = [[(layer.out_features, layer.in_features) for layer in layers] for layers in groups]
    return numbers_of(sizes, len(names), max(ranks, default=0))


def why_not(causal_lm: Any) -> str | None:
    """Why the adapters of this model cannot be applied row by row; None where they can."""
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


class _Product:
    """What the adapters add to one product of the copy: to one layer, or to layers that are joined."""

    def __init__(
        self,
        rows: RowAdapters,
        layers: Sequence[nn.Linear],
        adapters: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.rank, self.adapters = rows, rank, adapters
        self.first = [0]
        for layer in layers:
            self.first.append(self.first[-1] + layer.out_features)
        columns = len(layers) * adapters * rank
        self.down = torch.zeros(columns, layers[0].in_features, dtype=dtype, device=device)
        self.up = torch.zeros(self.first[-1], columns, dtype=dtype, device=device)
        self.adapter_of_column = torch.arange(columns, device=device) % (adapters * rank) // rank

    def put(self, part: int, adapter: int, down: Tensor, up: Tensor) -> None:
        start = (part * self.adapters + adapter) * self.rank
        mine, outputs = slice(start, start + len(down)), slice(self.first[part], self.first[part + 1])
        self.down[mine].copy_(down)
        self.up[outputs, mine].copy_(up)

    def __call__(self, x: Tensor) -> Tensor:
        narrow = linear(x, self.down)
        own = self.rows.index_N[:, None] == self.adapter_of_column
        # Not by a product with zero: another agent's adapter may overflow on this row.
        return linear(torch.where(own, narrow, 0.0), self.up)


def _add_to(layer: nn.Linear, siblings: Siblings | None, added: _Product) -> None:
    if siblings is not None:
        siblings.added = added
        return
    plain: Any = layer
    plain.forward = lambda x: linear(x, layer.weight, layer.bias) + added(x)
