"""LoRA layers in three matrix products, with fused kernels for what lies between the products.

On a GPU, kernel launches on the host, not the kernels, limit the training speed of a small model: PEFT under autocast
launches about a dozen for every adapted layer. In a larger model, what lies between products reads and writes for as
long as the products compute. ``fuse_lora`` replaces the forward of a shared base's adapted layers, norms, gates,
attention modules and decoder layers by our own functions with the same result. Storage, names and files stay PEFT's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from teamtr.engines.slices import is_spread
from teamtr.engines.torch.anatomy import PRODUCTS, Anatomy, epsilon_of, inspect_attention
from teamtr.engines.torch.attention import Unsupported, packed_now, require_plain
from teamtr.engines.torch.joined_products import Factors, Group, Whole, product, round_factors
from teamtr.engines.torch.known_layers import adds_twice, computed_by_kernels, is_gated, is_plain_adapted, is_rms_norm
from teamtr.engines.torch.row_scaled import FrozenWeight, RowScaled, kept_weight
from teamtr.engines.torch.spread_linears import HalfLinear

MOST_RANKS = 48
"""Largest sum of ranks for the kernels of ``narrow_products``. Above it, writing and adding their partial sums takes
longer than reading activations twice. Query, key and value of rank 16 have this many together."""


class _Adapted(torch.autograd.Function):
    """x W' + scale * (x A') B' for layers that read the same x, in one dtype; gradients for x, A and B only. Weights of
    another dtype are rounded here and again in the backward pass. The outputs are two-dimensional: a view could not be
    changed in place, which some models do.

    In half precision on a GPU the adapter's part is computed first, and the wide product is added to it before
    rounding. A product that only adds an adapter's part would read and write the whole output once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        weights: list[FrozenWeight],
        biases: list[Tensor | None],
        scales: list[float],
        rounded: Factors | None,
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        count = len(weights)
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        down, ups, *_ = rounded or _factors(adapters[:count], adapters[count:], dtype)
        narrow = _narrow(flat, down)
        ctx.ranks = [len(one) for one in adapters[:count]]
        outs = []
        for weight, bias, scale, up, part in zip(weights, biases, scales, ups, narrow.split(ctx.ranks, 1), strict=True):
            start = flat.new_empty(1) if bias is None else bias.to(dtype)
            own, beta = up.T, float(bias is not None)
            if computed_by_kernels(flat):
                outs.append(torch.addmm(start, part, own, beta=beta, alpha=scale).addmm_(flat, weight.to(dtype).T))
            else:
                outs.append(torch.addmm(start, flat, weight.to(dtype).T, beta=beta).addmm_(part, own, alpha=scale))
        ctx.save_for_backward(flat, down, narrow, *ups)
        ctx.weights = weights  # the model's own frozen weights, which autograd need not save
        ctx.scales, ctx.shape, ctx.x_dtype, ctx.dtypes = scales, x.shape, x.dtype, [one.dtype for one in adapters]
        return tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count = len(grads)
        flat, down, narrow, *ups = ctx.saved_tensors
        grads = tuple(grad.to(flat.dtype) for grad in grads)
        both = [
            _up_gradient(grad, part, up, scale)
            for grad, part, up, scale in zip(grads, narrow.split(ctx.ranks, 1), ups, ctx.scales, strict=True)
        ]
        narrows = [found.to(flat.dtype) for _, found in both]
        grad_narrow = narrows[0] if count == 1 else torch.cat(narrows, 1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            products = [*zip(grads, ctx.weights, strict=True), (grad_narrow, down)]
            (first, factor), *others = reversed(products) if computed_by_kernels(flat) else products
            grad_x = first @ factor.to(flat.dtype)
            for grad, factor in others:
                grad_x.addmm_(grad, factor.to(flat.dtype))
            grad_x = grad_x.view(ctx.shape).to(ctx.x_dtype)
        adapters: list[Tensor | None] = [None] * (2 * count)
        if any(ctx.needs_input_grad[6:]):
            adapters[:count] = _down_gradient(grad_narrow, flat).split(ctx.ranks)
            adapters[count:] = [of_up for of_up, _ in both]
        found = [None if one is None else one.to(dtype) for one, dtype in zip(adapters, ctx.dtypes, strict=True)]
        return grad_x, None, None, None, None, None, *found


def _factors(downs: Sequence[Tensor], ups: Sequence[Tensor], dtype: torch.dtype) -> Factors:
    return Factors((downs[0] if len(downs) == 1 else torch.cat(list(downs))).to(dtype), [up.to(dtype) for up in ups])


def _narrow(flat: Tensor, down: Tensor) -> Tensor:
    """x A'."""
    if _reads_fast(flat, len(down)):
        from teamtr.engines.torch.narrow_products import narrow

        return narrow(flat, down)
    return flat @ down.T


def _up_gradient(grad: Tensor, narrow: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The gradients of B and of x A', from that of the output."""
    if _reads_fast(grad, up.shape[1]):
        from teamtr.engines.torch.narrow_products import across_and_along

        return across_and_along(grad, narrow, up, scale)
    return (grad.T @ narrow).mul_(scale), (grad @ up).mul_(scale)


def _down_gradient(grad_narrow: Tensor, flat: Tensor) -> Tensor:
    """The gradient of A."""
    if _reads_fast(flat, grad_narrow.shape[1]):
        from teamtr.engines.torch.narrow_products import across

        return across(flat, grad_narrow)
    return grad_narrow.T @ flat


def _reads_fast(wide: Tensor, rank: int) -> bool:
    """Whether our own kernels read it (``narrow_products``)."""
    return computed_by_kernels(wide) and rank <= MOST_RANKS


@dataclass
class FusedLora:
    """State of the fused layers of one shared base: the active adapter, the dtype, and cached tensors.

    ``halves`` holds a float32 base's weights in half precision, made at first use and kept as long as an agent computes
    in it; they never change. Weights that are stored in lower precision themselves (``short_base``) have none.
    ``unfused`` are weights of layers of unknown kinds, such as experts and other norms: with any of them, half
    precision needs autocast. ``spread``: the base is partitioned across processes, so no copy of it is kept.
    """

    adapter: str = ""
    dtype: torch.dtype = torch.float32
    linears: list[nn.Linear] = field(default_factory=list)
    unfused: list[Tensor] = field(default_factory=list)
    halves: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    spread: bool = False
    siblings: dict[int, list[Tensor]] = field(default_factory=dict)
    """Weights of layers that read the same input, by the id of each: their half-precision copies are parts of one
    tensor."""
    known: list[Group] = field(default_factory=list)
    """All groups of layers that may be read together, including those of a single layer."""
    groups: dict[Group, None] = field(default_factory=dict)
    """Groups that were read in the previous pass, or in the current one."""
    rounded: dict[Group, Factors] = field(default_factory=dict)
    """Rounded factors of the previous pass's groups, during a pass."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context of one forward pass. In half precision the adapter's factors are rounded at its beginning, for all
        layers at once."""
        before, self.groups = self.groups, {}
        self.rounded = {} if self.spread or self.dtype == torch.float32 else self._rounded(before)
        try:
            yield
        finally:
            self.rounded = {}

    def _rounded(self, groups: Iterable[Group]) -> dict[Group, Factors]:
        carried = [(group, found) for group in groups if (found := group.adapters(self.adapter)) is not None]
        return round_factors(carried, self.dtype, self._whole)

    def _whole(self, group: Group) -> Whole | None:
        """The layers of a group as one, in half precision on a GPU, unless something rules it out."""
        adapters = group.adapters(self.adapter)
        if adapters is None or self.spread or self.dtype == torch.float32 or not self.fuses(adapters.downs[0]):
            return None
        if not 0 < len(adapters.downs) * adapters.rank <= MOST_RANKS:
            return None
        return group.whole(self.adapter, self.dtype, self.weight_of)

    def rows(self, group: Group, x: Tensor) -> Tensor | None:
        """The outputs of a group's layers for x, side by side: [N, W]. None if each layer has its own product."""
        self.groups[group] = None
        factors = self.rounded.get(group)
        if factors is None:  # first use, or recomputed in the backward pass
            if self._whole(group) is None:
                return None
            factors = self._rounded([group])[group]
        adapters = group.adapters(self.adapter)
        return None if factors.whole is None or adapters is None else product(x, factors, adapters)

    def fuses(self, x: Tensor) -> bool:
        """Whether our own kernels compute what lies between the products: in half precision on a GPU. Elsewhere torch
        does, and float32 remains the reference."""
        return x.is_cuda and self.dtype in (torch.float16, torch.bfloat16)

    def weight_of(self, layer: nn.Linear) -> FrozenWeight:
        """The weight in the compute dtype. A partitioned weight is returned as it is, and the caller rounds it on the
        fly. So is a weight stored in half precision or 8 bits: a copy would take as much memory as was saved, or
        more."""
        weight = kept_weight(layer)
        if (
            self.spread
            or self.dtype == torch.float32
            or not isinstance(weight, Tensor)
            or weight.dtype != torch.float32
        ):
            return weight
        return self.half_of(weight, self.dtype)

    def half_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = (id(weight), dtype)
        if key not in self.halves:
            together = self.siblings.get(id(weight), [weight])
            if any(one.dtype != weight.dtype for one in together):
                together = [weight]
            whole = weight.new_empty(sum(map(len, together)), *weight.shape[1:], dtype=dtype)
            for one, part in zip(together, whole.split([len(one) for one in together]), strict=True):
                self.halves[id(one), dtype] = part.copy_(one.detach())
        return self.halves[key]

    def keep_halves(self, dtypes: Collection[torch.dtype]) -> None:
        """Drops the copies in any other dtype."""
        kept = {key: half for key, half in self.halves.items() if key[1] in dtypes}
        if len(kept) < len(self.halves):
            self.let_go()  # groups hold references to them
            self.halves = kept

    def let_go(self) -> None:
        """Drops everything that refers to the memory of the base's weights, which are about to be moved."""
        for group in self.known:
            group.let_go()

    def reads_together(self, layers: Sequence[Any]) -> Group:
        """Registers layers that read the same input as a group."""
        group = Group(layers, spread=self.spread)
        self.known.append(group)
        weights = [layer.base_layer.weight for layer in layers] if group.plain and not self.spread else []
        if len({id(one) for one in weights} - self.siblings.keys()) == len(layers) > 1:
            self.siblings |= dict.fromkeys(map(id, weights), weights)
        return group


def fuse_lora(shared: Any) -> FusedLora:
    """Replaces forwards of a PEFT model with LoRA adapters by fused ones; modules that are not plain enough keep their
    own."""
    causal_lm = shared.get_base_model()
    decoder = causal_lm.get_decoder()
    state = FusedLora(spread=any(map(is_spread, decoder.parameters())))
    last_norm = getattr(decoder, "norm", None)
    rotary = getattr(decoder, "rotary_emb", None)
    try:
        attention = inspect_attention(causal_lm)
    except Unsupported:
        attention = {}
    gates = [module for module in causal_lm.modules() if is_gated(module)]
    for known in attention.values():
        known.module.forward = _attention_forward(known, state)
    layers = [] if state.spread else [module for module in getattr(decoder, "layers", ()) if adds_twice(module)]
    for module in gates:
        module.forward = _gated_forward(module, state)
    for module in layers:
        module.forward = _layer_forward(module, state)
    if rotary is not None:
        rotary.forward = _rotary_forward(rotary.forward, state)
    unfused: dict[Tensor, None] = {}
    within = {part for module in decoder.modules() if hasattr(module, "lora_A") for part in module.modules()}
    for module in decoder.modules():
        if is_plain_adapted(module):
            state.linears.append(module.base_layer)
            module.forward = _adapted_forward(module, state)
        elif hasattr(module, "lora_A"):
            unfused |= dict.fromkeys(module.parameters())
        elif module in within or isinstance(module, nn.Embedding):
            continue
        elif type(module) is nn.Linear:
            plain: Any = module
            state.linears.append(plain)
            plain.forward = _frozen_forward(plain, state)
        elif is_rms_norm(module):
            if module is not last_norm:
                module.forward = _norm_forward(module, state)
        elif not type(module).__name__.endswith("RMSNorm"):  # those upcast and restore the dtype by themselves
            unfused |= dict.fromkeys(module.parameters(recurse=False))
    state.unfused = list(unfused)
    return state


def _adapted_forward(module: Any, state: FusedLora) -> Any:
    group = state.reads_together([module])

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = state.rows(group, x) if state.fuses(x) else None
        return _read(group, x, state)[0] if rows is None else rows.view(*x.shape[:-1], rows.shape[1])

    return forward


def _frozen_forward(module: nn.Linear, state: FusedLora) -> Any:
    def forward(x: Tensor) -> Tensor:
        return _frozen(module, x, state)

    return forward


def _frozen(layer: nn.Linear, x: Tensor, state: FusedLora) -> Tensor:
    weight = state.weight_of(layer)
    if isinstance(weight, RowScaled) or weight.dtype != state.dtype:
        rounded: Tensor = HalfLinear.apply(x, weight, layer.bias, state.dtype)
        return rounded
    return linear(x.to(weight.dtype), weight, None if layer.bias is None else layer.bias.to(weight.dtype))


def _read(group: Group, x: Tensor, state: FusedLora) -> tuple[Tensor, ...]:
    """The outputs of layers that read the same input, computed together if all are plain and carry the adapter."""
    layers, adapters = group.layers, group.adapters(state.adapter)
    if adapters is None:
        if len(layers) > 1:
            return tuple(layer(x) for layer in layers)
        return (_frozen(layers[0].base_layer, x, state),)  # only another agent's adapter is on this layer
    state.groups[group] = None
    outs = _Adapted.apply(
        x,
        state.dtype,
        [state.weight_of(layer.base_layer) for layer in layers],
        [layer.base_layer.bias for layer in layers],
        [layer.scaling[state.adapter] for layer in layers],
        state.rounded.get(group),
        *adapters.downs,
        *adapters.ups,
    )
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)


def _norm_forward(module: Any, state: FusedLora) -> Any:
    epsilon = epsilon_of(module) or 0.0

    def forward(x: Tensor) -> Tensor:
        if state.fuses(x) and not module.weight.requires_grad:
            from teamtr.engines.torch.fused_layers import norm

            return norm(x, module.weight, epsilon, state.dtype)
        return rms_norm(x.float(), (x.shape[-1],), module.weight, epsilon).to(state.dtype)

    return forward


def _gated_forward(module: Any, state: FusedLora) -> Any:
    original, group = module.forward, state.reads_together([module.gate_proj, module.up_proj])

    def forward(*args: Any, **named: Any) -> Any:
        if named or not state.fuses(args[0]):
            return original(*args, **named)
        (x,) = args
        return module.down_proj(inner(x))

    def inner(x: Tensor) -> Tensor:
        """A separate function, so that gate and up are freed when it returns, unless the backward pass needs them."""
        from teamtr.engines.torch.fused_layers import gated, gated_rows

        both = state.rows(group, x)
        if both is None:
            return gated(*_read(group, x, state))
        return gated_rows(both).view(*x.shape[:-1], both.shape[1] // 2)

    return forward


def _attention_forward(anatomy: Anatomy, state: FusedLora) -> Any:
    module, original = anatomy.module, anatomy.module.forward
    group = state.reads_together([getattr(module, name) for name in PRODUCTS])
    frozen = not any(norm.weight.requires_grad for norm in anatomy.norms)
    epsilon, dim, kinds = anatomy.epsilon, anatomy.dim, (anatomy.heads, anatomy.kv_heads)

    def forward(*args: Any, **named: Any) -> Any:
        layout = packed_now()
        if layout is None or not frozen or args or not state.fuses(named["hidden_states"]):
            return original(*args, **named)
        require_plain(named.get("attention_mask"), 0.0, {"sliding_window": anatomy.window})
        cos, sin = (part[0] for part in named["position_embeddings"])
        parts = queries_and_others(named["hidden_states"], cos, sin)
        attended = layout.attend(*parts, anatomy.layer, anatomy.scale)
        return module.o_proj(attended.flatten(1)[None]), None

    def queries_and_others(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, D], and keys and values [N, K, D]."""
        from teamtr.engines.torch.fused_rotation import turned, turned_rows

        rows, (of_query, of_key) = state.rows(group, x), anatomy.weights
        if rows is not None:
            return turned_rows(rows, cos, sin, of_query, of_key, epsilon, *kinds)
        query, key, value = (out.view(out.shape[1], -1, dim) for out in _read(group, x, state))
        return turned(query, cos, sin, of_query, epsilon), turned(key, cos, sin, of_key, epsilon), value

    return forward


def _layer_forward(module: Any, state: FusedLora) -> Any:
    original, norms = module.forward, (module.input_layernorm, module.post_attention_layernorm)
    frozen = not any(norm.weight.requires_grad for norm in norms)
    epsilons = [epsilon_of(norm) or 0.0 for norm in norms]

    def forward(*args: Any, **named: Any) -> Any:
        if packed_now() is None or not frozen or len(args) != 1 or not state.fuses(args[0]):
            return original(*args, **named)
        from teamtr.engines.torch.fused_layers import add_norm, added, branch

        x, normed = branch(args[0], norms[0].weight, epsilons[0], state.dtype)
        attended, _ = module.self_attn(hidden_states=normed, **named)
        x, normed = add_norm(x, attended, norms[1].weight, epsilons[1], state.dtype)
        return added(x, module.mlp(normed))

    return forward


def _rotary_forward(original: Any, state: FusedLora) -> Any:
    """Angles are computed as usual and converted to the compute dtype, as in a model loaded in half precision. If they
    are not a tuple of cosine and sine (but complex numbers), they are returned unchanged."""

    def forward(x: Tensor, *positions: Any, **named: Any) -> Any:
        angles = original(x, *positions, **named)
        return tuple(part.to(state.dtype) for part in angles) if isinstance(angles, tuple) else angles

    return forward
