"""A frozen base whose layers are spread over the ranks by FSDP2: each holds a part, and all of a layer for a moment.

What lies under adapters is sharded, layer by layer. Adapters, embeddings, norms outside of layers and the output layer
stay whole on every rank: they are small beside the layers, and an output layer may be tied to the embeddings. A pass is
made by all ranks together (``Shards.lockstep``).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import fully_shard


def shard_base(shared: Any) -> None:
    """Of a PEFT model, after ``ranks.join``: every rank calls it with the same weights."""
    adapters = {parameter for name, parameter in shared.named_parameters() if "lora_" in name}
    for layer in shared.get_base_model().get_decoder().layers:
        fully_shard(layer, ignored_params=adapters, reshard_after_forward=True)
