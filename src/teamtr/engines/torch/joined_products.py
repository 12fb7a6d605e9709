"""Layers that read the same x as one: query, key and value in one product, gate and up in another.

A pass over few tokens is bound by kernel launches. In half precision on a GPU, layers whose weights are consecutive in
memory are computed as one wide layer: one product with their weights and one with each of their stacked factors, and
likewise in the backward pass. Their outputs are side by side, and ``fused_layers`` reads them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from teamtr.engines.torch.known_layers import is_plain_adapted
from teamtr.engines.torch.row_scaled import FrozenWeight


class Adapters(NamedTuple):
    """The trained factors of one adapter: A and B of every layer."""

    downs: tuple[Tensor, ...]
    ups: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    """Outputs of each layer."""
    rank: int
    """The rank of all layers; 0 if they differ."""

    @staticmethod
    def of(downs: Sequence[Tensor], ups: Sequence[Tensor]) -> Adapters:
        ranks = {len(down) for down in downs}
        return Adapters(tuple(downs), tuple(ups), tuple(map(len, ups)), ranks.pop() if len(ranks) == 1 else 0)


class Group:
    """Layers that read the same x. ``plain``: each is a linear layer with adapters of a known kind. ``spread``: they
    are partitioned across processes, and their weights are different tensors from pass to pass."""

    def __init__(self, layers: Sequence[Any], *, spread: bool) -> None:
        self.layers = layers
        self.spread = spread
        self.plain = all(map(is_plain_adapted, layers))
        self.bases = [layer.base_layer for layer in layers] if self.plain else []
        self._adapters: dict[str, Adapters] = {}
        self._lie: list[tuple[int, torch.dtype]] = []
        self._wholes: dict[tuple[str, torch.dtype], Whole | None] = {}

    def adapters(self, name: str) -> Adapters | None:
        """The factors of this adapter, or None if some layer does not have it. Cached, because looking up submodules is
        slow."""
        found = self._adapters.get(name)
        if found is None and self.plain and all(name in layer.lora_A for layer in self.layers):
            downs, ups = ([getattr(layer, kind)[name].weight for layer in self.layers] for kind in ("lora_A", "lora_B"))
            found = Adapters.of(downs, ups)
            if not self.spread:
                self._adapters[name] = found
        return found

    def whole(self, adapter: str, dtype: torch.dtype, weight_of: Callable[[Any], FrozenWeight]) -> Whole | None:
        """These layers as one, or None if that is not possible. Built again when their weights have moved in memory."""
        weights = [base.weight for base in self.bases]
        lie, key = [(weight.data_ptr(), weight.dtype) for weight in weights], (adapter, dtype)
        if lie != self._lie:
            self.let_go()
            self._lie = lie
        if key not in self._wholes:
            self._wholes[key] = self._joined(adapter, dtype, [weight_of(base) for base in self.bases])
        return self._wholes[key]

    def let_go(self) -> None:
        self._wholes.clear()

    def _joined(self, adapter: str, dtype: torch.dtype, weights: Sequence[FrozenWeight]) -> Whole | None:
        tensors = [weight for weight in weights if isinstance(weight, Tensor) and weight.dtype == dtype]
        biases = [base.bias for base in self.bases]
        scales, with_bias = {layer.scaling[adapter] for layer in self.layers}, {bias is not None for bias in biases}
        if len(tensors) < len(weights) or len(scales) > 1 or len(with_bias) > 1:
            return None
        weight_WH = below_each_other(tensors)
        if weight_WH is None:
            return None
        start = torch.cat(biases).detach().to(dtype) if all(with_bias) else weight_WH.new_empty(1)
        return Whole(weight_WH, weight_WH.t(), start, float(all(with_bias)), scales.pop())


class Whole(NamedTuple):
    """Layers as one: their weights stacked. ``start`` times ``beta`` is their bias."""

    weight_WH: Tensor
    weight_HW: Tensor
    start: Tensor
    beta: float
    scale: float


class Factors(NamedTuple):
    """An adapter in the compute dtype: A of all layers, stacked, and B of each."""

    down_RH: Tensor
    ups: Sequence[Tensor]
    up_Wr: Tensor | None = None
    """B of all layers, stacked."""
    block_RW: Tensor | None = None
    """A block matrix with B' of each layer in its own rows and columns: x A' times it is what the adapter adds to all
    layers."""
    whole: Whole | None = None
    """The layers as one, where possible."""


@torch.no_grad()
def round_factors(
    groups: Iterable[tuple[Group, Adapters]], dtype: torch.dtype, whole_of: Callable[[Group], Whole | None]
) -> dict[Group, Factors]:
    """Rounds the factors of all groups at once whose layers have one rank: launching hundreds of small kernels would
    take longer than a small pass takes the GPU. The results have new memory, since the backward pass needs what the
    forward pass computed with."""
    alike: dict[tuple[Any, ...], _Alike] = {}
    for group, adapters in groups:
        if adapters.rank:
            shape = (adapters.sizes, adapters.rank, adapters.downs[0].shape[1])
            alike.setdefault(shape, _Alike(*shape, [], [])).add(group, adapters)
    if not alike:
        return {}
    numbers = [same.numbers for same in alike.values()]
    device = next(iter(alike.values())).adapters[0].downs[0].device
    flat = torch.empty(sum(numbers), dtype=dtype, device=device)
    parts = [same.parts(own) for same, own in zip(alike.values(), flat.split(numbers), strict=True)]
    torch._foreach_copy_(
        [part for one in parts for part in one.single], [weight for same in alike.values() for weight in same.weights]
    )
    return {
        group: factors
        for same, one in zip(alike.values(), parts, strict=True)
        for group, factors in zip(same.groups, same.factors(one, list(map(whole_of, same.groups))), strict=True)
    }


class _Parts(NamedTuple):
    """Memory for groups of the same shapes: A of all, B of all, and each factor by itself."""

    downs_GRH: Tensor
    ups_GWr: Tensor
    each: list[tuple[Tensor, ...]]
    """The B factors, layer by layer."""
    single: list[Tensor]


class _Alike(NamedTuple):
    """Groups whose layers have the same shapes."""

    sizes: tuple[int, ...]
    rank: int
    width: int
    groups: list[Group]
    adapters: list[Adapters]

    def add(self, group: Group, adapters: Adapters) -> None:
        self.groups.append(group)
        self.adapters.append(adapters)

    @property
    def numbers(self) -> int:
        return len(self.groups) * self.rank * (len(self.sizes) * self.width + sum(self.sizes))

    @property
    def weights(self) -> list[Tensor]:
        downs = [down for one in self.adapters for down in one.downs]
        return downs + [one.ups[layer] for layer in range(len(self.sizes)) for one in self.adapters]

    def parts(self, flat: Tensor) -> _Parts:
        count, layers = len(self.groups), len(self.sizes)
        downs, ups = flat.split([count * layers * self.rank * self.width, count * sum(self.sizes) * self.rank])
        ups_GWr = ups.view(count, -1, self.rank)
        each = [of_layer.unbind() for of_layer in ups_GWr.split(self.sizes, 1)]
        single = [*downs.view(count * layers, self.rank, self.width).unbind(), *chain(*each)]
        return _Parts(downs.view(count, layers * self.rank, self.width), ups_GWr, each, single)

    def factors(self, parts: _Parts, wholes: Sequence[Whole | None]) -> Iterator[Factors]:
        """The factors of each group, as views that are filled when they are rounded."""
        blocks: Iterable[Tensor | None] = [None] * len(wholes)
        if any(wholes):
            blocks = _blocks(parts.ups_GWr, self.sizes).mT.unbind()
        ups = zip(*parts.each, strict=True)
        views = zip(parts.downs_GRH.unbind(), ups, parts.ups_GWr.unbind(), blocks, wholes, strict=True)
        return (Factors(*view) for view in views)


def _blocks(ups_GWr: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each layer's rows in columns of its own, with zeros elsewhere."""
    if len(sizes) == 1:
        return ups_GWr
    count, width, rank = ups_GWr.shape
    blocks = ups_GWr.new_zeros(count, width, len(sizes), rank)
    for layer, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        blocks[:, start:end, layer] = ups_GWr[:, start:end]
    return blocks.flatten(2)


def product(x: Tensor, factors: Factors, adapters: Adapters) -> Tensor:
    """x W' + bias + scale * (x A') B' of layers as one, outputs side by side: [N, W], for x of [..., H]."""
    out: Tensor = _Product.apply(x, factors, adapters.sizes, *adapters.downs, *adapters.ups)
    return out


class _Product(torch.autograd.Function):
    """Gradients for x, A and B only. The adapter's part is computed first, and the wide product is added to it before
    rounding: a product that only adds an adapter's part would read and write the whole output once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Factors, sizes: tuple[int, ...], *adapters: Tensor) -> Tensor:
        from teamtr.engines.torch.narrow_products import narrow

        down_RH, _, up_Wr, block_RW, whole = factors
        assert whole is not None
        assert up_Wr is not None
        assert block_RW is not None
        flat_NH = x.reshape(-1, x.shape[-1]).to(down_RH.dtype)
        narrow_NR = narrow(flat_NH, down_RH)
        ctx.save_for_backward(flat_NH, down_RH, narrow_NR, up_Wr)
        ctx.whole, ctx.sizes, ctx.shape, ctx.x_dtype, ctx.dtype = whole, sizes, x.shape, x.dtype, adapters[0].dtype
        out_NW = torch.addmm(whole.start, narrow_NR, block_RW, beta=whole.beta, alpha=whole.scale)
        return out_NW.addmm_(flat_NH, whole.weight_HW)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NW: Tensor) -> Any:
        from teamtr.engines.torch.narrow_products import across, across_and_along

        flat_NH, down_RH, narrow_NR, up_Wr = ctx.saved_tensors
        grad_NW = grad_NW.to(flat_NH.dtype)
        of_up_Wr, grad_NR = across_and_along(grad_NW, narrow_NR, up_Wr, ctx.whole.scale, ctx.sizes)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_NR @ down_RH).addmm_(grad_NW, ctx.whole.weight_WH).view(ctx.shape).to(ctx.x_dtype)
        if not any(ctx.needs_input_grad[3:]):
            return grad_x, None, None, *[None] * (2 * len(ctx.sizes))
        of_down_RH = across(flat_NH, grad_NR).to(ctx.dtype)
        return grad_x, None, None, *of_down_RH.split(up_Wr.shape[1]), *of_up_Wr.to(ctx.dtype).split(ctx.sizes)


def below_each_other(tensors: Sequence[Tensor]) -> Tensor | None:
    """These tensors as one, if they are consecutive in memory; otherwise None."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        alike = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or not tensor.is_contiguous() or tensor.data_ptr() != end:
            return None
        end += tensor.numel() * tensor.element_size()
    return first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
