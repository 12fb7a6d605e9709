"""Models whose layers are sharded over the ranks with FSDP2.

Each rank holds a part of every layer, and a whole layer only during its forward and backward pass. A base under
adapters is sharded and frozen. A model that is trained as a whole is sharded with its gradients and optimizer moments.
Adapters, embeddings, norms outside of layers and the output layer stay whole on every rank: they are small compared
with the layers, and an output layer may be tied to the embeddings. If weights can be read from their files one by one
(``torch.outline``), no rank ever holds a whole model. All ranks run each pass together (``Shards.lockstep``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from teamtr.engines.cluster.ranks import Ranks, Turn
from teamtr.engines.torch.outline import Unread
from teamtr.engines.torch.spread_linears import round_again_on_the_way_back


class LayerSpread:
    """Shards the layers of models over all ranks, after ``ranks.join``; every rank makes the same calls. ``device``:
    where this rank computes; its type determines how parts are sent between ranks."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.turn = ranks.turn
        self.device = device
        self.mesh = init_device_mesh(device.type, (ranks.world,))

    def spread(self, model: Any, unread: Unread | None = None) -> None:
        """Shard a transformers or PEFT model. It has the same weights on every rank, or ``unread`` ones, of which this
        rank then reads its part alone. Layers move to the device one by one, then the tensors that stay whole."""
        adapters = {parameter for name, parameter in model.named_parameters() if "lora_" in name}
        causal_lm = model.get_base_model() if adapters else model
        layers = causal_lm.get_decoder().layers
        if unread is not None:
            unread.forget_layers(layers)
        for layer in layers:
            round_again_on_the_way_back(layer)
            fully_shard(layer, mesh=self.mesh, ignored_params=adapters, reshard_after_forward=True)
            layer._apply(lambda t: torch.empty_like(t, device=self.device) if t.is_meta else t)
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
            layer.set_custom_reduce_scatter(OrderedSum(self.turn))
        if unread is not None:
            unread.read(self.device)
        model.to(self.device)


class OrderedSum:
    """Sums one layer's gradients over the ranks in order, on top of those of earlier passes, so that the result does
    not depend on the number of ranks. A rank without rows in a pass adds nothing, not even zeros. If the loss is
    scaled, each rank checks its own gradients for overflow, and the sum is unscaled. FSDP2 calls this instead of its
    usual reduce-scatter."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if self.turn.scale > 1.0:
            self.turn.looked_at.append(torch.isfinite(input_tensor).all())
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        total = self.turn.sums.get(self)
        for rank in self.turn.ranks:
            own = parts[rank] if self.turn.scale == 1.0 else parts[rank] / self.turn.scale
            total = own if total is None else total + own
        assert total is not None, "somebody has rows in every pass"
        output_tensor.copy_(total)
        self.turn.sums[self] = output_tensor
