"""Shapes of the models in a team file, from config.json in a folder or on the hub, without their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teamtr.engines.torch.model_files import ModelError
from teamtr.engines.torch.pretrained import hub_options
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.errors import UserError, first_line
from teamtr.planning.shape import ModelShape


def shape_of_source(source: str, revision: str | None = None) -> ModelShape:
    """The shape of the model in a folder or with a hub id."""
    name = f"model {source!r}"
    folder = Path(source).expanduser()
    if not source.startswith((".", "/", "~")) and not folder.exists():
        return ModelShape.of(_of_hub(source, revision), name)
    if not folder.is_dir():
        raise ModelError(f"{name}: there is no such folder")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{name}: the folder has no config.json; give a folder saved by transformers")
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name}: config.json is damaged ({first_line(error)}); copy the folder anew") from error
    if not isinstance(found, dict):
        raise ModelError(f"{name}: config.json holds no JSON object; copy the folder anew")
    return ModelShape.of(found, name)


def tiny_shape(layers: int, width: int, heads: int) -> ModelShape:
    """The shape of the built-in model (``engines.torch.loading``)."""
    return ModelShape(
        layers=layers,
        width=width,
        inner=3 * width,
        heads=heads,
        kv_heads=max(1, heads // 2),
        head_dim=width // heads,
        vocabulary=len(character_tokenizer()),
        head_norms=True,
    )


def _of_hub(source: str, revision: str | None) -> dict[str, Any]:
    from transformers import AutoConfig

    options = hub_options(source, revision)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {source!r}: its config could not be read ({first_line(error)}); give a folder"
        ) from error
    found: dict[str, Any] = config.to_dict()
    return found
