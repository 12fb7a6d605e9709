"""Chooses who computes a product of the sampling copy: our own kernel in steps of few rows, or torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from teamtr.engines.torch.known_layers import computed_by_kernels
from teamtr.engines.torch.row_scaled import FrozenWeight, kept_weight


def product(x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    if isinstance(weight, Tensor) and (cores := _cores(x, weight)) is not None:
        from teamtr.engines.paged import product_kernel

        outputs, inputs = weight.shape
        x_NI = x.reshape(-1, inputs)
        tiles = product_kernel.plain_tiles(len(x_NI), outputs, inputs, cores)
        if tiles is not None and product_kernel.has_room(x_NI):
            return product_kernel.product(x_NI, weight, bias, tiles).view(*x.shape[:-1], -1)
    return linear(x, weight.to(x.dtype), bias)


def gated_product(x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> Tensor | None:
    """silu(gate) * up, for a weight with gate's outputs above as many of up's; None if torch should compute the
    product."""
    if not isinstance(weight, Tensor) or (cores := _cores(x, weight)) is None:
        return None
    from teamtr.engines.paged import product_kernel

    outputs, inputs = weight.shape
    x_NI = x.reshape(-1, inputs)
    tiles = product_kernel.gated_tiles(len(x_NI), outputs, inputs, cores)
    if tiles is None or not product_kernel.has_room(x_NI):
        return None
    return product_kernel.gated_product(x_NI, weight, bias, tiles).view(*x.shape[:-1], -1)


def compute_by_product(layer: Any) -> None:
    """Let ``product`` choose for this linear layer, too."""
    layer.forward = lambda x: product(x, kept_weight(layer), layer.bias)


def _cores(x: Tensor, weight: Tensor) -> int | None:
    """The multiprocessors of a card on which our kernel can compute this product; None on other devices."""
    if not computed_by_kernels(x) or torch.compiler.is_compiling():
        return None
    if weight.dtype != x.dtype or not weight.is_contiguous():
        return None
    return _cores_of(x.device)


@cache
def _cores_of(device: torch.device) -> int | None:
    from teamtr.engines.torch.early_launch import launches_early

    if not launches_early(device):
        return None
    return torch.cuda.get_device_properties(device).multi_processor_count
