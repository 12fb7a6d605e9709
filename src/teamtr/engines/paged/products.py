"""Chooses who computes a product of the sampling copy: our own kernel in steps of few rows, or torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from teamtr.engines.torch.known_layers import computed_by_kernels
from teamtr.engines.torch.row_scaled import FrozenWeight, kept_weight

if TYPE_CHECKING:  # its module needs triton
    from teamtr.engines.paged.product_kernel import Tiles

ALIGNED = 16
"""Bytes that the address of a tensor must be a multiple of, to be read in tiles."""
FEWEST_CORES = 100
"""Multiprocessors of a card. An H20 has 78, and computes too slowly for tiles that are partly empty."""


def product(x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    if isinstance(weight, Tensor) and (tiles := tiles_of(x, weight)) is not None:
        from teamtr.engines.paged import product_kernel

        return product_kernel.product(_rows(x), weight, bias, tiles).view(*x.shape[:-1], -1)
    return linear(x, weight.to(x.dtype), bias)


def gated_product(x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> Tensor | None:
    """silu(gate) * up, for a weight with gate's outputs above as many of up's; None if torch should compute the
    product."""
    if isinstance(weight, Tensor) and (tiles := tiles_of(x, weight, gated=True)) is not None:
        from teamtr.engines.paged import product_kernel

        return product_kernel.gated_product(_rows(x), weight, bias, tiles).view(*x.shape[:-1], -1)
    return None


def tiles_of(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tiles | None:
    """How our kernel cuts this product; None if torch computes it."""
    if not computed_by_kernels(x) or torch.compiler.is_compiling():
        return None
    if weight.dtype != x.dtype or not weight.is_contiguous() or (cores := cores_of(x.device)) is None:
        return None
    if x.data_ptr() % ALIGNED or weight.data_ptr() % ALIGNED:
        return None
    from teamtr.engines.paged import product_kernel

    cut, x_NI = product_kernel.gated_tiles if gated else product_kernel.plain_tiles, _rows(x)
    outputs, inputs = weight.shape
    tiles = cut(len(x_NI), outputs, inputs, cores)
    return tiles if tiles is not None and product_kernel.has_room(x_NI) else None


def compute_by_product(layer: Any) -> None:
    """Let ``product`` choose for this linear layer, too."""
    layer.forward = lambda x: product(x, kept_weight(layer), layer.bias)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@cache
def cores_of(device: torch.device) -> int | None:
    """The multiprocessors of a card that our kernel is cut for; None for other devices."""
    from teamtr.engines.torch.early_launch import launches_early

    if not launches_early(device):
        return None
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    return cores if cores >= FEWEST_CORES else None
