"""Attention for packed sequences, registered with transformers.

Any architecture that uses transformers' attention interface then computes without padding and, except for long float32
rows on a GPU, without repeated key and value heads. Inside ``attending``, a model gets the tokens of many sequences end
to end in one row. Which tokens attend to which is not given by a mask but by a *layout*: ``Packed`` for training and
scoring, those of ``paged.layout`` for sampling.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from teamtr.engines.torch.packing import Packing, Spread
from teamtr.engines.torch.rotation import Rotation
from teamtr.engines.transfer import send
from teamtr.errors import first_line

NAME = "teamtr"
LONG = 1024
"""Tokens of a row above which memory that is quadratic in its length is too much."""


class Unsupported(Exception):
    """The architecture needs attention that we do not compute; the message says what."""


class Mixing(Unsupported):
    """Tokens interact outside of attention, or in an attention that does not use the attention interface."""


class AttentionShape(NamedTuple):
    """The sizes that determine how much attention reads and keeps."""

    heads: int
    kv_heads: int
    dim: int
    layers: int

    @staticmethod
    def of(config: Any) -> AttentionShape:
        """From a decoder's config, where missing values follow from the others. Raises ``Unsupported`` if layers
        differ."""
        try:
            heads = getattr(config, "num_attention_heads", None) or 0  # some have no attention at all
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        except RuntimeError as error:  # transformers raises it where the value depends on the layer
            raise Unsupported("heads that differ from layer to layer") from error
        return AttentionShape(heads, kv_heads, dim, config.num_hidden_layers)


def text_config(model: Any) -> Any:
    """The config of the text decoder: a model that also reads images has one for each."""
    return model.get_decoder().config


class Layout(Protocol):
    """Which tokens attend to which."""

    @property
    def longest(self) -> int:
        """Most tokens that one sequence has."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        """Attention over packed tokens: [N, H, D], [N, K, D], [N, K, D] to [N, H, D]."""
        ...


@dataclass
class Listening:
    """A layout that records what every layer passes to attention and returns each token's own query."""

    heard: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    times: Counter[int] = field(default_factory=Counter)
    longest = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        if value.shape[-1] != query.shape[-1]:
            raise Unsupported("values of another width than its queries")
        self.heard[layer] = (query.clone(), key.clone(), value.clone())
        self.scales[layer] = scale
        self.times[layer] += 1
        return query.clone()


_current: Layout | None = None


@contextmanager
def attending(model: Any, layout: Layout) -> Iterator[None]:
    """Context in which the model attends as the layout says."""
    global _current
    register()
    config = text_config(model)
    before, outer = config._attn_implementation, _current
    config._attn_implementation, _current = NAME, layout
    try:
        yield
    finally:
        config._attn_implementation, _current = before, outer


TRIED = 5
FIRST_POSITION = 7
APART = 1e-3
"""Largest difference, relative to the largest element, between tokens computed together and alone, in float32."""


@torch.no_grad()
def listen(model: Any) -> tuple[Listening, Tensor]:
    """Runs the model over a few tokens; returns what its layers passed to attention, and the last hidden states
    [N, H]."""
    listening = Listening()
    hidden = _hidden(model, slice(None), listening)
    if listening.times != Counter(range(text_config(model).num_hidden_layers)):
        raise Mixing("an attention of its own, or layers without one")
    return listening, hidden


@torch.no_grad()
def require_attention_alone(model: Any) -> Listening:
    """Raises ``Mixing`` if tokens interact outside of attention: state spaces, convolutions, linear attention. Packed
    rows and KV blocks would then be computed wrongly without any error. Returns what layers passed to attention."""
    listening, together = listen(model)
    apart = torch.cat([_hidden(model, slice(k, k + 1), Listening()) for k in range(TRIED)])
    if not (together - apart).abs().max() <= APART * together.abs().max():
        raise Mixing("more between its tokens than attention")
    return listening


def require_even_heads(listening: Listening, model: Any) -> None:
    """Raises ``Unsupported`` if heads differ from layer to layer or from the config: KV blocks have one shape."""
    shape = AttentionShape.of(text_config(model))
    for query, key, _ in listening.heard.values():
        if query.shape[1:] != (shape.heads, shape.dim) or key.shape[1:] != (shape.kv_heads, shape.dim):
            raise Unsupported("heads that its config does not tell")


def _hidden(model: Any, which: slice, layout: Listening) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.arange(TRIED, device=device)[None, which] % model.get_input_embeddings().num_embeddings
    positions = torch.arange(FIRST_POSITION, FIRST_POSITION + TRIED, device=device)[None, which]
    try:
        with attending(model, layout):
            found = model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False)
            hidden: Tensor = found.last_hidden_state
    except (Unsupported, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # anything that the model's own attention raises
        raise Mixing(f"an attention of its own ({type(error).__name__}: {first_line(error)})") from error
    return hidden[0].float()


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
    """The function that transformers calls: [1, H, N, D] in, [1, N, H, D] out."""
    require_plain(attention_mask, dropout, options)
    if isinstance(_current, Listening):
        _current.windows[module.layer_idx] = options.get("sliding_window")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(query, key, value, module.layer_idx, float(scale)), None


def require_plain(attention_mask: Tensor | None, dropout: float, options: dict[str, Any]) -> None:
    layout = _current
    if layout is None:
        raise RuntimeError("attention 'teamtr' is only valid inside `attending`")
    window = options.get("sliding_window")
    if window is not None and window < layout.longest:
        raise Unsupported(f"a sliding window of {window} tokens, shorter than its contexts")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise Unsupported(f"attention with {name}")
    if attention_mask is not None or dropout:
        raise Unsupported("a mask of its own" if attention_mask is not None else "dropout in attention")


def packed_now() -> Packed | None:
    """The layout of the packed batch that is being computed, or None."""
    return _current if isinstance(_current, Packed) else None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    assert _current is not None
    if isinstance(_current, Packed):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _current.attend(q, k, v, layer, scale)[None]
    return _paged(query, key, value, layer, scale)


@torch.library.custom_op("teamtr::paged_attention", mutates_args=())
def _paged(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    """Opaque to the compiler: KV blocks and tables are looked up in the layout, not passed, so that no compiled graph
    copies a pool that it must write to. Layers depend on each other through the hidden states, which keeps their
    order."""
    assert _current is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _current.attend(q, k, v, layer, scale)[None]


@_paged.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])


@torch.library.custom_op("teamtr::rotated_attention", mutates_args=())
def rotated_attention(
    product: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    layer: int,
    scale: float,
    heads: int,
    kv_heads: int,
) -> Tensor:
    """``packed_attention`` for the joined product of query, key and value, [1, N, (H + 2 K) D], before norm and
    rotation."""
    assert _current is not None
    parts = product[0].unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 1)
    rotation = Rotation(cos[0], sin[0], query_weight, key_weight, epsilon)
    paged: Any = _current
    attended: Tensor = paged.attend(*parts, layer, scale, rotation)
    return attended.flatten(1)[None]


@rotated_attention.register_fake
def _(
    product: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    layer: int,
    scale: float,
    heads: int,
    kv_heads: int,
) -> Tensor:
    dim = product.shape[2] // (heads + 2 * kv_heads)
    return product.new_empty(product.shape[0], product.shape[1], heads * dim)


@dataclass(frozen=True)
class Packed:
    """Rows of a packing, each causal within itself. Attention alone sees whole rows; everything else sees each token
    once."""

    lengths: tuple[int, ...]
    starts: Tensor
    """int32 [rows + 1], cumulative lengths."""
    spread: Spread | None
    """Spreads tokens to rows; None if they are in rows already."""
    end_to_end: bool
    """Rows follow each other without padding. Otherwise each is padded to the longest on the right, where causality
    alone masks the padding."""

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @staticmethod
    def of(packing: Packing, device: torch.device, dtype: torch.dtype) -> Packed:
        end_to_end = goes_end_to_end(device, dtype)
        # In packing order, so that rows without a common prefix need not be spread at all.
        leaves = sorted(packing.leaves, key=lambda row: row[-1]) if end_to_end else packing.leaves
        lengths = tuple(map(len, leaves))
        starts = send(np.cumsum([0, *lengths]).astype(np.int32), device)
        places = np.concatenate(leaves)
        if not end_to_end:
            padded = np.full((len(lengths), max(lengths)), -1)
            padded[np.arange(max(lengths)) < np.array(lengths)[:, None]] = places
            places = padded.reshape(-1)
        count = len(packing.ids_N)
        in_order = len(places) == count and (places == np.arange(count)).all()
        spread = None if in_order else Spread.of(places, count, device, in_runs=end_to_end)
        return Packed(lengths, starts, spread, end_to_end)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        # Queries and keys were rotated in float32; values have the dtype that the layers compute in.
        dtype = value.dtype
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if self.spread is not None:
            query = self.spread.first_only(query)
            key, value = self.spread(key), self.spread(value)
        grouped = key.shape[1] != query.shape[1]
        if self.end_to_end:
            from torch.nn.attention.varlen import varlen_attn

            shares: dict[str, Any] = {"enable_gqa": True} if grouped and "enable_gqa" in _varlen_options() else {}
            out = varlen_attn(
                query, key, value, self.starts, self.starts, self.longest, self.longest,
                scale=scale, window_size=(-1, 0), **shares,
            )  # fmt: skip
            assert isinstance(out, Tensor)
        else:
            if grouped and _needs_own_keys(query, self.longest):
                times = query.shape[1] // key.shape[1]
                key, value, grouped = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
            q, k, v = (x.view(len(self.lengths), -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            padded = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            out = padded.transpose(1, 2).flatten(0, 1)
        return out if self.spread is None else self.spread.gather(out)


def _needs_own_keys(query: Tensor, longest: int) -> bool:
    """Whether every query head needs its own keys, in long rows. On a GPU, torch shares keys between heads only in half
    precision and in plain products, which hold the weights of every pair of tokens; the float32 kernel with linear
    memory does not share them."""
    return query.device.type == "cuda" and query.dtype == torch.float32 and longest > LONG


def goes_end_to_end(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention takes rows of this dtype without padding."""
    return device.type == "cuda" and dtype != torch.float32 and {"window_size", "scale"} <= _varlen_options()


@cache
def _varlen_options() -> frozenset[str]:
    """Arguments of torch's attention without padding; none if it has none. Before it had ``enable_gqa``, it shared keys
    and values between heads without being told to."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
