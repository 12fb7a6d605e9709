"""Loads models and tokenizers from a folder or a hub id: complete, finite, from safetensors, and without running their
code."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from teamtr.engines.slices import is_spread, own, summed
from teamtr.engines.stored import StoredTensor
from teamtr.engines.torch.file_precision import precision_in, remember
from teamtr.engines.torch.model_files import (
    INDEX,
    WEIGHTS,
    ModelError,
    check_folder,
    check_vocabulary,
    conversion,
    named,
    non_finite_in,
    shape_of,
    where_tensors_are,
)
from teamtr.engines.torch.outline import NotInParts, outline
from teamtr.errors import first_line
from teamtr.progress import working

HUB_SECONDS = 10.0
"""Timeout of the query whether the hub has a model."""

_MASKS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$")
"""Causal masks that early versions of transformers stored beside the weights, for GPT-2 and related models."""


def load_pretrained(source: str, revision: str | None = None, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """(model, tokenizer) from a folder or a hub id, in float32 on the device. Raises ModelError unless it is complete
    and finite."""
    from transformers import AutoModelForCausalLM

    place = _place(source, revision)
    tokenizer, _ = _before_weights(place)
    with _explained(place), _silent_report(), working(f"loading {source}{_weight(place)}"):
        model, info = AutoModelForCausalLM.from_pretrained(
            place.where,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # _require_whole raises and names them
            output_loading_info=True,
            **place.options,
        )
    if getattr(model, "peft_config", None):
        raise ModelError(f"model {source!r} is an adapter, not a whole model: merge it into its base and give that")
    _require_whole(place, model, info)
    if place.stored is not None:
        remember(model, precision_in(place.stored, where_tensors_are(source, place.stored).values()))
    model.to(device)  # where checking a billion numbers is fast
    require_finite(model.state_dict(), f"model {source!r}", place.stored)
    return model, tokenizer


def _weight(place: _Place) -> str:
    """The size of the files to read, in words, if it is known in advance."""
    if place.stored is None:
        return ""
    size = sum(file.stat().st_size for file in place.stored.glob("*.safetensors"))
    return f" ({size / 1e9:.2f} GB)"


@dataclass(frozen=True)
class Unloaded:
    """A model of stand-ins and its tokenizer, and the folder with its weights; see ``outline``."""

    source: str
    model: Any
    tokenizer: Any
    stored: Mapping[str, StoredTensor]
    folder: Path

    def require_finite(self, tensors: Mapping[str, Tensor]) -> None:
        """Checks the weights after they were read."""
        require_finite(tensors, f"model {self.source!r}", self.folder)


def load_outline(source: str, revision: str | None = None) -> Unloaded:
    """``load_pretrained`` without the weights. Raises NotInParts if only the whole model can be loaded, and ModelError
    like ``load_pretrained`` except for values, which are not checked yet."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    place = _place(source, revision)
    tokenizer, config = _before_weights(place)
    folder = _fetched(place)
    with _explained(place), _silent_report():
        found = outline(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, folder, where_tensors_are(source, folder))
        model = found.model
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except OSError:  # as the loader does: old models have it in config.json
            model.generation_config = GenerationConfig.from_pretrained(
                folder, config_file_name="config.json", _from_model_config=True
            )
    model.config.name_or_path = model.name_or_path = place.where
    _require_whole(place, model, found.info)
    remember(model, precision_in(folder, where_tensors_are(source, folder).values()))
    return Unloaded(source, model, tokenizer, found.stored, folder)


def _before_weights(place: _Place) -> tuple[Any, Any]:
    """(tokenizer, config) of a causal language model, after checking its folder."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if place.folder is not None:
        check_folder(place.source, place.folder)
    tokenizer = _tokenizer(place)
    with _explained(place):
        config = AutoConfig.from_pretrained(place.where, trust_remote_code=False, **place.options)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model {place.source!r} is a {config.model_type}, which writes no text: give a causal language model"
        )
    return tokenizer, config


def _fetched(place: _Place) -> Path:
    """The folder with all files of a model; those of a hub id are downloaded, or found in the hub's cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    if place.folder is not None:
        return place.folder

    def fetch(name: str) -> Path:
        return Path(hf_hub_download(place.source, name, **place.options))

    config = fetch("config.json")
    if json.loads(config.read_bytes()).get("transformers_weights") is not None:
        raise NotInParts("its config names a file of weights of its own")
    with suppress(EntryNotFoundError):
        fetch("generation_config.json")
    try:
        fetch(WEIGHTS)
    except EntryNotFoundError:
        try:
            index = fetch(INDEX)
        except EntryNotFoundError as error:
            raise NotInParts("there are no safetensors of it") from error  # the loader explains it
        for name in sorted(set(json.loads(index.read_bytes()).get("weight_map", {}).values())):
            fetch(name)
    return config.parent


def load_tokenizer(source: str, revision: str | None = None) -> Any:
    """The tokenizer of a folder or a hub id."""
    place = _place(source, revision)
    if place.folder is not None:
        if not place.folder.is_dir():
            raise ModelError(f"model {source!r}: there is no such folder")
        check_vocabulary(source, place.folder)
    return _tokenizer(place)


def require_source(source: str, revision: str | None = None) -> None:
    """Raises ModelError for a folder that cannot be loaded, and for an id that neither the hub nor its cache has."""
    place = _place(source, revision)
    if place.folder is not None:
        check_folder(source, place.folder)


def require_finite(tensors: Mapping[str, Tensor], told: str, stored: Path | None = None) -> None:
    """Raises a ModelError that names the tensors with values that are not finite numbers, and their files. For
    partitioned tensors, all processes get the same result."""
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    parts = torch.tensor([int(not _is_finite(own(tensors[name]))) for name in names])
    if any(is_spread(tensors[name]) for name in names):
        parts = summed(parts)
    broken = [name for name, count in zip(names, parts.tolist(), strict=True) if count]
    if not broken:
        return
    where = named(broken)
    if stored is not None:  # by their names in the files: some loaders rename tensors
        in_files = non_finite_in(stored, where_tensors_are(told, stored).values())
        where = named(f"{tensor} in {file}" for tensor, file in in_files) or where
    raise ModelError(f"{told} has weights that are not finite numbers ({where}): take a model that is whole")


def _is_finite(tensor: Tensor) -> bool:
    """Checks the minimum and maximum, which are NaN if any number is: one read, and nothing written."""
    if tensor.numel() == 0:
        return True
    ends = torch.aminmax(tensor.detach().float() if tensor.element_size() == 1 else tensor.detach())
    return bool(torch.isfinite(torch.stack(ends)).all())


@dataclass(frozen=True)
class _Place:
    """Where a model is: ``where`` and ``options`` are for loaders; ``folder`` is None for a hub id."""

    source: str
    revision: str | None
    where: str
    folder: Path | None
    options: Mapping[str, Any]

    @property
    def stored(self) -> Path | None:
        """The folder that the weights were read from; None if the hub's cache does not have it."""
        from huggingface_hub import try_to_load_from_cache

        if self.folder is not None:
            return self.folder
        found = try_to_load_from_cache(self.source, "config.json", revision=self.revision)
        return Path(found).parent if isinstance(found, str) else None


def _place(source: str, revision: str | None) -> _Place:
    folder = Path(source).expanduser()
    if source.startswith((".", "/", "~")) or folder.exists():
        if revision is not None:
            raise ModelError(f"model {source!r} is a folder, and revision {revision!r} is for hub ids: leave it out")
        return _Place(source, None, str(folder), folder, {})
    return _Place(source, revision, source, None, {**hub_options(source, revision), "revision": revision})


def _tokenizer(place: _Place) -> Any:
    from transformers import AutoTokenizer

    with _explained(place, what="tokenizer of model"):
        tokenizer = AutoTokenizer.from_pretrained(place.where, trust_remote_code=False, **place.options)
    own = (tokenizer.init_kwargs.get("auto_map") or {}).get("AutoTokenizer") or ()
    classes = [str(name).rpartition(".")[2] for name in ([own] if isinstance(own, str) else own) if name]
    if classes and not any(map(_is_known, classes)):  # the loader fell back to a generic one
        raise ModelError(_NEEDS_CODE.format(f"tokenizer of model {place.source!r}"))
    return tokenizer


def _is_known(name: str) -> bool:
    """Whether transformers has a tokenizer class of this name."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return tokenizer_class_from_name(name) is not None


_NEEDS_CODE = (
    "{} needs Python code that comes with it (auto_map), which is never run: give a model whose architecture and "
    "tokenizer transformers has itself"
)


@contextmanager
def _explained(place: _Place, what: str = "model") -> Iterator[None]:
    """Converts the errors of the readers, which differ by format, to one ModelError that says what to do."""
    told = f"{what} {place.source!r}"
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, NotInParts, ModelError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(_NEEDS_CODE.format(told)) from error
        if place.folder is None and isinstance(error, OSError) and WEIGHTS in str(error):
            raise ModelError(
                f"{told} has no safetensors on the hub; pickled weights are not read, as they can run code. If you "
                f"trust it, write it anew with {conversion(place.source)} and give that folder"
            ) from error
        hint = "a folder saved by transformers" if place.folder else "a folder, a hub id that can be reached, or tiny"
        why = first_line(error)
        if not isinstance(error, OSError | ValueError):
            why = f"{type(error).__name__}: {why}"
        raise ModelError(f"{told} could not be loaded ({why}); give {hint}") from error


@contextmanager
def _silent_report() -> Iterator[None]:
    """Suppresses the loader's table of missing tensors: what it warns of is an error of ours. The logger keeps its
    level, because transformers checks it, and from WARNING on reports at length that no layer was sharded."""
    loader = logging.getLogger("transformers.modeling_utils")
    loader.addFilter(_is_an_error)
    try:
        yield
    finally:
        loader.removeFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _require_whole(place: _Place, model: Any, info: Mapping[str, Any]) -> None:
    """Raises ModelError unless every tensor of the model was stored in its shape, and every stored tensor has a place
    in it. The loader's lists leave out what a model works without: heads tied to embeddings, buffers that are
    computed."""
    kind, told = type(model).__name__, f"model {place.source!r}"
    if missing := info["missing_keys"]:
        raise ModelError(
            f"{told} is not whole: {_files(place, missing)} without {named(missing)}, which {kind} has and which would "
            "be random; copy or save it anew"
        )
    if mismatched := info["mismatched_keys"]:
        shapes = [f"{key} of shape {tuple(found)} instead of {tuple(wanted)}" for key, found, wanted in mismatched]
        raise ModelError(
            f"{told} is not what its config.json says: {_files(place, [key for key, *_ in mismatched])} with "
            f"{named(shapes)}; put the weights and the config.json of one model together"
        )
    if unexpected := [key for key in info["unexpected_keys"] if not _is_mask(place, key)]:
        raise ModelError(
            f"{told} is not what its config.json says: {_files(place, unexpected)} with {named(unexpected)}, for which "
            f"{kind} has no place; put the weights and the config.json of one model together"
        )


def _is_mask(place: _Place, tensor: str) -> bool:
    """Whether a tensor with such a name is a mask: a mask is a single number or has four axes, while a layer's bias has
    one."""
    if not _MASKS.search(tensor) or place.stored is None:
        return False
    shape = shape_of(place.stored / where_tensors_are(place.source, place.stored)[tensor], tensor)
    return tensor.endswith(".masked_bias") or len(shape) == 4


def _files(place: _Place, tensors: Iterable[str]) -> str:
    """The files that these tensors are in, or should be, in words."""
    if place.stored is None:
        return "its weights come"
    held = where_tensors_are(place.source, place.stored)
    files = {held[tensor] for tensor in tensors if tensor in held} or set(held.values())
    return f"{named(files)} {'comes' if len(files) == 1 else 'come'}"


def hub_options(source: str, revision: str | None = None) -> dict[str, bool]:
    """Loader options for this hub id: the hub, or the cache alone if the hub does not answer.

    Raises ModelError if neither has it. The loaders would find out too, but they request file after file, each of them
    repeatedly: a misspelled name would take a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json", revision=revision), timeout=HUB_SECONDS)
    except EntryNotFoundError:
        return {}  # the hub has the id; the loader reports missing files
    except HFValidationError as error:
        raise ModelError(f"model {source!r} is neither a folder nor a hub id (OWNER/NAME) nor tiny") from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"model {source!r}: the hub has no revision {revision!r} of it; give a branch, tag or commit that it has"
        ) from error
    except RepositoryNotFoundError:
        why = "the hub does not know it, or not for you"
    except Exception as error:  # of any HTTP client: all mean that no answer came
        why = f"the hub could not be reached ({first_line(error)})"
    else:
        return {}
    names = ("config.json", "tokenizer_config.json")
    if any(isinstance(try_to_load_from_cache(source, name, revision=revision), str) for name in names):
        return {"local_files_only": True}
    at = "" if revision is None else f" (revision {revision})"
    raise ModelError(f"model {source!r}{at}: there is no such folder, and {why}; give a folder, a hub id or tiny")
