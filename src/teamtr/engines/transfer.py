"""Arrays on their way to a device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on the device; a GPU is not waited for, so that the next work can be prepared meanwhile."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
