"""Tensors in safetensors files, read where they are needed: all of one, or the rows that this process holds of it.

Files are mapped into memory, so that what nobody asks for is never read.
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
    """Where a tensor is: the file, and its name there."""

    file: Path
    key: str


def tensors_in(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of these files, by their headers."""
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found.update({key: StoredTensor(file, key) for key in opened.offset_keys()})
    return found


class Reader:
    """Reads tensors of several files, each of which is opened once. ``read_bytes``: how much of them was asked for."""

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
        """The rows that this process holds of a tensor like that one."""
        rows = own_rows(like)
        if rows is None:
            return self.whole(stored)
        lazy = self._file(stored).get_slice(stored.key)
        if rows.start == rows.stop:  # more processes than rows
            return torch.empty(0, *lazy.get_shape()[1:])
        return self._counted(lazy[rows])

    @torch.no_grad()
    def into(self, target: Tensor, stored: StoredTensor) -> None:
        """Fill what this process holds of the target, in its dtype and on its device: where it is cast, too, so that
        half precision goes to a card as it is in the file."""
        part = self.part(stored, target)
        own(target).copy_(part.to(target.device))

    def _file(self, stored: StoredTensor) -> Any:
        if stored.file not in self._files:
            self._files[stored.file] = self._open.enter_context(safe_open(stored.file, framework="pt"))
        return self._files[stored.file]

    def _counted(self, tensor: Tensor) -> Tensor:
        self.read_bytes += tensor.numel() * tensor.element_size()
        return tensor


def load_parts(file: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a file, copied out of it: of those with a name in ``like`` the rows that are held of that one."""
    with Reader() as reader:
        return {
            name: (reader.part(stored, like[name]) if name in like else reader.whole(stored)).clone()
            for name, stored in tensors_in([file]).items()
        }
