"""Products of small matrices on a CPU, without what preparing oneDNN's takes.

On ARM processors torch hands products in float32 to oneDNN, which prepares each anew: half a millisecond, where the
product of a tiny model takes a tenth of one. OpenBLAS, which is asked otherwise, gives the same bits as long as it adds
up a row in one go (docs/performance.md, "The first minute"). Where torch does not ask oneDNN, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

WIDEST = 512
"""Numbers that a product adds up at most, for both to add them in the same order."""


def are_small(model: nn.Module) -> bool:
    """Whether the products of this model are better off without oneDNN. With several threads they are not: OpenBLAS'
    wait for each other."""
    weights = [weight for weight in model.parameters() if weight.ndim == 2]
    on_cpu = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    return on_cpu and torch.get_num_threads() == 1 and max((w.shape[1] for w in weights), default=0) <= WIDEST


@contextmanager
def without_onednn(without: bool) -> Iterator[None]:
    """Within, and where asked for."""
    onednn: Any = torch.backends.mkldnn  # it is said to hold properties, and holds their values
    before = onednn.enabled
    onednn.enabled = before and not without
    try:
        yield
    finally:
        onednn.enabled = before
