"""The precision of a model's files: training computes in float32, and exports are rounded to the files' precision
again.

Otherwise, a bfloat16 model that is trained, or whose adapter is merged, would be exported at twice its size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

_NAMES = {"BF16": torch.bfloat16, "F16": torch.float16}
_REMEMBERED = "precision_of_its_file"


def precision_in(folder: Path, files: Iterable[str]) -> torch.dtype:
    """The precision of most numbers in these safetensors files, from their headers. Anything but half precision counts
    as float32."""
    counts: Counter[str] = Counter()
    for name in sorted(set(files)):
        with safe_open(folder / name, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 (it is no mapping)
                part = stored.get_slice(key)
                counts[part.get_dtype()] += torch.Size(part.get_shape()).numel()
    return _NAMES.get(counts.most_common(1)[0][0], torch.float32) if counts else torch.float32


def remember(model: Any, precision: torch.dtype) -> None:
    setattr(model, _REMEMBERED, precision)


def in_float32(model: Any) -> Any:
    """Converts the model to float32 and records the precision that it had."""
    remember(model, model.dtype)
    return model.float()


def file_precision(model: Any) -> torch.dtype:
    """The recorded precision; for a model that is in no file, its own."""
    found: torch.dtype = getattr(model, _REMEMBERED, model.dtype)
    return found


def as_in_file(model: Any) -> Any:
    """Rounds a float32 model to the precision of its file. A model that was rounded on purpose stays as it is."""
    return model.to(file_precision(model)) if model.dtype == torch.float32 else model


def note(config: Path, precision: torch.dtype) -> None:
    """Writes the file's precision into a checkpoint's config.json. The weights beside it are float32, so that training
    can resume."""
    settings = json.loads(config.read_text())
    settings["dtype"] = str(precision).removeprefix("torch.")
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def round_as_noted(folder: Path) -> None:
    """Rounds the float32 weights of a copied checkpoint to the precision in its config.json, file by file."""
    precision = getattr(torch, str(json.loads((folder / "config.json").read_text()).get("dtype")), torch.float32)
    if precision not in _NAMES.values():
        return
    saved = 0
    for file in sorted(folder.glob("model*.safetensors")):
        weights = {k: t.to(precision) if t.dtype == torch.float32 else t for k, t in load_file(file).items()}
        saved += sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        save_file(weights, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())
        listed.setdefault("metadata", {})["total_size"] = saved
        index.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n")
