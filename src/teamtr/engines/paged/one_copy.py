"""One copy of a frozen base in memory: the paged sampler computes with the learner's own tensors.

This requires adapters that are applied row by row, so that nothing is merged into the base, and a learner that keeps
weights in the sampler's precision, or in 8 bits, which both cast on the fly. Layers that the sampler fuses are
concatenated along rows in one tensor, and the learner's weights are slices of it: both read the same memory, and
neither writes to it. The sampler's copy of the adapters is in the same tensor, below the weights, except for weights in
8 bits (``row_adapters``). Norms and biases are copied: they are small, and the learner keeps them in float32.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from teamtr.engines.paged.fused_linears import siblings_in
from teamtr.engines.slices import is_spread
from teamtr.engines.torch.row_scaled import (
    RowScaled,
    casting_in_passing,
    keep_row_scaled,
    kept_weight,
    row_scaled_in,
)

SMALL = 0.02
"""Standard deviation of untrained weights."""


class NotShared(Exception):
    """A model cannot be built around another one's weights; the message says why."""


def plain_name(name: str) -> str:
    """The name of a weight without adapters."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def shared_weights(causal_lm: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The frozen weights that a sampler in this dtype can read in place, by their names without adapters. Layers that
    are fused are included together or not at all."""

    def fits(weight: Tensor) -> bool:
        here = weight.device.type == device.type and not is_spread(weight)
        return here and weight.dtype in (dtype, torch.int8) and not weight.requires_grad and weight.ndim == 2

    apart: set[Tensor] = set()
    for _, _, layers in siblings_in(causal_lm):
        weights = [layer.weight for layer in layers]
        if not all(map(fits, weights)) or len({weight.dtype for weight in weights}) > 1:
            apart.update(weights)
    return {
        plain_name(name): weight
        for name, weight in causal_lm.named_parameters()
        if fits(weight) and weight not in apart and ".lora_" not in name
    }


def largest_cast(causal_lm: nn.Module, shared: Mapping[str, Tensor]) -> int:
    """Number of weights in the largest product that the sampler casts on the fly: that of a layer in 8 bits, or of
    layers that are fused; 0 if it casts none."""
    small = {weight for weight in shared.values() if weight.dtype == torch.int8}
    joined = [{layer.weight for layer in layers} for _, _, layers in siblings_in(causal_lm)]
    groups = [*({weight} for weight in small), *(group & small for group in joined)]
    return max((sum(weight.numel() for weight in group) for group in groups), default=0)


@torch.no_grad()
def lay_below_each_other(causal_lm: nn.Module, shared: Mapping[str, Tensor]) -> None:
    """Make the layers that the sampler fuses slices of one tensor, one group after the other, so that little is held
    twice at any time. Their old memory is returned to the device: none of the blocks is large enough for the next
    group."""
    among = set(shared.values())
    for _, _, layers in siblings_in(causal_lm):
        if layers[0].weight in among:
            sizes = [len(layer.weight) for layer in layers]
            for layer, part in zip(layers, torch.cat([layer.weight for layer in layers]).split(sizes), strict=True):
                layer.weight.data = part
            scales = [found.scales for layer in layers if isinstance(found := kept_weight(layer), RowScaled)]
            if scales:
                for layer, part in zip(layers, torch.cat(scales).split(sizes), strict=True):
                    keep_row_scaled(layer, RowScaled(layer.weight.data, part))
    if any(weight.is_cuda for weight in among):
        torch.cuda.empty_cache()


@torch.no_grad()
def made_around(causal_lm: Any, dtype: torch.dtype, device: torch.device, shared: Mapping[str, Tensor]) -> Any:
    """A plain model of this architecture that allocates everything but these weights. In their place are stand-ins that
    take almost no memory and are as small as weights of a new model: inspecting a model enlarges its numbers, which
    float16 can represent for a new model, but not for every trained one. ``put_in_place`` inserts the weights
    themselves."""
    with torch.device("meta"):
        model = type(causal_lm)._from_config(copy.deepcopy(causal_lm.config), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for name, bare in model.named_parameters():
        if name in shared and shared[name].shape != bare.shape:
            raise NotShared(f"{name} has another shape in a new model")
        if name in shared:
            tensor = _stand_in(bare.shape, generator).to(device=device, dtype=dtype).as_strided(bare.shape, (1, 1))
        elif bare.ndim == 1:
            tensor = torch.full(bare.shape, 0.0 if name.endswith("bias") else 1.0, dtype=bare.dtype, device=device)
        else:
            tensor = torch.randn(bare.shape, generator=generator).mul_(SMALL).to(device=device, dtype=bare.dtype)
        made[id(bare)] = nn.Parameter(tensor, requires_grad=False)
    theirs = dict(causal_lm.named_modules())
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = made[id(parameter)]
        computed = {**module._buffers, **{k: v for k, v in vars(module).items() if isinstance(v, Tensor)}}
        for key, bare in computed.items():
            if bare is None:
                continue
            known = getattr(theirs.get(name), key, None)
            if not isinstance(known, Tensor) or known.shape != bare.shape:
                raise NotShared(f"{name}.{key} is computed when a model is made, and differs here")
            setattr(module, key, known.to(device=device, dtype=bare.dtype, copy=True))
    return model


def _stand_in(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """The numbers of a matrix in which each row is the previous one shifted by one place: rows + columns - 1 of
    them."""
    return torch.randn(sum(shape) - 1, generator=generator).mul_(SMALL)


def put_in_place(model: nn.Module, causal_lm: nn.Module, shared: Mapping[str, Tensor]) -> None:
    scaled = dict(row_scaled_in(causal_lm))
    for name, weight in shared.items():
        if weight in scaled:
            layer = model.get_submodule(name.removesuffix(".weight"))
            keep_row_scaled(layer, RowScaled(weight.detach(), scaled[weight].scales))
            layer.forward = casting_in_passing(layer)
        else:
            model.get_parameter(name).data = weight.detach()
