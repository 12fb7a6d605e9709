"""Stores a frozen base below adapters in half precision or 8 bits: linear layers, the embedding and the output layer.

Computation in another dtype casts a layer on the fly, forward and backward. A cast reads and writes as many bytes as
the weight has, once for all rows of a pass; a cached copy would take as much memory as was saved. Norms and biases stay
float32, because they are few. In 8 bits (``row_scaled``) only the linear layers are stored; the embedding and the
output layer, where rounding costs most, are float16 then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from teamtr.engines.torch.fused_lora import FusedLora
from teamtr.engines.torch.row_scaled import RowScaled, casting_in_passing, keep_row_scaled
from teamtr.errors import UserError

ROUNDED = {"fp16": torch.float16, "int8": torch.int8}
"""Values of ``learner.base`` that round the base."""


@torch.no_grad()
def keep_short(causal_lm: Any, fused: FusedLora, dtype: torch.dtype, *, rounded: bool) -> None:
    """Stores the frozen weights in this dtype. Without ``rounded``, only those that lose nothing by it: cast back to
    float32 they are what they were, and so is everything computed with them. With it, all of them: the base is then the
    rounded one, for scoring, training and sampling alike. int8 is always ``rounded``."""
    layers: list[Any] = list(fused.linears)
    head: Any = causal_lm.get_output_embeddings()
    if dtype == torch.int8:
        _require_linears_alone(causal_lm, fused)
        _keep_in_8_bits([layer for layer in layers if layer is not head])  # in some models it is among them
        dtype = torch.float16
    words: Any = causal_lm.get_input_embeddings()
    if (type(words), type(head)) == (nn.Embedding, nn.Linear):  # some embeddings scale their output
        layers += [words, head]
        words.forward = _looked_up(words)
        head.forward = casting_in_passing(head)
    for layer in layers:
        weight = layer.weight
        if weight.dtype in (dtype, torch.int8) or weight.requires_grad:  # tied ones appear twice
            continue
        short = weight.to(dtype)
        if rounded and not bool(torch.isfinite(short).all()):
            raise UserError(
                f"learner.base: a weight of {type(causal_lm).__name__} is as large as {float(weight.abs().max()):.3g} "
                f"and has no room in {str(dtype).removeprefix('torch.')}: set learner.base: file, or fp32"
            )
        if rounded or torch.equal(short.to(weight.dtype), weight):
            weight.data = short


def _keep_in_8_bits(layers: list[nn.Linear]) -> None:
    done: dict[Tensor, RowScaled] = {}  # layers may share a weight
    for layer in layers:
        weight = layer.weight
        if not weight.requires_grad:
            done[weight] = done.get(weight) or RowScaled.of(weight)
            keep_row_scaled(layer, done[weight])


def _require_linears_alone(causal_lm: nn.Module, fused: FusedLora) -> None:
    """Raises UserError if other layers have frozen matrices, which would stay float32, four times the size that int8 is
    chosen for."""
    among = set(fused.unfused)
    others = [
        name.replace(".base_layer", "")
        for name, weight in causal_lm.named_parameters()
        if weight in among and weight.ndim > 1 and not weight.requires_grad
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UserError(
            f"learner.base: int8 is for linear layers, and {type(causal_lm).__name__} has frozen weights in others: "
            f"{others[0]}{more}; set learner.base: file, fp16 or fp32"
        )


def _looked_up(words: nn.Embedding) -> Callable[[Tensor], Tensor]:
    return lambda ids: embedding(ids, words.weight, words.padding_idx).float()
