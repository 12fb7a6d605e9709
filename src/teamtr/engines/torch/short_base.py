"""A frozen base below adapters, kept in half precision: linear layers, the embedding and the output layer.

Whoever computes in another dtype casts a layer in passing, forward and back. A cast reads and writes as many bytes as
the weight has, once for all rows of a pass; a kept copy would take as much memory as was saved. Norms and biases stay
float32: they are few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from teamtr.engines.torch.fused_lora import FusedLora
from teamtr.errors import UserError


@torch.no_grad()
def keep_short(causal_lm: Any, fused: FusedLora, dtype: torch.dtype, *, rounded: bool) -> None:
    """Keep the frozen weights in this dtype. Without ``rounded``, only each that loses nothing by it: float32 of these
    numbers is what they were, and what is computed with them too. With it, all of them: the base is then the rounded
    one, for scoring, training and sampling alike."""
    layers: list[Any] = list(fused.linears)
    head: Any = causal_lm.get_output_embeddings()
    words: Any = causal_lm.get_input_embeddings()
    if (type(words), type(head)) == (nn.Embedding, nn.Linear):  # some embeddings scale what they say
        layers += [words, head]
        words.forward = _looked_up(words)
        head.forward = _in_the_dtype_of_its_input(head)
    for layer in layers:
        weight = layer.weight
        if weight.dtype == dtype or weight.requires_grad:  # tied ones come twice
            continue
        short = weight.to(dtype)
        if rounded and not bool(torch.isfinite(short).all()):
            raise UserError(
                f"learner.base: a weight of {type(causal_lm).__name__} is as large as {float(weight.abs().max()):.3g} "
                f"and has no room in {str(dtype).removeprefix('torch.')}: set learner.base: file, or fp32"
            )
        if rounded or torch.equal(short.to(weight.dtype), weight):
            weight.data = short


def _looked_up(words: nn.Embedding) -> Callable[[Tensor], Tensor]:
    return lambda ids: embedding(ids, words.weight, words.padding_idx).float()


def _in_the_dtype_of_its_input(head: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, head.weight.to(x.dtype), head.bias)
