"""Checks an adapter in a folder, as PEFT and our exports write it, before anything is read into a model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from teamtr.engines.torch.model_files import ADAPTER, ModelError, named

WEIGHTS = "adapter_model.safetensors"
_PLAIN = {"peft_type": ("LORA",), "bias": ("none", None)}
_UNUSED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication")
"""PEFT settings that change what an adapter computes and that TeamTR's adapters do not have."""


@dataclass(frozen=True)
class AdapterShape:
    """What the team file says of an adapter that starts from a folder."""

    rank: int
    alpha: float
    base: str


def require_adapter(folder: Path, shape: AdapterShape) -> None:
    """Raises ModelError unless the folder holds a plain LoRA adapter of this rank and scale, as safetensors."""
    told = f"lora.start {str(folder)!r}"
    if not folder.is_dir():
        raise ModelError(
            f"{told}: there is no such folder; give the folder of an adapter, as `teamtr export` writes it"
        )
    if not (folder / ADAPTER).is_file():
        raise ModelError(f"{told} holds no adapter (no {ADAPTER}): a whole model is given as the agent's model instead")
    try:
        settings: Mapping[str, Any] = json.loads((folder / ADAPTER).read_bytes())
        strange = [key for key, known in _PLAIN.items() if settings.get(key) not in known]
        strange += [key for key in _UNUSED if settings.get(key)]
        found = int(settings["r"]), float(settings["lora_alpha"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{told}: {ADAPTER} is damaged ({error!r:.100}); export or copy the adapter anew") from error
    if strange:
        raise ModelError(
            f"{told} is no plain LoRA adapter ({', '.join(strange)}): merge it into its base and give that"
        )
    if found != (shape.rank, shape.alpha):
        raise ModelError(
            f"{told} has rank {found[0]} and alpha {found[1]:g}, and the team file says {shape.rank} and "
            f"{shape.alpha:g}: set lora.rank: {found[0]} and lora.alpha: {found[1]:g}"
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{told} has no {WEIGHTS} (pickled weights are not read): save the adapter as safetensors")
    base = settings.get("base_model_name_or_path")
    if base and Path(str(base)).name != Path(shape.base).name:
        warnings.warn(
            f"{told} was trained on {base}, and is put on {shape.base}: is that the same model?", stacklevel=2
        )


def require_tensors(folder: Path, wanted: Mapping[str, torch.Size], stored_as: Mapping[str, str]) -> None:
    """Raises ModelError unless the adapter's file has these tensors, each of this shape and finite, and no others.
    ``stored_as``: the name of each tensor in the file."""
    told = f"lora.start {str(folder)!r}"
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as stored:
            keys = set(stored.keys())
            missing = [name for name in wanted if stored_as[name] not in keys]
            extra = keys - set(stored_as.values())
            if missing or extra:
                what = f"has no {named(missing)}" if missing else f"has {named(extra)}, for which there is no place"
                raise ModelError(f"{told} {what}: set lora.targets to the layers that it was trained on, and its base")
            for name, shape in wanted.items():
                tensor = stored.get_tensor(stored_as[name])
                if tensor.shape != shape:
                    raise ModelError(
                        f"{told} has {stored_as[name]} of shape {tuple(tensor.shape)} instead of {tuple(shape)}: it "
                        "was trained on another base"
                    )
                if not bool(torch.isfinite(tensor.float()).all()):
                    raise ModelError(f"{told} has weights that are not finite numbers ({stored_as[name]})")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{told}: {WEIGHTS} is damaged ({error}); export or copy the adapter anew") from error
