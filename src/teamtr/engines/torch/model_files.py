"""Checks the files of a model's folder before anything is loaded: complete, readable, and safe to read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from teamtr.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")

VOCABULARIES = ("tokenizer.json", "tekken.json", "*vocab*", "*.model", "*.tiktoken")
"""Files that may hold a tokenizer's vocabulary, one of which must exist."""

SHOWN = 3
"""Most tensors named in an error."""


class ModelError(UserError):
    """A model could not be built; the message says which and what to do."""


def check_folder(source: str, folder: Path) -> None:
    """Checks everything that can be checked without loading the model. Loaders would report it in other words, or not
    at all: without a vocabulary they make an empty tokenizer, and code in a pickle is run."""
    if not folder.is_dir():
        raise ModelError(f"model {source!r}: there is no such folder")
    if (folder / ADAPTER).is_file():
        raise ModelError(
            f"model {source!r} is an adapter, not a whole model: merge it into its base (`teamtr export RUN FOLDER "
            "--agent NAME --merged`, or merge_and_unload of PEFT) and give that folder. To go on training it, give its "
            f"base as the agent's model and lora: {{start: {source}}}"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {source!r}: {_what_it_is_instead(source, folder)}")
    check_vocabulary(source, folder)
    where_tensors_are(source, folder)


def _what_it_is_instead(source: str, folder: Path) -> str:
    """What a folder without config.json is instead: runs and exported teams are often given for one of their agents."""
    if (folder / "checkpoints" / "commits").is_dir():
        return (
            f"this is a run folder, not a model; `teamtr export {shlex.quote(source)} FOLDER --agent NAME --merged` "
            "writes one of its agents as a model: give that folder"
        )
    if adapters := sorted(file.parent.name for file in folder.glob(f"*/{ADAPTER}")):
        return (
            f"this folder holds adapters ({named(adapters)}), not a model: export whole models (`teamtr export RUN "
            "FOLDER --merged`) and give the folder of one of them"
        )
    if inside := sorted(file.parent for file in folder.glob("*/config.json")):
        return f"this folder holds several models, not one: give one of them ({named(map(str, inside))})"
    return "the folder has no config.json; give a folder saved by transformers"


def check_vocabulary(source: str, folder: Path) -> None:
    """Checks only the files of the tokenizer."""
    if not any(found for form in VOCABULARIES for found in folder.glob(form)):
        raise ModelError(
            f"model {source!r}: the folder has no tokenizer (no tokenizer.json and no other vocabulary); save the "
            "model's tokenizer into it as well"
        )
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        if (folder / name).is_file():  # optional here: the loader reports those it needs
            _mapping(source, folder / name)


def where_tensors_are(source: str, folder: Path) -> dict[str, str]:
    """Maps each tensor to the name of the file that holds it, from the files' own headers. All files must be whole and
    inside the folder."""
    explicit = _mapping(source, folder / "config.json").get("transformers_weights")
    names = [explicit] if isinstance(explicit, str) else [WEIGHTS, INDEX]
    for told in names:
        _require_inside(source, "config.json", told)
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is None:
        raise ModelError(f"model {source!r}: {_without_weights(source, folder, names)}")
    if not name.endswith(".json"):
        return dict.fromkeys(_tensors(source, folder, name), name)
    listed = _listed(source, folder / name)
    inside = {shard: _tensors(source, folder, shard) for shard in sorted(set(listed.values()))}
    absent = sorted(tensor for tensor, shard in listed.items() if tensor not in inside[shard])
    if absent:
        raise ModelError(
            f"model {source!r} is not whole: by {name} {listed[absent[0]]} holds {named(absent)}, and it does not; "
            "copy or save the folder anew"
        )
    return {tensor: shard for shard, tensors in inside.items() for tensor in tensors}


def named(tensors: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    names = sorted(tensors)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def conversion(source: str) -> str:
    """A command that rewrites a model as safetensors, for users who trust its pickle."""
    read, kept = f"from_pretrained({source!r})", "save_pretrained('NEW')"
    return (
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f'M.{read}.{kept}; T.{read}.{kept}"'
    )


def non_finite_in(folder: Path, files: Iterable[str]) -> list[tuple[str, str]]:
    """(tensor, file) of every stored tensor with a value that is not a finite number."""
    found = []
    for name in sorted(set(files)):
        with safe_open(folder / name, framework="pt") as stored:
            for tensor in sorted(stored.keys()):
                value = stored.get_tensor(tensor)
                if value.is_floating_point() and not bool(torch.isfinite(value.float()).all()):
                    found.append((tensor, name))
    return found


def shape_of(file: Path, tensor: str) -> list[int]:
    with safe_open(file, framework="pt") as stored:
        return list(stored.get_slice(tensor).get_shape())


def _without_weights(source: str, folder: Path, names: list[str]) -> str:
    pickles = sorted(file.name for form in PICKLES for file in folder.glob(form))
    if not pickles:
        return f"the folder has no weights (no {' and no '.join(names)}); copy or save it anew"
    return (
        f"its weights are a pickle ({pickles[0]}), which can run code when it is read, and there is no {WEIGHTS}. If "
        f"you trust it, write it anew with {conversion(str(folder))} and give that folder"
    )


def _listed(source: str, index: Path) -> dict[str, str]:
    """The index: tensors and the files that hold them. Only safetensors files are accepted, because others would be
    unpickled."""
    listed = _mapping(source, index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(shard, str) for shard in listed.values()):
        raise ModelError(f"model {source!r}: {index.name} has no weight_map of tensors to files; copy the folder anew")
    for shard in sorted(set(listed.values())):
        _require_inside(source, index.name, shard)
        if not (index.parent / shard).is_file():
            raise ModelError(
                f"model {source!r} is not whole: {index.name} names {shard}, which is missing; copy the folder anew"
            )
    return listed


def _require_inside(source: str, teller: str, name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise ModelError(
            f"model {source!r}: {teller} names {name!r}, which is no safetensors file inside the folder; take the one "
            "that came with the weights"
        )


def _tensors(source: str, folder: Path, name: str) -> set[str]:
    """The tensors of one file, from its header; the file must have the length that the header implies."""
    try:
        with safe_open(folder / name, framework="pt") as stored:
            return set(stored.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"model {source!r} could not be loaded ({name} is damaged: {error}); copy or save the folder anew"
        ) from error


def _mapping(source: str, file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"model {source!r} could not be loaded ({file.name} is damaged: {error}); copy or save the folder anew"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(
            f"model {source!r} could not be loaded ({file.name} holds no JSON object); copy or save the folder anew"
        )
    return found
