"""The output layer: logits in float32 whatever its inputs, because rounding there alone can cost more KL than a
radius."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CAST_AT_ONCE = 1 << 26
"""Elements of a half-precision weight that are cast at once: a quarter of a gigabyte in float32."""
Product = Callable[[Tensor, Tensor, slice], Tensor]
"""Multiplies hidden states with some rows of a weight; the slice says which rows."""


def cast_rows(width: int) -> int:
    """How many rows of a weight of this width are cast at once."""
    return max(1, CAST_AT_ONCE // width)


def _parts(weight_VH: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in this dtype: whole if it has that dtype, otherwise cast block by block of rows."""
    step = len(weight_VH) if weight_VH.dtype == dtype else cast_rows(weight_VH.shape[1])
    for start in range(0, len(weight_VH), step):
        yield slice(start, start + step), weight_VH[start : start + step].to(dtype)


def _forward(hidden_NH: Tensor, weight_VH: Tensor, dtype: torch.dtype, product: Product) -> Tensor:
    """Logits from products with parts of the weight in this dtype."""
    found = [product(hidden_NH, part, rows) for rows, part in _parts(weight_VH, dtype)]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def _backward(grad_NV: Tensor, weight_VH: Tensor) -> Tensor:
    """The gradient of the hidden states."""
    found: Tensor | None = None
    for rows, part in _parts(weight_VH, torch.float32):
        found = grad_NV[:, rows] @ part if found is None else found.addmm_(grad_NV[:, rows], part)
    assert found is not None
    return found


def half_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of float16 factors, accumulated in float32."""
    if left.device.type != "cuda":
        return left.float() @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)


class _HalfProduct(torch.autograd.Function):
    """hidden @ weight' of float16 factors, accumulated in float32. float16 has as many mantissa bits as TF32, at half
    the time. Its range is too small for the gradient, which is computed in float32 with the weight itself."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, half_VH: Tensor) -> Tensor:
        ctx.save_for_backward(weight_VH)

        def product(half_NH: Tensor, part_VH: Tensor, _: slice) -> Tensor:
            return half_product(half_NH, part_VH.T)

        return _forward(hidden_NH.half(), half_VH, torch.float16, product)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor, None, None]:
        (weight_VH,) = ctx.saved_tensors
        return _backward(grad_NV, weight_VH), None, None


class _PassingProduct(torch.autograd.Function):
    """hidden @ weight' in float32 with a half-precision weight cast on the fly; autograd would save the float32 weight
    as well."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight_VH)

        def product(hidden_NH: Tensor, part_VH: Tensor, rows: slice) -> Tensor:
            return linear(hidden_NH, part_VH, None if bias_V is None else bias_V[rows].float())

        return _forward(hidden_NH, weight_VH, torch.float32, product)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor, None, None]:
        (weight_VH,) = ctx.saved_tensors
        return _backward(grad_NV, weight_VH), None, None


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """Logits of hidden states. ``half``: the weight in float16, if products are to be computed with it."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    half: Tensor | None = None

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            if self.half is not None:
                logits_NV = _HalfProduct.apply(hidden_NH.float(), self.weight, self.half)
                logits_NV = logits_NV if self.bias is None else logits_NV + self.bias.float()
            elif self.weight.dtype != torch.float32 and not self.weight.requires_grad:
                logits_NV = _PassingProduct.apply(hidden_NH.float(), self.weight, self.bias)
            else:
                bias = None if self.bias is None else self.bias.float()
                logits_NV = linear(hidden_NH.float(), self.weight.float(), bias)
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature

    @property
    def scores_in_half(self) -> bool:
        """Whether ``scoring.fused_features`` can compute with this layer."""
        return self.half is not None and self.half.dtype == torch.float16 and self.half.is_cuda
