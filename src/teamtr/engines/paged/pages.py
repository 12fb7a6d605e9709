"""The paged KV cache: pages with reference counts, and prefixes that can be reused.

A page holds PAGE consecutive tokens of one sequence under one version of one agent. Its name is a hash of that version
and of all tokens up to its end, so any sequence with the same prefix under the same weights finds it: the G episodes of
a group, the same problem after another agent's update, an agent's next turn in a context that only grew (its prompt,
and also its message where the chat's text gives the same tokens again).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from teamtr.engines.torch.attention import AttentionShape
from teamtr.types import Ids

SCRATCH = 0
"""The page that rows without work write to."""


class OutOfPages(Exception):
    """More pages are needed than are free or can be evicted."""


class Pages:
    """Allocates a pool of ``count`` pages of ``size`` tokens. Page 0 is scratch and is never handed out."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._free = list(range(count - 1, 0, -1))
        self._holders = [0] * count
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named pages without holders, oldest first
        self.found_tokens = 0
        self.wanted_tokens = 0

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def find(self, version: str, ids: Ids) -> list[int]:
        """The pages of the longest cached prefix of ``ids``, in order. The caller holds them from now on."""
        found = []
        for name in self._names(version.encode(), ids):
            page = self._page_of.get(name)
            if page is None:
                break
            found.append(page)
        for page in found:
            self._hold(page)
        self.wanted_tokens += len(ids)
        self.found_tokens += len(found) * self.size
        return found

    def take(self, count: int) -> list[int]:
        """Allocate this many empty pages, evicting the least recently used prefixes if needed."""
        if count > self.available:
            raise OutOfPages(f"{count} pages are needed and {self.available} can be had")
        taken = []
        for _ in range(count):
            if not self._free:
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._name_of.pop(page)]
                self._free.append(page)
            page = self._free.pop()
            self._holders[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Sequence[int]) -> list[int]:
        """Add a holder to these pages."""
        for page in pages:
            self._hold(page)
        return list(pages)

    def name(self, version: str, ids: Ids, pages: Sequence[int]) -> None:
        """Make the pages that ``ids`` fills reusable as a prefix. Pages at the beginning that have names keep them, and
        the names of the others continue from there."""
        known = next((k for k, page in enumerate(pages) if page not in self._name_of), len(pages))
        before = self._name_of[pages[known - 1]] if known else version.encode()
        for name, page in zip(self._names(before, ids[known * self.size :]), pages[known:], strict=False):
            if name not in self._page_of and page not in self._name_of:
                self._page_of[name] = page
                self._name_of[page] = name

    def give_back(self, pages: Sequence[int]) -> None:
        # Last pages first: the beginning of a sequence is the most reusable, and is evicted last.
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._name_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Drop the names of pages without holders, so that their prefixes are not reused."""
        for page in self._idle:
            del self._page_of[self._name_of.pop(page)]
        self._free += self._idle
        self._idle.clear()

    def _hold(self, page: int) -> None:
        self._holders[page] += 1
        self._idle.pop(page, None)

    def _names(self, name: bytes, ids: Ids) -> Iterator[bytes]:
        """The names of the pages that ``ids`` fills, after a page of this name, or the version."""
        ids = np.ascontiguousarray(ids, dtype=np.int32)
        for start in range(0, len(ids) - self.size + 1, self.size):
            name = hashlib.blake2b(name + ids[start : start + self.size].tobytes(), digest_size=16).digest()
            yield name


class Pool:
    """The tensors of keys and values, [layers, pages, kv heads, PAGE, dim]."""

    def __init__(
        self, attention: AttentionShape, pages: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (attention.layers, pages, attention.kv_heads, size, attention.dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.books = Pages(pages, size)

    @staticmethod
    def bytes_per_page(attention: AttentionShape, size: int, dtype: torch.dtype) -> int:
        return 2 * attention.layers * attention.kv_heads * size * attention.dim * dtype.itemsize

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages."""
        if sources:
            at = torch.tensor([sources, targets], device=self.keys.device)
            for pool in (self.keys, self.values):
                for layer in pool:  # layer by layer, so that the temporary copy stays small
                    layer[at[1]] = layer[at[0]]
