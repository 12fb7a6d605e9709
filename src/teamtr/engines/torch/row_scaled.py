"""A frozen weight in 8 bits: int8 numbers, and one float32 scale per output row.

Such a layer has the numbers as its ``weight`` and the scales as a buffer beside it, so that both move with the model
and are counted with it. Nothing computes with int8: ``kept_weight`` returns a layer's weight as stored, and callers
cast it on the fly with ``to(dtype)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

SCALES = "row_scales"
"""The name of a layer's buffer."""
LARGEST = 127


class RowScaled(NamedTuple):
    """The weight whose row ``o`` is ``numbers[o] * scales[o]``, a product in float32. It has the tensor methods that
    are used where a frozen weight is cast, and can replace one there."""

    numbers: Tensor
    """int8, outputs x inputs."""
    scales: Tensor
    """float32, one for each output."""

    @staticmethod
    def of(weight: Tensor) -> RowScaled:
        """Rounds a weight to the nearest numbers: a row's largest becomes 127 or -127. A row of zeros has scale 1. Rows
        and numbers are rounded independently, so that the bits are the same however often and wherever it is
        computed."""
        wide = weight.detach().float()
        scales = wide.abs().amax(1) / LARGEST
        scales = torch.where(scales > 0, scales, 1.0)  # also if a row is too small for a scale
        numbers = (wide / scales[:, None]).round_().clamp_(-LARGEST, LARGEST)
        return RowScaled(numbers.to(torch.int8), scales)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Multiplies in float32 and rounds once; on a GPU in one kernel, without the float32 product in memory."""
        found = torch.empty_like(self.numbers, dtype=dtype)
        return torch.mul(self.numbers, self.scales[:, None], out=found)

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers.dtype

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()


FrozenWeight = Tensor | RowScaled
"""A frozen weight as stored; ``to(dtype)`` gives what is computed with."""


def kept_weight(layer: nn.Module) -> FrozenWeight:
    """The weight of a linear layer as stored."""
    weight, scales = layer.weight, layer._buffers.get(SCALES)  # looking up a missing attribute of a module is slow
    assert isinstance(weight, Tensor)
    return weight if scales is None else RowScaled(weight, scales)


def keep_row_scaled(layer: nn.Module, weight: RowScaled) -> None:
    """Stores this weight in the layer, whose own forward cannot compute with it any more."""
    own: Any = layer.weight
    own.data = weight.numbers
    layer.register_buffer(SCALES, weight.scales, persistent=False)


def casting_in_passing(layer: Any) -> Callable[[Tensor], Tensor]:
    """A forward for a linear layer that is stored in another dtype than that of its input."""
    return lambda x: linear(x, kept_weight(layer).to(x.dtype), layer.bias)


def row_scaled_in(model: nn.Module) -> Iterator[tuple[Tensor, RowScaled]]:
    """The parameters of a model that are stored in 8 bits, each with its ``RowScaled``."""
    for module in model.modules():
        if module._buffers.get(SCALES) is not None:
            found = kept_weight(module)
            assert isinstance(found, RowScaled)
            yield found.numbers, found
