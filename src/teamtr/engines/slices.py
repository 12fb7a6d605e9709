"""Tensors that several processes hold in parts: the rows that are here, and all of them together.

FSDP2 spreads the rows of a layer's weights over the ranks; such a weight is a ``DTensor``. Whatever is not spread is
here as a whole, and every function takes it as it is. What makes something whole is asked for by all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_spread(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def own(tensor: Tensor) -> Tensor:
    """What of it is in this process; writing there writes to the tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(like: Tensor) -> slice | None:
    """The rows of it that are in this process; None where it is here as a whole."""
    if not isinstance(like, DTensor):
        return None
    bounds, rank = _bounds(like), like.device_mesh.get_local_rank()
    return slice(bounds[rank], bounds[rank + 1])


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, the rows that this process holds of one like it."""
    rows = own_rows(like)
    return tensor if rows is None else tensor[rows]


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within, the weights of this module are whole: for asking it something outside of a pass through the model."""
    held = [(part, name, p) for part in module.modules() for name, p in part._parameters.items()]
    spread = [(part, name, p) for part, name, p in held if p is not None and is_spread(p)]
    for part, name, parameter in spread:
        part._parameters[name] = nn.Parameter(whole(parameter.detach()), requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for part, name, parameter in spread:
            part._parameters[name] = parameter


def joined(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor, of which every process holds the rows that it holds of this one."""
    if not isinstance(like, DTensor):
        return part
    held = DTensor.from_local(
        part.to(own(like).device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return held.full_tensor()


def first_element(like: Tensor) -> int:
    """The place in the whole tensor of the first element that is here."""
    if not isinstance(like, DTensor):
        return 0
    return _bounds(like)[like.device_mesh.get_local_rank()] * _width(like)


def summed(numbers: Tensor) -> Tensor:
    """Integers of all processes, added modulo 2^64."""
    total = numbers.cpu()
    dist.all_reduce(total)
    return total


def square_sum(tensors: Sequence[Tensor]) -> float:
    """Of all elements of spread tensors, in an order that does not depend on the number of processes: rows first."""
    spread = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not spread:
        return 0.0
    here = torch.cat([own(t).double().square().reshape(-1, _width(t)).sum(1) for t in spread]).cpu()
    rows_TW = np.array([[end - start for start, end in pairwise(_bounds(t))] for t in spread])
    sent = torch.zeros(int(rows_TW.sum(0).max()), dtype=torch.float64)
    sent[: len(here)] = here
    got = [torch.empty_like(sent) for _ in range(rows_TW.shape[1])]
    dist.all_gather(got, sent)
    pieces = [part[: rows_T.sum()].split(rows_T.tolist()) for part, rows_T in zip(got, rows_TW.T, strict=True)]
    return float(torch.cat([piece for by_rank in zip(*pieces, strict=True) for piece in by_rank]).sum())


def _width(tensor: Tensor) -> int:
    """Elements of a row."""
    return int(np.prod(tensor.shape[1:], dtype=np.int64))


def _bounds(tensor: DTensor) -> list[int]:
    """Where each process' rows begin, and the end: all have as many, the last ones fewer or none."""
    world = tensor.device_mesh.size()
    each = -(-tensor.shape[0] // world)
    return [min(rank * each, tensor.shape[0]) for rank in range(world + 1)]
