"""Models whose layers are spread over the ranks by FSDP2: each holds a part, and all of a layer for a moment.

A base under adapters is spread and frozen; a model that is trained as a whole is spread with its gradients and moments.
Adapters, embeddings, norms outside of layers and the output layer stay whole on every rank: they are small beside the
layers, and an output layer may be tied to the embeddings. A pass is made by all ranks together (``Shards.lockstep``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from teamtr.engines.cluster.ranks import Turn


def shard_layers(model: Any, turn: Turn) -> None:
    """Of a model of transformers or a PEFT model, after ``ranks.join``: every rank calls it with the same weights."""
    adapters = {parameter for name, parameter in model.named_parameters() if "lora_" in name}
    causal_lm = model.get_base_model() if adapters else model
    for layer in causal_lm.get_decoder().layers:
        fully_shard(layer, ignored_params=adapters, reshard_after_forward=True)
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_custom_reduce_scatter(OrderedSum(turn))


class OrderedSum:
    """Adds up one layer's gradients of all ranks, in their order, after those of the passes before: what comes out does
    not depend on how many ranks there are. A rank that passes idly adds nothing, not even zeros. FSDP2 calls it instead
    of the usual reduce-scatter."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        total = self.turn.sums.get(self)
        for rank in self.turn.ranks:
            total = parts[rank] if total is None else total + parts[rank]
        assert total is not None, "somebody has rows in every pass"
        output_tensor.copy_(total)
        self.turn.sums[self] = output_tensor
