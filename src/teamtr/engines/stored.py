"""Reads tensors from safetensors files: whole, or only the rows that this process holds.

Files are memory-mapped, so that nothing is read that is not requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from teamtr.engines.slices import own, own_rows


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored: the file, and its name there."""

    file: Path
    key: str


def tensors_in(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of these files, from their headers."""
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found.update({key: StoredTensor(file, key) for key in opened.offset_keys()})
    return found


class Reader:
    """Reads tensors of several files, each of which is opened once. ``read_bytes``: how many bytes were requested."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()

    def whole(self, stored: StoredTensor) -> Tensor:
        return self._counted(self._file(stored).get_tensor(stored.key))

    def part(self, stored: StoredTensor, like: Tensor) -> Tensor:
        """The rows of a stored tensor that this process holds of ``like``."""
        rows = own_rows(like)
        if rows is None:
            return self.whole(stored)
        lazy = self._file(stored).get_slice(stored.key)
        if rows.start == rows.stop:  # more processes than rows
            return torch.empty(0, *lazy.get_shape()[1:])
        return self._counted(lazy[rows])

    @torch.no_grad()
    def into(self, target: Tensor, stored: StoredTensor) -> None:
        """Fills the part of the target that is in this process, in its dtype and on its device."""
        own(target).copy_(self.part(stored, target))

    def _file(self, stored: StoredTensor) -> Any:
        if stored.file not in self._files:
            self._files[stored.file] = self._open.enter_context(safe_open(stored.file, framework="pt"))
        return self._files[stored.file]

    def _counted(self, tensor: Tensor) -> Tensor:
        self.read_bytes += tensor.numel() * tensor.element_size()
        return tensor


def load_parts(file: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a file, copied out of it; of those with a name in ``like``, only the rows that this process holds
    of that tensor."""
    with Reader() as reader:
        return {
            name: (reader.part(stored, like[name]) if name in like else reader.whole(stored)).clone()
            for name, stored in tensors_in([file]).items()
        }
