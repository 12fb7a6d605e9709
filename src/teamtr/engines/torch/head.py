"""The output layer in float32, whatever its inputs: rounding there alone can cost more KL than a radius."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from teamtr.engines.policy import Head


class _HalfProduct(torch.autograd.Function):
    """hidden @ weight' of float16 factors, added up in float32. float16 keeps as many digits as TF32 does, at half the
    time; the gradient, whose range it lacks, is computed with the whole weight."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, half_VH: Tensor) -> Tensor:
        ctx.save_for_backward(weight_VH)
        if hidden_NH.device.type != "cuda":
            return hidden_NH.half().float() @ half_VH.float().T
        return torch.mm(hidden_NH.half(), half_VH.T, out_dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor, None, None]:
        (weight_VH,) = ctx.saved_tensors
        return grad_NV @ weight_VH.float(), None, None


def linear_head(weight: Tensor, bias: Tensor | None, temperature: float, half: Tensor | None = None) -> Head:
    def head(hidden_NH: Tensor) -> Tensor:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            if half is not None:
                logits_NV = _HalfProduct.apply(hidden_NH.float(), weight, half)
                logits_NV = logits_NV if bias is None else logits_NV + bias.float()
            else:
                logits_NV = torch.nn.functional.linear(
                    hidden_NH.float(), weight.float(), None if bias is None else bias.float()
                )
        return logits_NV if temperature == 1.0 else logits_NV / temperature

    return head
