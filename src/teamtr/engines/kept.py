"""Features that sampling computed of messages, kept for the update that trains on them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from torch import Tensor

from teamtr.types import Ids

Keep = Callable[[str, Ids, Ids, Tensor], None]
"""Called for every sampled message with the version of the weights, the prompt, the message, and the features that each
of its tokens was drawn from, [T, H]."""


class KeptFeatures:
    """Features of the newest messages, at most ``budget`` bytes; the oldest are dropped first.

    A message is identified by the version of the weights that wrote it and by all its tokens, including the prompt's.
    Anything else is not found.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._of: OrderedDict[bytes, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def put(self, version: str, prompt: Ids, message: Ids, features_TH: Tensor) -> None:
        """Of identical messages, the last one is kept."""
        assert len(features_TH) == len(message), "one row of features for each token"
        name = _name(version, prompt, message)
        self._drop(name)
        self._of[name] = features_TH
        self.bytes += features_TH.nbytes
        while self.bytes > self.budget:
            self._drop(next(iter(self._of)))

    def find(self, version: str, prompt: Ids, message: Ids) -> Tensor | None:
        return self._of.get(_name(version, prompt, message))

    def clear(self) -> None:
        self._of.clear()
        self.bytes = 0

    def _drop(self, name: bytes) -> None:
        if (features_TH := self._of.pop(name, None)) is not None:
            self.bytes -= features_TH.nbytes


def _name(version: str, prompt: Ids, message: Ids) -> bytes:
    digest = hashlib.blake2b(f"{version} {len(prompt)} {len(message)} ".encode(), digest_size=16)
    for ids in (prompt, message):
        digest.update(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
    return digest.digest()
