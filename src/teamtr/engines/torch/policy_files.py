"""The files of a policy: the weights of a whole model or of one adapter, and what else is needed to read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from teamtr.engines.policy import WriteTo, write_nothing
from teamtr.engines.saving import files_of, put_files
from teamtr.engines.slices import is_spread, whole
from teamtr.engines.stored import Reader, tensors_in
from teamtr.engines.torch.adapter_files import require_tensors
from teamtr.engines.torch.file_precision import file_precision, note
from teamtr.engines.transfer import off_the_card


@dataclass
class PolicyFiles:
    """Writes and reads a policy. ``model`` is a causal LM of transformers or, with an ``adapter``, a PEFT model;
    ``parameters`` are those that the policy trains."""

    model: Any
    tokenizer: Any
    adapter: str | None
    parameters: Mapping[str, nn.Parameter]

    def to_write(self, *, write: bool = True) -> WriteTo:
        weights: dict[str, Tensor] = {}
        if self.adapter is None and any(map(is_spread, self.parameters.values())):
            for name, tensor in self.model.state_dict().items():
                one = whole(tensor)  # all processes take part, tensor by tensor
                if write:
                    weights[name] = one.cpu()
        elif write:
            weights = off_the_card(self.model.state_dict() if self.adapter is None else _detached(self.parameters))
        if not write:
            return write_nothing
        # Here and once: a tokenizer must not be saved by one thread while another one uses it.
        tokenizer = self._tokenizer_files
        return lambda folder: self._write(folder, weights, tokenizer)

    def _write(self, folder: Path, weights: Mapping[str, Tensor], tokenizer: Mapping[str, bytes]) -> None:
        given = dict(weights)  # save_pretrained removes tied ones from it
        if self.adapter is None:
            self.model.save_pretrained(folder, state_dict=given)
            if file_precision(self.model) != torch.float32:
                note(folder / "config.json", file_precision(self.model))
        else:
            # "auto" would query the hub about the base's vocabulary at every checkpoint
            settings = {"selected_adapters": [self.adapter], "save_embedding_layers": False}
            self.model.save_pretrained(folder, state_dict=given, **settings)
            nested = folder / self.adapter  # PEFT puts adapters of any name but "default" one folder down
            if nested.is_dir():
                for file in nested.iterdir():
                    file.rename(folder / file.name)
                nested.rmdir()
            (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
            _settle(folder / "adapter_config.json", self.model.peft_config[self.adapter])
        put_files(tokenizer, folder)

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        return files_of(self.tokenizer.save_pretrained)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Reads tensor by tensor; of partitioned ones, only the rows of this process."""
        own = self.parameters
        if self.adapter is None:
            stored = tensors_in(sorted(folder.glob("model*.safetensors")))
        else:
            found = tensors_in([folder / "adapter_model.safetensors"])
            stored = {_adapter_key(key, self.adapter): tensor for key, tensor in found.items()}
        missing = sorted(set(own) - set(stored))
        if missing or not stored:
            raise ValueError(f"{folder} does not hold the weights of this agent: {missing[:3] or 'no file'} missing")
        with Reader() as reader:
            for name, parameter in own.items():
                reader.into(parameter, stored[name])

    def start_from(self, folder: Path) -> None:
        """Loads a stored adapter to start from. Raises ModelError if its tensors have other shapes."""
        assert self.adapter is not None
        own = self.parameters
        require_tensors(folder, {k: p.shape for k, p in own.items()}, {k: _stored_key(k, self.adapter) for k in own})
        self.load(folder)


def _settle(file: Path, config: Any) -> None:
    """Makes PEFT's config independent of process and machine. PEFT writes sets in hash order, which differs between
    processes, and the path of the base, which the run records itself and which may change; only the folder's name is
    kept."""
    settings = json.loads(file.read_text())
    base = settings.get("base_model_name_or_path")
    if base and Path(base).is_absolute():
        settings["base_model_name_or_path"] = Path(base).name
    sets = {name: sorted(value) for name, value in settings.items() if isinstance(getattr(config, name, None), set)}
    file.write_text(json.dumps({**settings, **sets}, indent=2, sort_keys=True) + "\n")


def _detached(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in parameters.items()}


def belongs_to(parameter: str, adapter: str) -> bool:
    """Whether a parameter of a PEFT model is this adapter's: ``....lora_A.ADAPTER.weight``."""
    parts = parameter.split(".")
    return len(parts) > 2 and parts[-3] in ("lora_A", "lora_B") and parts[-2] == adapter


def _adapter_key(stored: str, adapter: str) -> str:
    """The parameter of a stored tensor: PEFT drops the adapter's name when it saves."""
    stem, _, last = stored.rpartition(".")
    return f"{stem}.{adapter}.{last}"


def _stored_key(parameter: str, adapter: str) -> str:
    """The inverse: the name under which PEFT saves ``....lora_A.ADAPTER.weight``."""
    stem, _, last = parameter.rpartition(".")
    return f"{stem.removesuffix(f'.{adapter}')}.{last}"
