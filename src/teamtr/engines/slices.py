"""Tensors that are partitioned across processes: the local rows, and the whole tensor.

FSDP2 partitions the rows of a layer's weights across the ranks; such a weight is a ``DTensor``. Other tensors are whole
in every process, and every function accepts them as they are. Functions that assemble a whole tensor are collective:
all ranks must call them.
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
    """The part of the tensor in this process; writing to it writes to the tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(like: Tensor) -> slice | None:
    """The rows of the tensor that are in this process; None if it is whole."""
    if not isinstance(like, DTensor):
        return None
    bounds, rank = _bounds(like), like.device_mesh.get_local_rank()
    return slice(bounds[rank], bounds[rank + 1])


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """The rows of a whole tensor that this process holds of one like ``like``."""
    rows = own_rows(like)
    return tensor if rows is None else tensor[rows]


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Context in which the weights of this module are whole, for calling it outside of a pass through the model."""
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
    """The whole tensor, where every process holds the rows that it holds of ``like``."""
    if not isinstance(like, DTensor):
        return part
    held = DTensor.from_local(
        part.to(own(like).device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return held.full_tensor()


def first_element(like: Tensor) -> int:
    """The place in the whole tensor of the first element in this process."""
    if not isinstance(like, DTensor):
        return 0
    return _bounds(like)[like.device_mesh.get_local_rank()] * _width(like)


def summed(numbers: Tensor) -> Tensor:
    """Sums integers over all processes, modulo 2^64."""
    total = numbers.cpu()
    dist.all_reduce(total)
    return total


def square_sum(tensors: Sequence[Tensor]) -> float:
    """The sum of squares of all elements of partitioned tensors, rows first: an order that does not depend on the
    number of processes."""
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
    """Elements per row."""
    return int(np.prod(tensor.shape[1:], dtype=np.int64))


def _bounds(tensor: DTensor) -> list[int]:
    """The first row of each process, and the end. All have the same number of rows, except that the last ones have
    fewer or none."""
    world = tensor.device_mesh.size()
    each = -(-tensor.shape[0] // world)
    return [min(rank * each, tensor.shape[0]) for rank in range(world + 1)]
