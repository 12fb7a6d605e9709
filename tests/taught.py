"""The tiny base is taught once for each form and kept: what teaching ends with depends on what it is given alone.

Dozens of tests build the same small team, and most of their time went into teaching it anew. The tests of teaching
itself, and of a run that must repeat it, ask for ``teaching_for_real``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from teamtr.engines.hashing import hash_tensors
from teamtr.engines.torch.loading import teach_form
from teamtr.session import models


def remember_teaching(folder: Path) -> None:
    """From now on, in this process: weights that were taught the same are read from the folder."""
    folder.mkdir(parents=True, exist_ok=True)

    def remembered(model: Any, examples: Sequence[tuple[Any, Any]], **settings: Any) -> None:
        said = hashlib.sha256(repr(sorted(settings.items())).encode())
        for prompt, message in examples:
            said.update(f"{len(prompt)} {len(message)} ".encode() + prompt.tobytes() + message.tobytes())
        weights = dict(model.named_parameters())
        file = folder / f"{hash_tensors(weights, salt=said.hexdigest())}.safetensors"
        if not file.exists():
            teach_form(model, examples, **settings)
            own = file.with_suffix(f".{os.getpid()}")  # other workers may be at it too
            save_file({name: weight.detach().contiguous() for name, weight in weights.items()}, own)
            os.replace(own, file)
        with torch.no_grad():
            for name, weight in load_file(file).items():
                weights[name].copy_(weight)
        model.eval()

    models.teach_form = remembered


@contextmanager
def teaching_for_real() -> Iterator[None]:
    remembered, models.teach_form = models.teach_form, teach_form
    try:
        yield
    finally:
        models.teach_form = remembered
