"""Adapters without ceremony: a linear layer with a low-rank adapter in three matrix products, and what lies between
the products in few kernels.

On a GPU the hosts of small kernels, not the kernels, decide how fast a small model trains: PEFT under autocast starts
about a dozen for every adapted layer. In a larger one, what lies between products reads and writes as long as they
compute. ``fuse_lora`` replaces the forward of a shared base's adapted layers, norms, gates, attention modules and
decoder layers by functions of our own with the same result; storage, names and files stay PEFT's.
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
"""Of the kernels in ``narrow_products``: with more, writing and adding the parts of their sums takes longer than
reading activations twice. Query, key and value of rank 16 have so many together."""


class _Adapted(torch.autograd.Function):
    """x W' + scale * (x A') B' for layers that read the same x, in one dtype; gradients for x, A and B only. Weights of
    another dtype are rounded here and again on the way back. Rows of two dimensions come out: a view could not be
    changed in place, which some models do.

    In half precision on a card the adapter's part comes first, and the wide product is added to it before it is
    rounded: a product that only adds an adapter's part would read and write all that the layer says once more.
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
        ctx.weights = weights  # the model's own, and frozen: nothing about them has to be remembered
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
    """Of what comes out with regard to B, and to x A'."""
    if _reads_fast(grad, up.shape[1]):
        from teamtr.engines.torch.narrow_products import across_and_along

        return across_and_along(grad, narrow, up, scale)
    return (grad.T @ narrow).mul_(scale), (grad @ up).mul_(scale)


def _down_gradient(grad_narrow: Tensor, flat: Tensor) -> Tensor:
    """With regard to A."""
    if _reads_fast(flat, grad_narrow.shape[1]):
        from teamtr.engines.torch.narrow_products import across

        return across(flat, grad_narrow)
    return grad_narrow.T @ flat


def _reads_fast(wide: Tensor, rank: int) -> bool:
    """Whether kernels of our own read it (``narrow_products``)."""
    return computed_by_kernels(wide) and rank <= MOST_RANKS


@dataclass
class FusedLora:
    """What the fused layers of one shared base compute with now: which adapter, in which dtype.

    ``halves`` holds a float32 base's weights in half precision, made when first asked for and kept as long as an agent
    computes in it: they never change.
    There are none of a base that is kept shorter itself (``short_base``). ``unfused`` are weights of layers
    that we do not know, such as experts and other norms: with any of them, half precision needs autocast. ``spread``:
    processes hold parts of the base, so that no copy of it is kept.
    """

    adapter: str = ""
    dtype: torch.dtype = torch.float32
    linears: list[nn.Linear] = field(default_factory=list)
    unfused: list[Tensor] = field(default_factory=list)
    halves: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    spread: bool = False
    siblings: dict[int, list[Tensor]] = field(default_factory=dict)
    """Weights of layers that read the same input, by the id of each: their halves lie below each other."""
    known: list[Group] = field(default_factory=list)
    """All layers that are ever read together, and each by itself."""
    groups: dict[Group, None] = field(default_factory=dict)
    """Those that were read in the pass before, or are in this one."""
    rounded: dict[Group, Factors] = field(default_factory=dict)
    """Of those of the pass before, within a pass."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within, one pass forward. In half precision the adapter's factors are rounded at its beginning, for all
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
        """The layers of a group as one: in half precision on a card, where nothing forbids it."""
        adapters = group.adapters(self.adapter)
        if adapters is None or self.spread or self.dtype == torch.float32 or not self.fuses(adapters.downs[0]):
            return None
        if not 0 < len(adapters.downs) * adapters.rank <= MOST_RANKS:
            return None
        return group.whole(self.adapter, self.dtype, self.weight_of)

    def rows(self, group: Group, x: Tensor) -> Tensor | None:
        """What the layers of a group say of x, side by side: [N, W]. None where each has a product of its own."""
        self.groups[group] = None
        factors = self.rounded.get(group)
        if factors is None:  # read for the first time, or computed again on the way back
            if self._whole(group) is None:
                return None
            factors = self._rounded([group])[group]
        adapters = group.adapters(self.adapter)
        return None if factors.whole is None or adapters is None else product(x, factors, adapters)

    def fuses(self, x: Tensor) -> bool:
        """Whether kernels of our own compute what lies between the products: in half precision on a card. Elsewhere
        torch does, and float32 stays the yardstick that it is."""
        return x.is_cuda and self.dtype in (torch.float16, torch.bfloat16)

    def weight_of(self, layer: nn.Linear) -> FrozenWeight:
        """In the dtype that is computed in; of a spread base as it is, for whoever rounds it in passing. What is kept
        in half precision or 8 bits is cast in passing too: a copy would take as much as was saved, or more."""
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
        """Those of any other dtype go."""
        kept = {key: half for key, half in self.halves.items() if key[1] in dtypes}
        if len(kept) < len(self.halves):
            self.let_go()  # which would hold them
            self.halves = kept

    def let_go(self) -> None:
        """Hold nothing of where the base's weights lie: they are about to be moved."""
        for group in self.known:
            group.let_go()

    def reads_together(self, layers: Sequence[Any]) -> Group:
        """Layers that read the same input."""
        group = Group(layers, spread=self.spread)
        self.known.append(group)
        weights = [layer.base_layer.weight for layer in layers] if group.plain and not self.spread else []
        if len({id(one) for one in weights} - self.siblings.keys()) == len(layers) > 1:
            self.siblings |= dict.fromkeys(map(id, weights), weights)
        return group


def fuse_lora(shared: Any) -> FusedLora:
    """Let a PEFT model with LoRA adapters compute so; what is not plain enough keeps its own forward."""
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
        elif not type(module).__name__.endswith("RMSNorm"):  # those compute in float32 and know what they are given
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
    """What layers that read the same input make of it; together where all are plain and carry the adapter."""
    layers, adapters = group.layers, group.adapters(state.adapter)
    if adapters is None:
        if len(layers) > 1:
            return tuple(layer(x) for layer in layers)
        return (_frozen(layers[0].base_layer, x, state),)  # another agent's adapter sits here
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
        """Gate and up are gone when it is there, but for the way back."""
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
        attended = layout.use_probes(*parts, anatomy.layer, anatomy.scale)
        return module.o_proj(attended.flatten(1)[None]), None

    def queries_and_others(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, H, D], and keys and values [N, K, D]."""
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
    """Angles are computed as ever; in half precision they are applied in half, as in a model loaded that way. Where
    they are something else than a cosine and a sine (complex numbers), they stay what they are."""

    def forward(x: Tensor, *positions: Any, **named: Any) -> Any:
        angles = original(x, *positions, **named)
        return tuple(part.to(state.dtype) for part in angles) if isinstance(angles, tuple) else angles

    return forward
