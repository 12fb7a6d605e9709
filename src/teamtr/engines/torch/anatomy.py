"""Recognizes attention modules with a known structure: norms over a head, rotation, attention, output projection.

A module is recognized by what it computes, not by its name: ``inspect_attention`` runs the model over a few tokens and
compares what attention received and what was made of its output.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from teamtr.engines.slices import cut, gathered, own
from teamtr.engines.torch.attention import AttentionShape, Listening, listen
from teamtr.engines.torch.rotation import Rotation

PRODUCTS = ("q_proj", "k_proj", "v_proj")
LARGE = 200.0
"""Factor on the outputs of the projections during inspection, so that modules that clip queries, keys or values are
detected."""
AGREEMENT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Tolerance relative to the largest element: half precision rounds each step of a norm and a rotation, ours rounds
once."""
KNOWN = {"self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"}
"""Parameters that a forward may have. One with others, such as positions, may use them in ways that a few tokens do not
show."""


@dataclass
class Anatomy:
    """An attention module with optional norms of its queries and keys, rotation, attention and an output projection."""

    module: Any
    heads: int
    kv_heads: int
    dim: int
    norms: tuple[Any, ...]
    """Norms of query and key, or none."""
    scale: float = 0.0
    window: int | None = None

    @staticmethod
    def of(module: Any) -> Anatomy | None:
        """None if attributes, signature or shapes already show that it is another kind of attention."""
        config, dim = getattr(module, "config", None), getattr(module, "head_dim", None)
        if config is None or not isinstance(dim, int) or dim % 2:
            return None
        if not all(hasattr(module, name) for name in (*PRODUCTS, "o_proj", "layer_idx")):
            return None
        if set(inspect.signature(type(module).forward).parameters) - KNOWN:
            return None
        heads, kv_heads, _, _ = AttentionShape.of(config)
        sizes = [getattr(getattr(module, name), "out_features", None) for name in PRODUCTS]
        if sizes != [heads * dim, kv_heads * dim, kv_heads * dim]:
            return None
        norms = tuple(norm for name in ("q_norm", "k_norm") if (norm := getattr(module, name, None)) is not None)
        if norms and (len(norms) != 2 or any(not _over_a_head(norm, dim) for norm in norms)):
            return None
        if norms and epsilon_of(norms[0]) != epsilon_of(norms[1]):
            return None
        return Anatomy(module, heads, kv_heads, dim, norms)

    def rotation(self, cos_ND: Tensor, sin_ND: Tensor) -> Rotation:
        return Rotation(cos_ND, sin_ND, *self.weights, self.epsilon)

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
        """Whether our computation gives attention the same queries, keys and values, and makes the same of its
        output."""
        angles, hidden = seen.given.get("position_embeddings"), seen.given.get("hidden_states")
        heard = listening.heard.get(self.layer)
        if heard is None or not isinstance(hidden, Tensor) or not isinstance(angles, tuple) or len(angles) != 2:
            return False
        if len(seen.products) != len(PRODUCTS) or any(asked is not hidden for asked, _ in seen.products.values()):
            return False
        cos, sin = angles
        if cos.shape != (1, hidden.shape[1], self.dim) or sin.shape != cos.shape:
            return False
        query, key, value = (seen.products[name][1][0].unflatten(-1, (-1, self.dim)) for name in PRODUCTS)
        returned = seen.returned[0] if isinstance(seen.returned, tuple) else None
        with gathered(self.module):
            rotation = self.rotation(cos[0], sin[0])
            ours = (rotation.query(query), rotation.key(key), value)
            if returned is None or not all(_alike(a, b) for a, b in zip(ours, heard, strict=True)):
                return False
            return _alike(self.module.o_proj(heard[0].flatten(-2)[None]), returned)


@torch.no_grad()
def inspect_attention(model: Any) -> dict[nn.Module, Anatomy]:
    """The attention modules with the known structure. During inspection norms get other weights, which tell them apart.

    Raises ``Mixing`` if some layer has no attention, or one that does not use the attention interface.
    """
    found = {module: one for module in model.modules() if (one := Anatomy.of(module)) is not None}
    norms = [norm for one in found.values() for norm in one.norms]
    before = [own(norm.weight).clone() for norm in norms]
    seen = {module: _Seen() for module in found}
    hooks = [hook for module, one in seen.items() for hook in one.hooks(module)]
    try:
        for norm in norms:
            own(norm.weight).copy_(cut(torch.linspace(0.5, 1.5, norm.weight.numel()), norm.weight))
        listening, _ = listen(model)
        agreeing = {module: one for module, one in found.items() if one.agrees(seen[module], listening)}
    finally:
        for hook in hooks:
            hook.remove()
        for norm, weight in zip(norms, before, strict=True):
            own(norm.weight).copy_(weight)
    for one in agreeing.values():
        one.scale, one.window = listening.scales[one.layer], listening.windows[one.layer]
    return agreeing


@dataclass
class _Seen:
    """What an attention module was given, the inputs and outputs of its projections, and what it returned."""

    given: dict[str, Any] = field(default_factory=dict)
    products: dict[str, tuple[Any, Tensor]] = field(default_factory=dict)
    returned: Any = None

    def hooks(self, module: nn.Module) -> list[Any]:
        def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.given = dict(named) if not args else {}

        def after(_: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
            self.returned = returned

        def enlarge(name: str) -> Any:
            def after_product(_: nn.Module, args: tuple[Any, ...], said: Tensor) -> Tensor:
                enlarged = LARGE * said
                self.products[name] = (args[0] if args else None, enlarged.clone())  # some clip it in place
                return enlarged

            return after_product

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
            *(getattr(module, name).register_forward_hook(enlarge(name)) for name in PRODUCTS),
        ]


def epsilon_of(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


def _over_a_head(norm: Any, dim: int) -> bool:
    weight = getattr(norm, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == (dim,) and epsilon_of(norm) is not None


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    difference = (ours.float() - theirs.float()).abs().max()
    return bool(difference <= AGREEMENT[theirs.dtype] * theirs.float().abs().max())
