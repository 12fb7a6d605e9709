"""Adapters without ceremony: a linear layer with a low-rank adapter in three matrix products, and what lies between
the products in few kernels.

On a GPU the hosts of small kernels, not the kernels, decide how fast a small model trains: PEFT under autocast starts
about a dozen for every adapted layer. In a larger one, what lies between products reads and writes as long as they
compute. ``fuse_lora`` replaces the forward of a shared base's adapted layers, norms, gates and attention modules by
functions of our own with the same result; storage, names and files stay PEFT's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from teamtr.engines.slices import gathered, is_spread
from teamtr.engines.torch.anatomy import PRODUCTS, Anatomy, epsilon_of, inspect_attention
from teamtr.engines.torch.attention import Unsupported, packed_now, require_plain
from teamtr.engines.torch.spread_linears import HalfLinear

MOST_RANKS = 128
"""Columns of a narrow factor for which a tile's sums fit into the registers of a card."""


class _Adapted(torch.autograd.Function):
    """x W' + scale * (x A') B' for layers that read the same x, in one dtype; gradients for x, A and B only. Weights of
    another dtype are rounded here and again on the way back. Rows of two dimensions come out: a view could not be
    changed in place, which some models do.

    The adapter's part comes first, and the wide product is added to it before it is rounded: a product that only adds
    an adapter's part would read and write all that the layer says once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        weights: list[Tensor],
        biases: list[Tensor | None],
        scales: list[float],
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        count = len(weights)
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        downs, ups = adapters[:count], [up.to(dtype) for up in adapters[count:]]
        down = (downs[0] if count == 1 else torch.cat(downs)).to(dtype)
        narrow = _narrow(flat, down)
        ctx.ranks = [len(one) for one in downs]
        outs = []
        nothing = flat.new_empty(1)
        for weight, bias, scale, up, part in zip(weights, biases, scales, ups, narrow.split(ctx.ranks, 1), strict=True):
            start = nothing if bias is None else bias.to(dtype)
            out = torch.addmm(start, part, up.T, beta=0 if bias is None else 1, alpha=scale)
            outs.append(out.addmm_(flat, weight.to(dtype).T))
        ctx.save_for_backward(flat, down, narrow, *weights, *ups)
        ctx.scales, ctx.shape, ctx.x_dtype, ctx.dtypes = scales, x.shape, x.dtype, [one.dtype for one in adapters]
        return tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count = len(grads)
        flat, down, narrow, *rest = ctx.saved_tensors
        weights, ups = rest[:count], rest[count:]
        grads = tuple(grad.to(flat.dtype) for grad in grads)
        both = [
            _up_gradient(grad, part, up, scale)
            for grad, part, up, scale in zip(grads, narrow.split(ctx.ranks, 1), ups, ctx.scales, strict=True)
        ]
        narrows = [found.to(flat.dtype) for _, found in both]
        grad_narrow = narrows[0] if count == 1 else torch.cat(narrows, 1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_narrow @ down
            for grad, weight in zip(grads, weights, strict=True):
                grad_x.addmm_(grad, weight.to(flat.dtype))
            grad_x = grad_x.view(ctx.shape).to(ctx.x_dtype)
        adapters: list[Tensor | None] = [None] * (2 * count)
        if any(ctx.needs_input_grad[5:]):
            adapters[:count] = _down_gradient(grad_narrow, flat).split(ctx.ranks)
            adapters[count:] = [of_up for of_up, _ in both]
        found = [None if one is None else one.to(dtype) for one, dtype in zip(adapters, ctx.dtypes, strict=True)]
        return grad_x, None, None, None, None, *found


def _narrow(flat: Tensor, down: Tensor) -> Tensor:
    """x A'."""
    if _reads_fast(flat, len(down)):
        from teamtr.engines.torch import narrow_products

        return narrow_products.narrow(flat, down)
    return flat @ down.T


def _up_gradient(grad: Tensor, narrow: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of what comes out with regard to B, and to x A'."""
    if _reads_fast(grad, up.shape[1]):
        from teamtr.engines.torch import narrow_products

        return narrow_products.across_and_along(grad, narrow, up, scale)
    return (grad.T @ narrow).mul_(scale), (grad @ up).mul_(scale)


def _down_gradient(grad_narrow: Tensor, flat: Tensor) -> Tensor:
    """With regard to A."""
    if _reads_fast(flat, grad_narrow.shape[1]):
        from teamtr.engines.torch import narrow_products

        return narrow_products.across(flat, grad_narrow).T
    return grad_narrow.T @ flat


def _reads_fast(wide: Tensor, rank: int) -> bool:
    """Whether kernels of our own read it (``narrow_products``)."""
    return wide.is_cuda and wide.dtype in (torch.float16, torch.bfloat16) and rank <= MOST_RANKS


@dataclass
class FusedLora:
    """What the fused layers of one shared base compute with now: which adapter, in which dtype.

    ``halves`` holds a float32 base's weights in half precision, made when first asked for and kept: they never change.
    There are none of a base that is kept in half precision itself (``short_base``). ``unfused`` are weights of layers
    that we do not know, such as experts and other norms: with any of them, half precision needs autocast. ``spread``:
    processes hold parts of the base, so that no copy of it is kept.
    """

    adapter: str = ""
    dtype: torch.dtype = torch.float32
    linears: list[nn.Linear] = field(default_factory=list)
    unfused: list[Tensor] = field(default_factory=list)
    halves: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    spread: bool = False

    def fuses(self, x: Tensor) -> bool:
        """Whether kernels of our own compute what lies between the products: in half precision on a card. Elsewhere
        torch does, and float32 stays the yardstick that it is."""
        return x.is_cuda and self.dtype in (torch.float16, torch.bfloat16)

    def weight_of(self, layer: nn.Linear) -> Tensor:
        """In the dtype that is computed in; of a spread base as it is, for whoever rounds it in passing. What is kept
        in half precision becomes another dtype in passing too: a copy would take as much as was saved, or more."""
        if self.spread or self.dtype == torch.float32 or layer.weight.dtype != torch.float32:
            return layer.weight
        return self.half_of(layer.weight, self.dtype)

    def half_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = (id(weight), dtype)
        if key not in self.halves:
            self.halves[key] = weight.detach().to(dtype)
        return self.halves[key]


def fuse_lora(shared: Any) -> FusedLora:
    """FusedLora a PEFT model with LoRA adapters; what is not plain enough keeps its own forward."""
    causal_lm = shared.get_base_model()
    decoder = causal_lm.get_decoder()
    state = FusedLora(spread=any(map(is_spread, decoder.parameters())))
    last_norm = getattr(decoder, "norm", None)
    rotary = getattr(decoder, "rotary_emb", None)
    try:
        attention = inspect_attention(causal_lm)
    except Unsupported:
        attention = {}
    gates = [module for module in causal_lm.modules() if _is_gated(module)]
    for known in attention.values():
        known.module.forward = _attention_forward(known, state)
    for module in gates:
        module.forward = _gated_forward(module, state)
    if rotary is not None:
        rotary.forward = _rotary_forward(rotary.forward, state)
    unfused: dict[Tensor, None] = {}
    within = {part for module in decoder.modules() if hasattr(module, "lora_A") for part in module.modules()}
    for module in decoder.modules():
        if _is_plain_adapted(module):
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
        elif _is_rms_norm(module):
            if module is not last_norm:
                module.forward = _norm_forward(module, state)
        elif not type(module).__name__.endswith("RMSNorm"):  # those compute in float32 and know what they are given
            unfused |= dict.fromkeys(module.parameters(recurse=False))
    state.unfused = list(unfused)
    return state


def _is_plain_adapted(module: Any) -> bool:
    base = getattr(module, "base_layer", None)
    if not hasattr(module, "lora_A") or getattr(type(base), "forward", None) is not nn.Linear.forward:
        return False  # some routers are linear layers that say more
    plain_dropout = all(isinstance(d, nn.Identity) for d in module.lora_dropout.values())
    return plain_dropout and not any(getattr(module, "use_dora", {}).values())


def _adapted_forward(module: Any, state: FusedLora) -> Any:
    read = _reading([module], state)

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return read(x)[0]

    return forward


def _frozen_forward(module: nn.Linear, state: FusedLora) -> Any:
    def forward(x: Tensor) -> Tensor:
        return _frozen(module, x, state)

    return forward


def _frozen(layer: nn.Linear, x: Tensor, state: FusedLora) -> Tensor:
    weight = state.weight_of(layer)
    if weight.dtype != state.dtype:
        rounded: Tensor = HalfLinear.apply(x, weight, layer.bias, state.dtype)
        return rounded
    return linear(x.to(weight.dtype), weight, None if layer.bias is None else layer.bias.to(weight.dtype))


def _reading(layers: list[Any], state: FusedLora) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """What layers that read the same input make of it; together where all are plain and carry the adapter."""
    plain = all(_is_plain_adapted(layer) for layer in layers)

    def read(x: Tensor) -> tuple[Tensor, ...]:
        if not plain or not all(state.adapter in layer.lora_A for layer in layers):
            if len(layers) > 1:
                return tuple(layer(x) for layer in layers)
            return (_frozen(layers[0].base_layer, x, state),)  # another agent's adapter sits here
        outs = _Adapted.apply(
            x,
            state.dtype,
            [state.weight_of(layer.base_layer) for layer in layers],
            [layer.base_layer.bias for layer in layers],
            [layer.scaling[state.adapter] for layer in layers],
            *(layer.lora_A[state.adapter].weight for layer in layers),
            *(layer.lora_B[state.adapter].weight for layer in layers),
        )
        return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)

    return read


def _norm_forward(module: Any, state: FusedLora) -> Any:
    epsilon = epsilon_of(module) or 0.0

    def forward(x: Tensor) -> Tensor:
        if state.fuses(x) and not module.weight.requires_grad:
            from teamtr.engines.torch.fused_layers import norm

            return norm(x, module.weight, epsilon, state.dtype)
        return rms_norm(x.float(), (x.shape[-1],), module.weight, epsilon).to(state.dtype)

    return forward


def _gated_forward(module: Any, state: FusedLora) -> Any:
    original, read = module.forward, _reading([module.gate_proj, module.up_proj], state)

    def forward(*args: Any, **named: Any) -> Any:
        if named or not state.fuses(args[0]):
            return original(*args, **named)
        (x,) = args
        from teamtr.engines.torch.fused_layers import gated

        return module.down_proj(gated(*read(x)))

    return forward


def _attention_forward(anatomy: Anatomy, state: FusedLora) -> Any:
    module, original = anatomy.module, anatomy.module.forward
    read = _reading([getattr(module, name) for name in PRODUCTS], state)
    frozen = not any(norm.weight.requires_grad for norm in anatomy.norms)

    def forward(*args: Any, **named: Any) -> Any:
        layout = packed_now()
        if layout is None or not frozen or args or not state.fuses(named["hidden_states"]):
            return original(*args, **named)
        from teamtr.engines.torch.fused_layers import turned

        require_plain(named.get("attention_mask"), 0.0, {"sliding_window": anatomy.window})
        query, key, value = (out[0].unflatten(-1, (-1, anatomy.dim)) for out in read(named["hidden_states"]))
        cos, sin = (part[0] for part in named["position_embeddings"])
        of_query, of_key = anatomy.weights
        query = turned(query, cos, sin, of_query, anatomy.epsilon)
        key = turned(key, cos, sin, of_key, anatomy.epsilon)
        attended = layout.use_probes(query, key, value, anatomy.layer, anatomy.scale)
        return module.o_proj(attended.flatten(1)[None]), None

    return forward


def _rotary_forward(original: Any, state: FusedLora) -> Any:
    """Angles are computed as ever; in half precision they are applied in half, as in a model loaded that way. Where
    they are something else than a cosine and a sine (complex numbers), they stay what they are."""

    def forward(x: Tensor, *positions: Any, **named: Any) -> Any:
        angles = original(x, *positions, **named)
        return tuple(part.to(state.dtype) for part in angles) if isinstance(angles, tuple) else angles

    return forward


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Whether it is down(silu(gate(x)) * up(x)), by what it computes."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    width = getattr(gate, "in_features", None)
    if not (callable(gate) and callable(up) and callable(down) and isinstance(width, int)):
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:  # itself and what it reads
        return False
    weight = next(module.parameters())
    x = torch.linspace(-30.0, 50.0, 2 * width, device=weight.device, dtype=weight.dtype).view(2, width)
    with gathered(module):
        theirs, ours = module(x), down(silu(gate(x)) * up(x))
    return isinstance(theirs, Tensor) and torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5 * float(ours.abs().max()))


@torch.no_grad()
def _is_rms_norm(module: Any) -> bool:
    """By what it computes: some norms of that name add one to their weight."""
    weight = getattr(module, "weight", None)
    if (
        not type(module).__name__.endswith("RMSNorm")
        or weight is None
        or weight.ndim != 1
        or epsilon_of(module) is None
    ):
        return False
    x = torch.linspace(-3.0, 5.0, len(weight), device=weight.device).expand(2, -1)
    with gathered(module):
        theirs, ours = module(x), rms_norm(x, (len(weight),), module.weight.float(), epsilon_of(module))
    return torch.allclose(theirs.float(), ours, rtol=1e-5, atol=1e-6)
