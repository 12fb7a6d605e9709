"""Fewer, larger kernels in the sampling copy: layers that read the same input in one product, norm and rotation of
queries and keys within attention.

What a model computes stays the same. Whether a module may be joined is decided by what it computes, not by its name:
``join_attention`` lets the model run over a few tokens and compares. What does not agree keeps its own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from teamtr.engines.torch.attention import AttentionShape, Listening, listen, require_plain, rotated_attention
from teamtr.engines.torch.lean import epsilon_of
from teamtr.engines.torch.serving.rotation import Rotation

ATTENTION = ("q_proj", "k_proj", "v_proj")
SIBLINGS = (ATTENTION, ("gate_proj", "up_proj"))


def join_siblings(model: nn.Module) -> dict[nn.Module, Siblings]:
    """Give query, key and value one weight, gate and up another: a decode step of few rows reads weights at the speed
    of the memory only when a product is large. Each layer keeps its name, its weight is a part of the common one.
    Returns the joined products of attention, by module."""
    found = {}
    for module in model.modules():
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                plain = [layer for layer in layers if layer is not None]
                if Siblings.fit(plain):
                    joined = Siblings(plain)
                    if names is ATTENTION:
                        found[module] = joined
    return found


class Siblings:
    """The eldest computes for all; each of the others takes its part when it is asked about the same input."""

    @staticmethod
    def fit(layers: list[nn.Linear]) -> bool:
        return len({(layer.in_features, layer.bias is None) for layer in layers}) == 1

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        weights = self.weight.split(self.sizes)
        biases = [None] * len(layers) if self.bias is None else self.bias.split(self.sizes)
        for k, (layer, weight, bias) in enumerate(zip(layers, weights, biases, strict=True)):
            plain: Any = layer
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
            plain.forward = self._eldest if k == 0 else self._younger(k, layer)

    def _eldest(self, x: Tensor) -> Tensor:
        parts = linear(x, self.weight, self.bias).split(self.sizes, -1)
        self._input, self._parts = x, dict(enumerate(parts))
        return self._parts.pop(0)

    def _younger(self, k: int, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self._input is not x or k not in self._parts:
                return linear(x, layer.weight, layer.bias)
            part = self._parts.pop(k)
            if not self._parts:
                self._input = None
            return part

        return forward


# -- attention ---------------------------------------------------------------------------------------------------

LARGE = 200.0
"""Queries, keys and values this much larger than new weights make them: whoever clips them is found out."""
AGREEMENT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Of the largest element: half precision rounds each step of a norm and a rotation, ours once."""
KNOWN = {"self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"}
"""What a forward may be given. One that asks for more, such as positions, may do with it what few tokens do not
show."""


@torch.no_grad()
def join_attention(model: Any, products: Mapping[nn.Module, Siblings]) -> int:
    """Let attention modules hand their joined product to attention as it is, with norm and rotation as a value.
    Returns how many do. Call it before the copy is filled: products and norms get weights that tell them apart."""
    candidates = {module: _Joined.of(module, product) for module, product in products.items()}
    joined = [(module, one) for module, one in candidates.items() if one is not None]
    for _, one in joined:
        one.product.weight.mul_(LARGE)
        for norm in one.norms:
            norm.weight.copy_(torch.linspace(0.5, 1.5, norm.weight.numel()))
    seen = {module: _Seen() for module, _ in joined}
    hooks = [hook for module, one in seen.items() for hook in one.hooks(module)]
    try:
        listening, _ = listen(model)
    finally:
        for hook in hooks:
            hook.remove()
    count = 0
    for module, one in joined:
        if one.agrees(seen[module], listening):
            one.scale, one.window = listening.scales[one.layer], listening.windows[one.layer]
            plain: Any = module
            plain.forward = one.forward
            count += 1
    return count


@dataclass
class _Seen:
    """What an attention module was given and what it returned."""

    given: dict[str, Any] = field(default_factory=dict)
    returned: Any = None

    def hooks(self, module: nn.Module) -> list[Any]:
        def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.given = dict(named) if not args else {}

        def after(_: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
            self.returned = returned

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]


@dataclass
class _Joined:
    """An attention module whose norm and rotation go along with its product."""

    module: Any
    product: Siblings
    heads: int
    kv_heads: int
    dim: int
    norms: tuple[Any, ...]
    """Of query and key, or none."""
    scale: float = 0.0
    window: int | None = None

    @staticmethod
    def of(module: Any, product: Siblings) -> _Joined | None:
        """None where the shapes alone tell that it is another kind of attention."""
        config = getattr(module, "config", None)
        dim = getattr(module, "head_dim", None)
        if set(inspect.signature(type(module).forward).parameters) - KNOWN:
            return None
        if config is None or not isinstance(dim, int) or dim % 2 or not hasattr(module, "o_proj"):
            return None
        heads, kv_heads, _, _ = AttentionShape.of(config)
        if product.sizes != [heads * dim, kv_heads * dim, kv_heads * dim] or not hasattr(module, "layer_idx"):
            return None
        norms = tuple(norm for name in ("q_norm", "k_norm") if (norm := getattr(module, name, None)) is not None)
        if norms and (len(norms) != 2 or any(not _over_a_head(norm, dim) for norm in norms)):
            return None
        if norms and epsilon_of(norms[0]) != epsilon_of(norms[1]):
            return None
        return _Joined(module, product, heads, kv_heads, dim, norms)

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        return Rotation(cos, sin, *self.weights, self.epsilon)

    @property
    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        query, key = (norm.weight for norm in self.norms) if self.norms else (None, None)
        return query, key

    @property
    def epsilon(self) -> float:
        return (epsilon_of(self.norms[0]) or 0.0) if self.norms else 0.0

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)

    def agrees(self, seen: _Seen, listening: Listening) -> bool:
        """Whether ours gives attention the same queries, keys and values, and does the same with its answer."""
        angles, hidden = seen.given.get("position_embeddings"), seen.given.get("hidden_states")
        heard = listening.heard.get(self.layer)
        if heard is None or not isinstance(hidden, Tensor) or not isinstance(angles, tuple) or len(angles) != 2:
            return False
        cos, sin = angles
        if cos.shape != (1, hidden.shape[1], self.dim) or sin.shape != cos.shape:
            return False
        parts = linear(hidden, self.product.weight, self.product.bias)[0].split(self.product.sizes, -1)
        query, key, value = (part.unflatten(-1, (-1, self.dim)) for part in parts)
        rotation = self.rotation(cos[0], sin[0])
        ours = (rotation.query(query), rotation.key(key), value)
        returned = seen.returned[0] if isinstance(seen.returned, tuple) else None
        if returned is None or not all(_alike(a, b) for a, b in zip(ours, heard, strict=True)):
            return False
        return _alike(self.module.o_proj(heard[0].flatten(-2)[None]), returned)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        require_plain(attention_mask, 0.0, {"sliding_window": self.window})
        product = linear(hidden_states, self.product.weight, self.product.bias)
        cos, sin = position_embeddings
        attended = rotated_attention(
            product, cos, sin, *self.weights, self.epsilon, self.layer, self.scale, self.heads, self.kv_heads
        )
        return self.module.o_proj(attended), None


def _over_a_head(norm: Any, dim: int) -> bool:
    weight = getattr(norm, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == (dim,) and epsilon_of(norm) is not None


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    difference = (ours.float() - theirs.float()).abs().max()
    return bool(difference <= AGREEMENT[theirs.dtype] * theirs.float().abs().max())
