"""Small matrix products on a CPU without oneDNN's preparation cost.

On ARM processors torch passes float32 products to oneDNN, which prepares each anew: half a millisecond, where the
product of a tiny model takes a tenth of one. OpenBLAS, which is used otherwise, gives the same bits as long as it adds
up a row in one go (docs/performance.md, "The first minute"). Where torch does not use oneDNN, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

WIDEST = 512
"""Most numbers that a product adds up for both libraries to add them in the same order."""


def are_small(model: nn.Module) -> bool:
    """Whether the products of this model are faster without oneDNN. With several threads they are not, because
    OpenBLAS's threads wait for each other."""
    weights = [weight for weight in model.parameters() if weight.ndim == 2]
    on_cpu = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    return on_cpu and torch.get_num_threads() == 1 and max((w.shape[1] for w in weights), default=0) <= WIDEST


@contextmanager
def without_onednn(without: bool) -> Iterator[None]:
    """Context in which oneDNN is off, if ``without``."""
    onednn: Any = torch.backends.mkldnn  # typed as if it held properties, but it holds their values
    before = onednn.enabled
    onednn.enabled = before and not without
    try:
        yield
    finally:
        onednn.enabled = before
