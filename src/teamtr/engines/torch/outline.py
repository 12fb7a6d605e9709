"""A model without its weights, made by transformers' own loader, and where each weight is stored.

The loader is given stand-ins: tensors of the right shape that take almost no memory and cannot be mistaken for weights.
Names, shapes, buffers and ties are then as usual, and a stand-in found in the model shows which stored tensor belongs
there. Whatever the loader computes from several tensors, or from a part of one, is no stand-in any more; such a model
is loaded as a whole (``NotInParts``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from teamtr.engines.slices import is_spread
from teamtr.engines.stored import Reader, StoredTensor
from teamtr.engines.torch.model_files import named


class NotInParts(Exception):
    """The weights of this model cannot be read one by one; the message says why."""


@dataclass(frozen=True)
class Slot:
    """Where a model holds one of its tensors. It stays valid when modules are wrapped in others."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.module, self.name)
        return found

    @property
    def is_parameter(self) -> bool:
        return self.name in self.module._parameters


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """The slot of every parameter and buffer, by its current name; tied ones once."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = dict(model.named_modules())
    return {name: Slot(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in tensors}


@dataclass(frozen=True)
class Outline:
    """A model of stand-ins, and what they stand for, by the names of its tensors."""

    model: Any
    info: Mapping[str, Any]
    """What the loader reports: missing, mismatched and unexpected tensors."""
    stored: Mapping[str, StoredTensor]


def outline(model_class: Any, config: Any, folder: Path, files: Mapping[str, str]) -> Outline:
    """Builds the outline of a stored model. ``files``: which file of the folder holds each tensor."""
    if getattr(config, "quantization_config", None) is not None:
        raise NotInParts("its weights are quantized")
    stand_ins = {key: _stand_in(shape) for key, shape in _shapes(folder, files).items()}
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dict(stand_ins),
        dtype=torch.float32,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    keys = {stand_in.untyped_storage().data_ptr(): key for key, stand_in in stand_ins.items()}
    stored, converted = {}, []
    kept = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    for name, slot in slots_of(model).items():
        tensor = slot.tensor
        key = keys.get(tensor.untyped_storage().data_ptr())
        if key is not None and tensor.shape == stand_ins[key].shape and tensor.stride() == stand_ins[key].stride():
            stored[name] = StoredTensor(folder / files[key], key)
        elif name in kept:
            converted.append(name)
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}  # the caller reports them
    if converted := [name for name in converted if name not in absent]:
        raise NotInParts(f"transformers converts its weights as it loads them ({named(converted)})")
    names = [name for name, _ in model.get_decoder().layers.named_parameters(remove_duplicate=False)]
    if repeated := set(names) - {name for name, _ in model.get_decoder().layers.named_parameters()}:
        raise NotInParts(f"its layers share weights ({named(repeated)})")
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(target) is not model.get_parameter_or_buffer(source):
            raise NotInParts(f"its config ties {target} to {source}, and both are stored")
    return Outline(model, info, stored)


@dataclass(frozen=True)
class Unread:
    """The weights that a model still has to read. ``slots`` and ``stored`` are keyed by the names that its tensors had
    when it was made; slots with nothing stored are computed."""

    slots: Mapping[str, Slot]
    stored: Mapping[str, StoredTensor]

    def forget_layers(self, layers: nn.ModuleList) -> None:
        """Drops the values of the layers' parameters, so that none are copied when the layers are partitioned."""
        within = set(layers.modules())
        for slot in self.slots.values():
            if slot.module in within and slot.is_parameter:
                bare = torch.empty(slot.tensor.shape, device="meta")
                slot.module._parameters[slot.name] = nn.Parameter(bare, requires_grad=slot.tensor.requires_grad)

    @torch.no_grad()
    def read(self, device: torch.device) -> int:
        """Reads the weights from the files into the model, one tensor after the other: of partitioned ones the rows of
        this process, the others whole and onto the device. Returns the number of bytes read."""
        with Reader() as reader:
            for name, stored in self.stored.items():
                tensor = self.slots[name].tensor
                if not is_spread(tensor):
                    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                reader.into(tensor, stored)
            return reader.read_bytes


def _shapes(folder: Path, files: Mapping[str, str]) -> dict[str, list[int]]:
    shapes = {}
    for file in sorted(set(files.values())):
        with safe_open(folder / file, framework="pt") as opened:
            shapes.update({key: list(opened.get_slice(key).get_shape()) for key in files if files[key] == file})
    return shapes


def _stand_in(shape: list[int]) -> Tensor:
    """A tensor with as few elements as distinguish its axes. They are NaN: weights that were never read are noticed,
    and two stand-ins are never equal."""
    if not shape:
        return torch.full((), torch.nan)
    strides = list(range(len(shape) - 1, -1, -1))
    reach = list(accumulate((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))[-1]
    return torch.full((max(reach, 0) + 1,), torch.nan).as_strided(shape, strides)
