"""A frozen weight in 8 bits: int8 numbers, and for each row of outputs the float32 scale that they are multiples of.

A layer that is kept so has the numbers as its ``weight`` and the scales as a buffer beside it, so that both move with
the model and are counted with it. Nobody computes with int8: ``kept_weight`` gives a layer's weight as it is kept, and
whoever computes casts that in passing, ``to(dtype)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

SCALES = "row_scales"
"""What the buffer of a layer is called."""
LARGEST = 127


class RowScaled(NamedTuple):
    """The weight whose row ``o`` is ``numbers[o] * scales[o]``: that product, in float32, is what it is. It can be used
    where a frozen weight is cast: it has what is asked of a tensor there."""

    numbers: Tensor
    """int8, outputs x inputs."""
    scales: Tensor
    """float32, one for each output."""

    @staticmethod
    def of(weight: Tensor) -> RowScaled:
        """The nearest: a row's largest number becomes 127 or -127. A row of zeros has scale 1. Row by row and number
        by number, so that it is the same bits however often and wherever it is computed."""
        wide = weight.detach().float()
        scales = wide.abs().amax(1) / LARGEST
        scales = torch.where(scales > 0, scales, 1.0)  # also where a row is too small for a scale
        numbers = (wide / scales[:, None]).round_().clamp_(-LARGEST, LARGEST)
        return RowScaled(numbers.to(torch.int8), scales)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Multiplied in float32 and rounded once; on a card by one kernel, without the product in float32 beside it."""
        found = torch.empty_like(self.numbers, dtype=dtype)
        return torch.mul(self.numbers, self.scales[:, None], out=found)

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers.dtype

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()


FrozenWeight = Tensor | RowScaled
"""As it is kept; ``to(dtype)`` is what is computed with."""


def kept_weight(layer: nn.Module) -> FrozenWeight:
    """The weight of a linear layer as it is kept."""
    weight, scales = layer.weight, layer._buffers.get(SCALES)  # asking a module for what it lacks is slow
    assert isinstance(weight, Tensor)
    return weight if scales is None else RowScaled(weight, scales)


def keep_row_scaled(layer: nn.Module, weight: RowScaled) -> None:
    """Let the layer have this weight. Its own forward cannot compute with it any more."""
    own: Any = layer.weight
    own.data = weight.numbers
    layer.register_buffer(SCALES, weight.scales, persistent=False)


def casting_in_passing(layer: Any) -> Callable[[Tensor], Tensor]:
    """A forward for a linear layer that is kept in another dtype than that of what it reads."""
    return lambda x: linear(x, kept_weight(layer).to(x.dtype), layer.bias)


def row_scaled_in(model: nn.Module) -> Iterator[tuple[Tensor, RowScaled]]:
    """The parameters of a model that are kept so, and what they are."""
    for module in model.modules():
        if module._buffers.get(SCALES) is not None:
            found = kept_weight(module)
            assert isinstance(found, RowScaled)
            yield found.numbers, found
