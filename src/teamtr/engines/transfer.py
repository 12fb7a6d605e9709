"""Copies arrays to a device, and tensors back to host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on the device. The copy to a GPU is asynchronous, so that the next work can be prepared
    meanwhile."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def off_the_card(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in host memory. Those on a GPU are copied once each, even under several names, so that tied
    weights stay tied."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in copies:
            copies[place] = tensor.cpu()
        return copies[place]

    return {name: copied(tensor) for name, tensor in tensors.items()}
