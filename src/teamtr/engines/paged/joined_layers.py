"""Fused kernels between the matrix products of the sampling copy: residual sum and norm in one, the gate in another.

A layer leaves its last output unadded; the next layer adds it in the kernel of its norm. This requires a decoder in
which the output of a layer goes to the next layer only, which ``Stack`` checks. Other models keep their own forward;
torch's compiler fuses much the same for them, which takes half a minute. So do large models on a card that are only
partly recognized, such as those with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from teamtr.engines.paged.fused_linears import Siblings
from teamtr.engines.paged.products import compute_by_product
from teamtr.engines.torch.anatomy import epsilon_of
from teamtr.engines.torch.known_layers import (
    adds_twice,
    computed_by_kernels,
    hands_on,
    is_gated,
    is_rms_norm,
    turns_plainly,
)


@dataclass(frozen=True)
class Stack:
    """Decoder layers whose outputs go to the next layer only, the recognized gates among their parts, the norm after
    the last one, and the module of the angles, if it is recognized."""

    layers: list[Any]
    gates: list[Any]
    norm: Any
    rotation: Any

    @staticmethod
    def of(model: Any) -> Stack | None:
        """The stack of a model, or None. Called before the model is filled, so that the test inputs do not overflow."""
        decoder = model.get_decoder()
        layers, norm = list(getattr(decoder, "layers", ())), getattr(decoder, "norm", None)
        if not layers or not all(map(adds_twice, layers)) or not is_rms_norm(norm) or not hands_on(model):
            return None
        rotation = getattr(decoder, "rotary_emb", None)
        gates = [layer.mlp for layer in layers if is_gated(layer.mlp)]
        return Stack(layers, gates, norm, rotation if turns_plainly(rotation) else None)

    def is_whole(self, attention: Container[nn.Module]) -> bool:
        """Whether our own kernels compute everything between the matrix products. ``attention``: the recognized
        modules."""
        return len(self.gates) == len(self.layers) and all(layer.self_attn in attention for layer in self.layers)


@dataclass
class _Carried:
    """The last output of the previous layer, which has not been added yet."""

    delta: Tensor | None = None

    def take(self) -> Tensor | None:
        """The output, which is released: in a pass over many tokens it is large."""
        delta, self.delta = self.delta, None
        return delta


def join_layers(stack: Stack, products: Mapping[nn.Module, Siblings]) -> None:
    """Make each layer leave its last sum to the next one, and let ``paged.products`` compute attention's output and the
    product after the gate. ``products``: of layers that read the same input."""
    carried = _Carried()
    for k, layer in enumerate(stack.layers):
        layer.forward = _layer_forward(layer, carried, first=k == 0)
        last_of_attention = getattr(layer.self_attn, "o_proj", None)
        if type(last_of_attention) is nn.Linear:
            compute_by_product(last_of_attention)
    for gate in stack.gates:
        gate.forward = _gated_forward(gate, products.get(gate))
        if type(gate.down_proj) is nn.Linear:
            compute_by_product(gate.down_proj)
    stack.norm.forward = _last_norm_forward(stack.norm, carried)
    if stack.rotation is not None:
        stack.rotation.forward = _angles_forward(stack.rotation)


def _layer_forward(layer: Any, carried: _Carried, *, first: bool) -> Callable[..., Tensor]:
    before, between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)

    def forward(hidden_states: Tensor, **named: Any) -> Tensor:
        if first:
            carried.take()  # an interrupted pass may have left something
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


def _angles_forward(module: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    plain = module.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if not computed_by_kernels(x) or len(position_ids) > 1:
            said: tuple[Tensor, Tensor] = plain(x, position_ids)
            return said
        from teamtr.engines.torch.fused_rotation import angles

        cos, sin = angles(position_ids[0], module.inv_freq.float(), module.attention_scaling, x.dtype)
        return cos[None], sin[None]

    return forward


class _Norm:
    """A residual sum and its norm."""

    def __init__(self, module: Any) -> None:
        self.module, self.plain, self.epsilon = module, module.forward, epsilon_of(module) or 0.0

    def __call__(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        if not computed_by_kernels(x):
            x = x if delta is None else x + delta
            return x, self.plain(x)
        from teamtr.engines.torch.fused_layers import add_norm, norm

        if delta is None:
            return x, norm(x, self.module.weight, self.epsilon, x.dtype, room=True)
        return add_norm(x, delta, self.module.weight, self.epsilon, x.dtype, room=True)


def _gated_forward(module: Any, product: Siblings | None) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        if not computed_by_kernels(x):
            said: Tensor = plain(x)
            return said
        down: Tensor = module.down_proj(multiplied(x))
        return down

    def multiplied(x: Tensor) -> Tensor:
        if product is not None and (found := product.gated(x)) is not None:
            return found
        from teamtr.engines.torch.fused_layers import gated

        return gated(*read(x))

    def read(x: Tensor) -> tuple[Tensor, ...]:
        if product is None:
            return module.gate_proj(x), module.up_proj(x)
        return product.product(x).split(product.sizes, -1)

    return forward
