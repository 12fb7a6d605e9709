"""Layers that read the same x as one: query, key and value in one product, gate and up in another.

A pass over few tokens is bound by how many kernels its host starts. In half precision on a card, layers whose weights
lie below each other in memory are one wide layer: one product with x, one with their narrow factors, and as many on the
way back. What they say stands side by side, and ``fused_layers`` reads it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from teamtr.engines.torch.known_layers import is_plain_adapted
from teamtr.engines.torch.row_scaled import FrozenWeight


class Adapters(NamedTuple):
    """Factors of one adapter, as they are trained: A and B of every layer."""

    downs: tuple[Tensor, ...]
    ups: tuple[Tensor, ...]


class Group:
    """Layers that read the same x. ``plain``: each is a linear layer with adapters that we know. ``spread``: processes
    hold parts of them, and their weights are other tensors from pass to pass."""

    def __init__(self, layers: Sequence[Any], *, spread: bool) -> None:
        self.layers = layers
        self.spread = spread
        self.plain = all(map(is_plain_adapted, layers))
        self.bases = [layer.base_layer for layer in layers] if self.plain else []
        self._adapters: dict[str, Adapters] = {}
        self._wholes: dict[tuple[Any, ...], Whole | None] = {}

    def adapters(self, name: str) -> Adapters | None:
        """None where some layer has none of this name. Looked up once: asking modules for their parts is slow."""
        found = self._adapters.get(name)
        if found is None and self.plain and all(name in layer.lora_A for layer in self.layers):
            downs, ups = ([getattr(layer, kind)[name].weight for layer in self.layers] for kind in ("lora_A", "lora_B"))
            found = Adapters(tuple(downs), tuple(ups))
            if not self.spread:
                self._adapters[name] = found
        return found

    def whole(self, adapter: str, dtype: torch.dtype, weight_of: Callable[[Any], FrozenWeight]) -> Whole | None:
        """These layers as one, where they are. Looked for again when their weights come to lie elsewhere."""
        weights = [base.weight for base in self.bases]
        key = (adapter, dtype, *[(weight.data_ptr(), weight.dtype) for weight in weights])
        if key not in self._wholes:
            self._wholes = {held: whole for held, whole in self._wholes.items() if held[2:] == key[2:]}
            self._wholes[key] = self._joined(adapter, dtype, [weight_of(base) for base in self.bases])
        return self._wholes[key]

    def _joined(self, adapter: str, dtype: torch.dtype, weights: Sequence[FrozenWeight]) -> Whole | None:
        tensors = [weight for weight in weights if isinstance(weight, Tensor) and weight.dtype == dtype]
        biases = [base.bias for base in self.bases]
        scales = {layer.scaling[adapter] for layer in self.layers}
        ranks = {len(layer.lora_A[adapter].weight) for layer in self.layers}
        with_bias = {bias is not None for bias in biases}
        if len(tensors) < len(weights) or any(len(found) > 1 for found in (scales, ranks, with_bias)):
            return None
        weight_WH = below_each_other(tensors)
        if weight_WH is None:
            return None
        start = torch.cat(biases).detach().to(dtype) if all(with_bias) else weight_WH.new_empty(1)
        return Whole(weight_WH, start, float(all(with_bias)), scales.pop(), tuple(map(len, tensors)))


class Whole(NamedTuple):
    """Layers as one: their weights below each other. ``start`` times ``beta`` is their bias."""

    weight_WH: Tensor
    start: Tensor
    beta: float
    scale: float
    sizes: tuple[int, ...]


class Factors(NamedTuple):
    """Adapters in the dtype that is computed in: A of all layers, one below the other, and B of each."""

    down_RH: Tensor
    ups: Sequence[Tensor]
    up_Wr: Tensor | None = None
    """B of all, one below the other, where all are of one rank."""
    block_WR: Tensor | None = None
    """The same where each layer's has columns of its own: x A' times its transpose is what all adapters add."""
    whole: Whole | None = None
    """The layers as one, where they are."""


@torch.no_grad()
def round_factors(
    groups: Iterable[tuple[Group, Adapters]], dtype: torch.dtype, whole_of: Callable[[Group], Whole | None]
) -> dict[Group, Factors]:
    """Of all groups at once: hundreds of small kernels would take a card's host longer than a small pass takes the
    card. In memory of their own, since what a pass computed with is needed on the way back."""
    alike: dict[tuple[Any, ...], list[tuple[Group, Adapters]]] = {}
    for group, adapters in groups:
        shape = (*(down.shape for down in adapters.downs), *(up.shape for up in adapters.ups))
        alike.setdefault(shape, []).append((group, adapters))
    weights = [w for same in alike.values() for kind in (0, 1) for _, adapters in same for w in adapters[kind]]
    if not weights:
        return {}
    numbers = [weight.numel() for weight in weights]
    flat = torch.empty(sum(numbers), dtype=dtype, device=weights[0].device)
    parts = [part.view_as(weight) for part, weight in zip(flat.split(numbers), weights, strict=True)]
    torch._foreach_copy_(parts, weights)
    found: dict[Group, Factors] = {}
    at = first = 0
    for same in alike.values():
        downs, ups = same[0][1]
        layers, count = len(downs), len(same)
        of_downs, of_ups = (count * sum(one.numel() for one in ones) for ones in (downs, ups))
        downs_GRH = flat[at : at + of_downs].view(count, -1, downs[0].shape[1]).unbind()
        of_each = parts[first + count * layers : first + 2 * count * layers]
        wholes = [whole_of(group) for group, _ in same]
        joined: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * count
        if any(wholes):
            ups_GWr = flat[at + of_downs : at + of_downs + of_ups].view(count, -1, ups[0].shape[1])
            joined = list(zip(ups_GWr.unbind(), _blocks(ups_GWr, [len(up) for up in ups]).unbind(), strict=True))
        for k, (group, _) in enumerate(same):
            found[group] = Factors(downs_GRH[k], of_each[k * layers : (k + 1) * layers], *joined[k], wholes[k])
        at, first = at + of_downs + of_ups, first + 2 * count * layers
    return found


def _blocks(ups_GWr: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each layer's rows in columns of its own, and zeros beside them."""
    if len(sizes) == 1:
        return ups_GWr
    count, width, rank = ups_GWr.shape
    blocks = ups_GWr.new_zeros(count, width, len(sizes), rank)
    for layer, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        blocks[:, start:end, layer] = ups_GWr[:, start:end]
    return blocks.flatten(2)


def product(x: Tensor, factors: Factors, adapters: Adapters) -> Tensor:
    """x W' + bias + scale * (x A') B' of layers as one, side by side: [N, W], of x [..., H]."""
    out: Tensor = _Product.apply(x, factors, *adapters.downs, *adapters.ups)
    return out


class _Product(torch.autograd.Function):
    """Gradients for x, A and B only. The adapter's part comes first, and the wide product is added to it before it is
    rounded: a product that only adds an adapter's part would read and write all that the layers say once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Factors, *adapters: Tensor) -> Tensor:
        from teamtr.engines.torch.narrow_products import narrow

        down_RH, _, up_Wr, block_WR, whole = factors
        assert whole is not None
        assert up_Wr is not None
        assert block_WR is not None
        weight_WH, start, beta, scale, _ = whole
        flat_NH = x.reshape(-1, x.shape[-1]).to(weight_WH.dtype)
        narrow_NR = narrow(flat_NH, down_RH)
        ctx.save_for_backward(flat_NH, down_RH, narrow_NR, up_Wr)
        ctx.whole, ctx.shape, ctx.x_dtype, ctx.dtype = whole, x.shape, x.dtype, adapters[0].dtype
        return torch.addmm(start, narrow_NR, block_WR.t(), beta=beta, alpha=scale).addmm_(flat_NH, weight_WH.t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NW: Tensor) -> Any:
        from teamtr.engines.torch.narrow_products import across, across_and_along

        flat_NH, down_RH, narrow_NR, up_Wr = ctx.saved_tensors
        weight_WH, _, _, scale, sizes = ctx.whole
        grad_NW = grad_NW.to(flat_NH.dtype)
        of_up_Wr, grad_NR = across_and_along(grad_NW, narrow_NR, up_Wr, scale, sizes)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_NR @ down_RH).addmm_(grad_NW, weight_WH).view(ctx.shape).to(ctx.x_dtype)
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, None, *[None] * (2 * len(sizes))
        of_down_RH = across(flat_NH, grad_NR).to(ctx.dtype)
        return grad_x, None, *of_down_RH.split(up_Wr.shape[1]), *of_up_Wr.to(ctx.dtype).split(sizes)


def below_each_other(tensors: Sequence[Tensor]) -> Tensor | None:
    """These tensors as one, where they lie so in memory."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        alike = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or not tensor.is_contiguous() or tensor.data_ptr() != end:
            return None
        end += tensor.numel() * tensor.element_size()
    return first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
