"""Linear layers over weights of another dtype: those partitioned across processes, and those stored in lower precision.

A half-precision copy that autograd saves between forward and backward would be whole, layer after layer. So only the
weight itself is saved, whose memory is released and gathered again as layers are passed, and it is rounded once more in
the backward pass. The numbers are the same, because rounding is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from teamtr.engines.torch.row_scaled import FrozenWeight


class HalfLinear(torch.autograd.Function):
    """x W' + b with all three rounded to a dtype, as autocast computes it; gradients for all three if W is a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        rounded = x.to(dtype)
        is_tensor = isinstance(weight, Tensor)
        ctx.save_for_backward(rounded, *((weight,) if is_tensor else ()))
        ctx.short = None if is_tensor else weight
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return linear(rounded, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rounded, *saved = ctx.saved_tensors
        weight: FrozenWeight = ctx.short if ctx.short is not None else saved[0]
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat @ weight.to(flat.dtype)).view(rounded.shape).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (flat.T @ rounded.reshape(-1, rounded.shape[-1])).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def round_again_on_the_way_back(layer: nn.Module) -> None:
    """Makes the plain linear layers within compute like this under autocast; other modules keep their copies."""
    for module in layer.modules():
        if type(module) is nn.Linear:
            plain: Any = module
            plain.forward = _forward(module)


def _forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return linear(x, module.weight, module.bias)
        half: Tensor = HalfLinear.apply(x, module.weight, module.bias, torch.get_autocast_dtype(kind))
        return half

    return forward
