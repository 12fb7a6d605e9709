"""What lies between the products of the sampling copy, in few kernels: sum and norm in one, the gate in another.

A layer does not add what its last product says: the next one does, where it norms the sum. That needs a decoder whose
layers hand on what they say to the next one and to nobody else. ``Stack`` finds out whether it is one. Others keep
their own forward, and torch's compiler joins much the same, which takes it half a minute. So does a large model on a
card of which only a part is known, such as one with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from teamtr.engines.paged.fused_linears import Siblings
from teamtr.engines.torch.anatomy import epsilon_of
from teamtr.engines.torch.known_layers import adds_twice, computed_by_kernels, hands_on, is_gated, is_rms_norm


@dataclass(frozen=True)
class Stack:
    """Decoder layers that hand on, those of their parts that are gates, and the norm after the last one."""

    layers: list[Any]
    gates: list[Any]
    norm: Any

    @staticmethod
    def of(model: Any) -> Stack | None:
        """Before the model is filled: what is tried must not overflow."""
        decoder = model.get_decoder()
        layers, norm = list(getattr(decoder, "layers", ())), getattr(decoder, "norm", None)
        if not layers or not all(map(adds_twice, layers)) or not is_rms_norm(norm) or not hands_on(model):
            return None
        return Stack(layers, [layer.mlp for layer in layers if is_gated(layer.mlp)], norm)

    def is_whole(self, attention: Container[nn.Module]) -> bool:
        """Whether kernels of our own compute all that lies between products. ``attention``: the modules we know."""
        return len(self.gates) == len(self.layers) and all(layer.self_attn in attention for layer in self.layers)


@dataclass
class _Carried:
    """What the layer before said and did not add."""

    delta: Tensor | None = None

    def take(self) -> Tensor | None:
        """It is kept no longer than it is needed: a pass over many tokens has large ones."""
        delta, self.delta = self.delta, None
        return delta


def join_layers(stack: Stack, products: Mapping[nn.Module, Siblings]) -> None:
    """Let these layers leave their last sum to the next one. ``products``: of layers that read the same input."""
    carried = _Carried()
    for k, layer in enumerate(stack.layers):
        layer.forward = _layer_forward(layer, carried, first=k == 0)
    for gate in stack.gates:
        gate.forward = _gated_forward(gate, products.get(gate))
    stack.norm.forward = _last_norm_forward(stack.norm, carried)


def _layer_forward(layer: Any, carried: _Carried, *, first: bool) -> Callable[..., Tensor]:
    before, between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)

    def forward(hidden_states: Tensor, **named: Any) -> Tensor:
        if first:
            carried.take()  # a pass that broke off may have left something
        x, normed = before(hidden_states, carried.take())
        x, normed = between(x, layer.self_attn(hidden_states=normed, **named)[0])
        carried.delta = layer.mlp(normed)
        return x

    return forward


def _last_norm_forward(module: Any, carried: _Carried) -> Callable[[Tensor], Tensor]:
    last = _Norm(module)

    def forward(x: Tensor) -> Tensor:
        return last(x, carried.take())[1]

    return forward


class _Norm:
    """A sum, and its norm."""

    def __init__(self, module: Any) -> None:
        self.module, self.plain, self.epsilon = module, module.forward, epsilon_of(module) or 0.0

    def __call__(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        if not computed_by_kernels(x):
            x = x if delta is None else x + delta
            return x, self.plain(x)
        from teamtr.engines.torch.fused_layers import add_norm, norm

        if delta is None:
            return x, norm(x, self.module.weight, self.epsilon, x.dtype)
        return add_norm(x, delta, self.module.weight, self.epsilon, x.dtype)


def _gated_forward(module: Any, product: Siblings | None) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        if not computed_by_kernels(x):
            said: Tensor = plain(x)
            return said
        from teamtr.engines.torch.fused_layers import gated

        down: Tensor = module.down_proj(gated(*read(x)))
        return down

    def read(x: Tensor) -> tuple[Tensor, ...]:
        if product is None:
            return module.gate_proj(x), module.up_proj(x)
        return product.product(x).split(product.sizes, -1)

    return forward
