"""Fewer, larger kernels in the sampling copy.

Layers with the same input become one product, and attention applies the norm and rotation of queries and keys. What a
model computes stays the same. Attention modules are fused if ``anatomy`` recognizes them; the others keep their own
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from teamtr.engines.paged.products import gated_product, product
from teamtr.engines.torch.anatomy import PRODUCTS, Anatomy
from teamtr.engines.torch.attention import require_plain, rotated_attention
from teamtr.engines.torch.joined_products import below_each_other
from teamtr.engines.torch.row_scaled import FrozenWeight, RowScaled, kept_weight

SIBLINGS = (PRODUCTS, ("gate_proj", "up_proj"))


def join_siblings(model: nn.Module) -> dict[nn.Module, Siblings]:
    """Give query, key and value one common weight, and gate and up another: with few rows, a decode step reads weights
    at full memory bandwidth only if a product is large. Each layer keeps its name, and its weight becomes a slice of
    the common one. Returns the fused products by the module that contains them."""
    found: dict[nn.Module, Siblings] = {}
    for module, _, layers in list(siblings_in(model)):
        found.setdefault(module, Siblings(layers))  # SIBLINGS begins with attention's layers
    return found


def siblings_in(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...], list[nn.Linear]]]:
    """Layers that can be fused, with the module that contains them and their names; below adapters, if there are
    any."""
    for module in model.modules():
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            plain: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
            if all(type(layer) is nn.Linear for layer in plain) and Siblings.fit(plain):
                yield module, names, plain


def as_one(tensors: Sequence[Tensor]) -> Tensor:
    """These tensors concatenated along rows: a view if they already are so in memory, otherwise a copy."""
    lying = below_each_other(tensors)
    return torch.cat(list(tensors)) if lying is None else lying


def joined_weight(layers: Sequence[nn.Linear]) -> FrozenWeight:
    """The weights of these layers, concatenated along rows. All must be stored in the same format."""
    kept = [kept_weight(layer) for layer in layers]
    scaled = [weight for weight in kept if isinstance(weight, RowScaled)]
    if not scaled:
        return as_one([layer.weight for layer in layers])
    assert len(scaled) == len(kept), "some of the layers are kept in 8 bits, some are not"
    return RowScaled(as_one([weight.numbers for weight in scaled]), as_one([weight.scales for weight in scaled]))


class Siblings:
    """Layers that are computed as one product. The first one (the eldest) computes it for all; each of the others takes
    its part when it is called with the same input, and computes its own output otherwise."""

    @staticmethod
    def fit(layers: list[nn.Linear]) -> bool:
        return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = joined_weight(layers)
        self.bias: Tensor | None = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        self.layers = layers
        self.product: Callable[[Tensor], Tensor] = self._plain
        """Maps an input to the outputs of all layers, side by side. ``row_adapters`` replaces it with one that adds
        adapters."""
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        numbers = self.weight if isinstance(self.weight, Tensor) else self.weight.numbers
        weights = numbers.split(self.sizes)
        biases = [None] * len(layers) if self.bias is None else self.bias.split(self.sizes)
        for k, (layer, weight, bias) in enumerate(zip(layers, weights, biases, strict=True)):
            plain: Any = layer
            plain.siblings = self
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
            plain.forward = self._eldest if k == 0 else self._younger(k, layer)

    def gated(self, x: Tensor) -> Tensor | None:
        """silu(first) * second of two layers of one size, if one kernel computes all of it."""
        if self.product != self._plain or len(set(self.sizes)) > 1:
            return None
        return gated_product(x, self.weight, self.bias)

    def _plain(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)

    def _eldest(self, x: Tensor) -> Tensor:
        parts = self.product(x).split(self.sizes, -1)
        self._input, self._parts = x, dict(enumerate(parts))
        return self._parts.pop(0)

    def _younger(self, k: int, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self._input is not x or k not in self._parts:
                if self.product == self._plain:
                    return linear(x, kept_weight(layer).to(x.dtype), layer.bias)
                return self.product(x).split(self.sizes, -1)[k]
            part = self._parts.pop(k)
            if not self._parts:
                self._input = None
            return part

        return forward


# -- attention ---------------------------------------------------------------------------------------------------


def join_attention(known: Mapping[nn.Module, Anatomy], products: Mapping[nn.Module, Siblings]) -> int:
    """Make recognized attention modules pass their fused product to attention directly, together with norm and
    rotation. Returns the number of these modules."""
    joined = [(known[module], siblings) for module, siblings in products.items() if module in known]
    for anatomy, siblings in joined:
        anatomy.module.forward = _joined_forward(anatomy, siblings)
    return len(joined)


def _joined_forward(anatomy: Anatomy, siblings: Siblings) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        require_plain(attention_mask, 0.0, {"sliding_window": anatomy.window})
        joined = siblings.product(hidden_states)
        cos, sin = position_embeddings
        attended = rotated_attention(
            joined, cos, sin, *anatomy.weights, anatomy.epsilon, anatomy.layer, anatomy.scale, anatomy.heads,
            anatomy.kv_heads,
        )  # fmt: skip
        return anatomy.module.o_proj(attended), None

    return forward
