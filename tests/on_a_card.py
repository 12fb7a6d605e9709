"""Runs the GPU code path on a CPU, with torch in place of the learner's kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from teamtr.engines.torch.rotation import Rotation


def instead_of_kernels(monkeypatch: Any) -> list[str]:
    """Replace the kernels by torch functions; returns a list to which the name of every called kernel is appended."""
    asked: list[str] = []
    for module, works in (("fused_layers", LAYERS), ("fused_rotation", ROTATION), ("narrow_products", NARROW)):
        counted = {work.__name__: partial(_asked, asked, work) for work in works}
        monkeypatch.setitem(sys.modules, f"teamtr.engines.torch.{module}", SimpleNamespace(**counted))
    return asked


def _asked(asked: list[str], work: Callable[..., Any], *given: Any, **named: Any) -> Any:
    asked.append(work.__name__)
    return work(*given, **named)


def norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, *, room: bool = False) -> Tensor:
    return rms_norm(x, (x.shape[-1],), weight, epsilon).to(dtype)


def branch(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x, norm(x, weight, epsilon, dtype)


def add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, *, room: bool = False
) -> tuple[Tensor, Tensor]:
    return x + delta, norm(x + delta, weight, epsilon, dtype)


def added(x: Tensor, delta: Tensor) -> Tensor:
    return x + delta


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def gated_rows(both: Tensor) -> Tensor:
    assert both.ndim == 2
    return gated(*both.chunk(2, 1))


def angles(position: Tensor, frequency: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = (position[:, None].float() * frequency).repeat(1, 2)
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return Rotation(cos, sin, weight, None, epsilon).query(x)


def turned_rows(
    rows: Tensor, cos: Tensor, sin: Tensor, of_query: Tensor | None, of_key: Tensor | None, epsilon: float, heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value = rows.unflatten(1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 1)
    return turned(query, cos, sin, of_query, epsilon), turned(key, cos, sin, of_key, epsilon), value


def narrow(wide: Tensor, factor: Tensor) -> Tensor:
    return wide @ factor.T


def across(wide: Tensor, narrow: Tensor) -> Tensor:
    return _exact(narrow).T @ _exact(wide)


def across_and_along(
    wide: Tensor, narrow: Tensor, factor: Tensor, scale: float = 1.0, sizes: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    sizes = sizes or (wide.shape[1],)
    parts = wide.split(sizes, 1), narrow.split(factor.shape[1], 1), factor.split(sizes)
    both = [
        (scale * _exact(part).T @ _exact(own), (scale * _exact(part) @ _exact(up)).to(wide.dtype))
        for part, own, up in zip(*parts, strict=True)
    ]
    return torch.cat([of_up for of_up, _ in both]), torch.cat([along for _, along in both], 1)


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def summed(rows: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    return torch.stack([rows[places[a:b]].sum(0) for a, b in pairwise(starts.tolist())])


LAYERS = (norm, branch, add_norm, added, gated, gated_rows, summed)
ROTATION = (angles, turned, turned_rows)
NARROW = (narrow, across, across_and_along)
