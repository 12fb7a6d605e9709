"""Recognizes layers that can be computed in another way, by what they compute and not by their names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from teamtr.engines.slices import gathered
from teamtr.engines.torch.anatomy import epsilon_of
from teamtr.engines.torch.attention import listen


def computed_by_kernels(x: Tensor) -> bool:
    """Whether our own kernels compute it: in half precision on a GPU. Elsewhere torch does, as for the model itself."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def is_plain_adapted(module: Any) -> bool:
    base = getattr(module, "base_layer", None)
    if not hasattr(module, "lora_A") or getattr(type(base), "forward", None) is not nn.Linear.forward:
        return False  # some routers are linear layers that return more
    plain_dropout = all(isinstance(d, nn.Identity) for d in module.lora_dropout.values())
    return plain_dropout and not any(getattr(module, "use_dora", {}).values())


@torch.no_grad()
def is_gated(module: Any) -> bool:
    """Whether the module computes down(silu(gate(x)) * up(x)), by comparing outputs."""
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    gate, up, down = parts
    width = getattr(gate, "in_features", None)
    if not all(isinstance(part, nn.Module) for part in parts) or not isinstance(width, int):
        return False
    if not _is_made_of(module, parts):
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:  # self and the input
        return False
    weight = next(module.parameters())
    x = torch.linspace(-30.0, 50.0, 2 * width, device=weight.device, dtype=weight.dtype).view(2, width)
    with gathered(module):
        theirs, ours = module(x), down(silu(gate(x)) * up(x))
    return isinstance(theirs, Tensor) and torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5 * float(ours.abs().max()))


@torch.no_grad()
def adds_twice(layer: Any) -> bool:
    """Whether the layer computes y + mlp(norm(y)) for y = x + attention(norm(x)), tested with stand-ins for its parts,
    and its norms are plain. It must call its parts as ``fused_lora`` and ``joined_layers`` do: norms and mlp with one
    argument, attention with keyword arguments and the angles that the layer was given."""
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    parts: list[Any] = [getattr(layer, name, None) for name in names]
    if not all(isinstance(part, nn.Module) for part in parts) or not all(map(is_rms_norm, parts[::2])):
        return False
    if not _is_made_of(layer, parts):
        return False
    x, angles = torch.arange(1.0, 7.0).view(3, 2, 1), object()  # no two rows alike, and too many to unpack as a pair

    def attend(*, hidden_states: Tensor, position_embeddings: Any, attention_mask: None, **_: Any) -> Any:
        return (3 * hidden_states if position_embeddings is angles and attention_mask is None else None), None

    before = [part.__dict__.get("forward") for part in parts]
    try:
        for part, stand_in in zip(parts, (partial(mul, 2), attend, partial(mul, 4), partial(mul, 5)), strict=True):
            part.forward = stand_in
        theirs = layer(x, attention_mask=None, position_embeddings=angles)
    except Exception:  # any error: it calls its parts differently or expects other results
        return False
    finally:
        for part, forward in zip(parts, before, strict=True):
            if forward is None:
                del part.forward
            else:
                part.forward = forward
    between = x + 3 * 2 * x
    return isinstance(theirs, Tensor) and torch.equal(theirs, between + 5 * 4 * between)


def _is_made_of(module: nn.Module, parts: Sequence[nn.Module]) -> bool:
    """Whether the module has no tensors but those of its parts. A learned scale would not show in the outputs of a new
    model, where it is one."""
    known = {id(tensor) for part in parts for tensor in (*part.parameters(), *part.buffers())}
    return all(id(tensor) in known for tensor in (*module.parameters(), *module.buffers()))


def hands_on(model: Any) -> bool:
    """Whether nothing but the next layer reads a layer's output. Every decoder layer must receive the very tensor that
    the previous one returned, with nothing written into it, the last norm that of the last layer, and the decoder must
    return what this norm returns."""
    decoder = model.get_decoder()
    chain = [*getattr(decoder, "layers", ()), getattr(decoder, "norm", None)]
    if not all(isinstance(part, nn.Module) for part in chain):
        return False
    calls: list[_Call] = []

    def see(part: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(returned, Tensor):
            calls.append(_Call(part, args[0], args[0]._version, returned, returned._version))

    hooks = [part.register_forward_hook(see) for part in chain]
    try:
        _, hidden = listen(model)
    finally:
        for hook in hooks:
            hook.remove()
    if [call.part for call in calls] != chain or not torch.equal(calls[-1].said[0].float(), hidden):
        return False
    return all(
        after.given is before.said and after.given_writes == before.said_writes for before, after in pairwise(calls)
    )


class _Call(NamedTuple):
    """What a module was given and what it returned, and how often each tensor had been written to."""

    part: nn.Module
    given: Tensor
    given_writes: int
    said: Tensor
    said_writes: int


@torch.no_grad()
def is_rms_norm(module: Any) -> bool:
    """Whether the module is a plain RMS norm, by comparing outputs: some norms of that name add one to their weight."""
    weight = getattr(module, "weight", None)
    if (
        not type(module).__name__.endswith("RMSNorm")
        or weight is None
        or weight.ndim != 1
        or epsilon_of(module) is None
        or len(list(module.parameters())) != 1
    ):
        return False
    x = torch.linspace(-3.0, 5.0, len(weight), device=weight.device).expand(2, -1)
    with gathered(module):
        theirs, ours = module(x), rms_norm(x, (len(weight),), module.weight.float(), epsilon_of(module))
    return torch.allclose(theirs.float(), ours, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def turns_plainly(module: Any) -> bool:
    """Whether the module returns the cosines and sines of position times ``inv_freq``, twice side by side and scaled by
    ``attention_scaling``, by comparing outputs. Rotations whose frequencies depend on the longest row do not."""
    frequency, scale = getattr(module, "inv_freq", None), getattr(module, "attention_scaling", None)
    if not isinstance(frequency, Tensor) or frequency.ndim != 1 or not isinstance(scale, float | int):
        return False
    if any(kind in str(getattr(module, "rope_type", "default")) for kind in ("dynamic", "longrope")):
        return False  # as long as rows are short, their outputs look plain
    position = torch.tensor([[0, 1, 5, 300]], device=frequency.device)
    try:
        theirs = module(torch.zeros(1, device=frequency.device), position)
    except Exception:  # any error: it wants other arguments
        return False
    angle = position[0, :, None].float() * frequency.float()
    angle = torch.cat([angle, angle], -1)
    if not isinstance(theirs, tuple) or len(theirs) != 2 or any(part.shape != (1, *angle.shape) for part in theirs):
        return False
    ours = (angle.cos() * scale, angle.sin() * scale)
    return all(torch.allclose(a[0].float(), b, rtol=1e-5, atol=1e-6) for a, b in zip(theirs, ours, strict=True))
