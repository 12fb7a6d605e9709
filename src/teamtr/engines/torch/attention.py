"""Attention for packed sequences, registered with transformers, so that any architecture that uses its attention
interface computes without padding and without repeated key and value heads.

A model switched to ``teamtr`` (``attending``) gets tokens of many sequences end to end in one row. Who may look at
whom is not a mask but a *layout*: ``Packed`` for training and scoring, ``Paged`` (``serving.server``) for sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

NAME = "teamtr"


class Unsupported(Exception):
    """This architecture asks of attention what we do not compute; says what."""


class Layout(Protocol):
    """Who looks at whom."""

    @property
    def longest(self) -> int:
        """Most tokens that one sequence has."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        """[N, H, D], [N, K, D], [N, K, D] of packed tokens to [N, H, D]."""
        ...


_current: Layout | None = None


@contextmanager
def attending(model: Any, layout: Layout) -> Iterator[None]:
    """Within, the model attends as the layout says."""
    global _current
    register()
    config = model.config
    before, outer = config._attn_implementation, _current
    config._attn_implementation, _current = NAME, layout
    try:
        yield
    finally:
        config._attn_implementation, _current = before, outer


@cache
def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _interface)


def _interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: [1, H, N, D] in, [1, N, H, D] out."""
    _require_plain(attention_mask, dropout, options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(query, key, value, module.layer_idx, float(scale)), None


def _require_plain(attention_mask: Tensor | None, dropout: float, options: dict[str, Any]) -> None:
    layout = _current
    if layout is None:
        raise RuntimeError("attention 'teamtr' is only valid inside `attending`")
    window = options.get("sliding_window")
    if window is not None and window < layout.longest:
        raise Unsupported(f"a sliding window of {window} tokens, shorter than the {layout.longest} needed")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise Unsupported(f"attention with {name}")
    if attention_mask is not None or dropout:
        raise Unsupported("a mask of its own" if attention_mask is not None else "dropout in attention")


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    assert _current is not None
    if isinstance(_current, Packed):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _current.attend(q, k, v, layer, scale)[None]
    return _paged(query, key, value, layer, scale)


@torch.library.custom_op("teamtr::paged_attention", mutates_args=())
def _paged(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    """Opaque to the compiler: pages and tables are looked up in the layout, not passed, so that no compiled graph
    copies a pool that it must write to. Layers depend on each other through the hidden states, which keeps order."""
    assert _current is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _current.attend(q, k, v, layer, scale)[None]


@_paged.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])


@dataclass(frozen=True)
class Packed:
    """Sequences end to end, each causal within itself."""

    lengths: tuple[int, ...]
    starts: Tensor
    """int32 [sequences + 1], cumulative lengths."""
    padded: Tensor
    """For each packed token, its place in [sequences, longest]."""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Packed:
        longest = max(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        padded = torch.cat([b * longest + torch.arange(n) for b, n in enumerate(lengths)])
        return Packed(tuple(lengths), starts.to(device, torch.int32), padded.to(device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        half = _half(query)
        if half is not None and _has_varlen():
            from torch.nn.attention.varlen import varlen_attn

            out = varlen_attn(
                query.to(half), key.to(half), value.to(half), self.starts, self.starts, self.longest, self.longest,
                scale=scale, window_size=(-1, 0), enable_gqa=key.shape[1] != query.shape[1],
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out
        # Only attention sees padding, on the right, where causality alone hides it; all else stays packed.
        q, k, v = (self._pad(x) for x in (query, key, value))
        padded = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        return padded.transpose(1, 2).flatten(0, 1)[self.padded]

    def _pad(self, packed_NHD: Tensor) -> Tensor:
        """[N, H, D] to [sequences, H, longest, D]."""
        rows, longest = len(self.lengths), self.longest
        if rows * longest == len(packed_NHD):
            flat = packed_NHD
        else:
            source = torch.full((rows * longest,), len(packed_NHD), device=packed_NHD.device)
            source[self.padded] = torch.arange(len(packed_NHD), device=packed_NHD.device)
            flat = pad(packed_NHD, (0, 0, 0, 0, 0, 1))[source]
        return flat.view(rows, longest, *packed_NHD.shape[1:]).transpose(1, 2)


def _half(query: Tensor) -> torch.dtype | None:
    """The half precision that attention runs in here, or None on a CPU and in float32."""
    if query.device.type != "cuda":
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


@cache
def _has_varlen() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters)
