"""A plain copy of an architecture in sampling precision, filled in place with any agent's weights.

Agents of one architecture share the copy. Either an adapter is merged into it when its agent speaks, which takes a few
milliseconds for a model of billions of weights; or the adapters of one base are applied row by row, and the copy holds
the base, or reads the learner's tensors. Captured graphs hold addresses, so these never change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from teamtr.engines.paged.fused_linears import join_attention, join_siblings
from teamtr.engines.paged.joined_layers import Stack, join_layers
from teamtr.engines.paged.one_copy import lay_below_each_other, made_around, plain_name, put_in_place
from teamtr.engines.paged.row_adapters import RowAdapters
from teamtr.engines.slices import whole
from teamtr.engines.torch.anatomy import inspect_attention
from teamtr.engines.torch.row_scaled import FrozenWeight, row_scaled_in


@dataclass(frozen=True)
class Weight:
    """One weight of an agent as it is stored, and a function that merges its adapter into it, in float32."""

    name: str
    base: FrozenWeight
    merged: Callable[[], Tensor] | None = None


def weights_of(causal_lm: nn.Module, adapter: str | None) -> Iterator[Weight]:
    """The weights of a transformers model, under their names without adapters."""
    adapted = {
        _adapted_weight(module): module
        for module in causal_lm.modules()
        if adapter is not None and adapter in getattr(module, "lora_A", {})
    }
    scaled = dict(row_scaled_in(causal_lm))
    for name, tensor in causal_lm.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        base, module = scaled.get(tensor, tensor), adapted.get(tensor)
        merged = None if module is None else partial(_merged, module, base, str(adapter))
        yield Weight(plain_name(name), base, merged)


def _adapted_weight(module: Any) -> Tensor:
    """The weight under an adapter: of a layer, or of experts, several of which share one parameter."""
    found: Tensor = module.get_param() if hasattr(module, "get_param") else module.base_layer.weight
    return found


def _merged(module: Any, base: FrozenWeight, adapter: str) -> Tensor:
    wide = _cast(base, torch.float32)
    if not isinstance(module.base_layer, nn.Linear):  # transposed weights, experts
        added: Tensor = module.get_delta_weight(adapter)
        return wide + added.float()
    down, up = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    return torch.addmm(wide, up.float(), down.float(), alpha=module.scaling[adapter])


def _cast(base: FrozenWeight, dtype: torch.dtype) -> Tensor:
    return (whole(base) if isinstance(base, Tensor) else base).to(dtype)


class SamplingCopy:
    """The model that samples. ``holds`` names the weights that it was last filled with.

    Args:
        shared: weights of ``causal_lm`` itself that are read in place (``one_copy``); nothing is merged then.
        joins_layers: use our own kernels between matrix products (``joined_layers``) if the layers are recognized; not
            for a model that is compiled. ``joined`` says whether they are used.
        in_part: also if torch still computes some of it, such as a gate or a rotation that is not recognized.
    """

    def __init__(
        self,
        causal_lm: Any,
        dtype: torch.dtype,
        device: torch.device,
        shared: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        joins_layers: bool = True,
        in_part: bool = True,
    ) -> None:
        if shared:
            self.model = made_around(causal_lm, dtype, device, shared)
        else:
            with torch.device(device):
                self.model = type(causal_lm)._from_config(copy.deepcopy(causal_lm.config), dtype=dtype)
        self.shared = frozenset(shared)
        self.model.eval().requires_grad_(False)
        known = inspect_attention(self.model)  # before filling: large biases, enlarged, would overflow float16
        stack = Stack.of(self.model) if joins_layers else None
        if stack is not None and not in_part and not stack.is_whole(known):
            stack = None
        if shared:
            lay_below_each_other(causal_lm, shared)
            put_in_place(self.model, causal_lm, shared)
        products = join_siblings(self.model)
        join_attention(known, products)
        if stack is not None:
            join_layers(stack, products)
        self.joined = stack is not None
        self.dtype = dtype
        self.device = device
        self.holds = ""
        self.rows: RowAdapters | None = None
        self._base = ""
        self._merged: set[str] = set()
        self._own = dict(self.model.named_parameters())
        with torch.no_grad():
            theirs = dict(causal_lm.named_buffers())
            for name, buffer in self.model.named_buffers():
                if name in theirs and theirs[name].shape == buffer.shape:
                    buffer.copy_(theirs[name])

    @torch.no_grad()
    def fill(self, causal_lm: nn.Module, adapter: str | None, *, version: str, base: str) -> None:
        """Copy an agent's weights. ``version`` names them; if it is empty they are copied every time. ``base`` names
        the weights under an adapter, which are copied only if they changed."""
        if version and self.holds == version:
            return
        same_base = adapter is not None and base != "" and base == self._base
        self.holds = ""
        for weight in weights_of(causal_lm, adapter):
            own = self._own[weight.name]
            if weight.name in self.shared:
                if weight.merged is not None or weight.base.data_ptr() != own.data_ptr():
                    raise AssertionError(f"{weight.name} is the learner's own and would be overwritten")
                continue
            if weight.merged is not None:
                own.copy_(weight.merged())
                self._merged.add(weight.name)
            elif not same_base or weight.name in self._merged:  # the previous agent had an adapter here
                own.copy_(_cast(weight.base, own.dtype))
                self._merged.discard(weight.name)
        self.holds, self._base = version, base

    def apply_by_row(self, causal_lm: Any) -> None:
        """Stack all adapters of this model. Called before the copy computes anything."""
        self.rows = RowAdapters(self.model, causal_lm, self.device, self.dtype)

    def put(self, causal_lm: nn.Module, adapter: str, *, version: str, base: str) -> None:
        """Copy an agent's adapter, to be applied by row, and the base under it."""
        assert self.rows is not None
        self.fill(causal_lm, None, version=f"the base {base}" if base else "", base=base)
        self.rows.put(adapter, version)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 logits of the last hidden states. On a card they are never rounded to half precision."""
        layer = self.model.get_output_embeddings()
        if hidden_NH.device.type == "cuda" and self.dtype != torch.float32:
            logits_NV = torch.mm(hidden_NH, layer.weight.T, out_dtype=torch.float32)
        else:
            logits_NV = torch.nn.functional.linear(hidden_NH, layer.weight).float()
        return logits_NV if layer.bias is None else logits_NV + layer.bias.float()
