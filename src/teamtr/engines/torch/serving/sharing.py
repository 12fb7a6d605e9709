"""How a decode step's reading is shared out: many programs for one row, or one program for many rows.

A card wants many programs at once, so the pages of few rows are split among several (``splits``). Many rows that begin
with the same pages, as the episodes of a group do, read these together instead (``clusters``): once for up to
``most_members`` rows, each of which goes on alone from its first page of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

SPLIT_TARGET = 4 * 132
"""Programs wanted on the card: with fewer rows than this, a row's pages are shared out among several programs."""
MOST_SPLITS = 16
SHARES_TARGET = 4096
"""Rows times kv heads from which the common pages of a cluster have one program; with fewer, up to four."""
QUERIES = 16
"""Queries that one program holds against a common page; more where eight rows have more."""
WORTH_SPARING = 48 << 20
"""Bytes of a layer's keys and values that must be spared: another kernel costs as much as reading these, where
neighbours' reading is often in the cache already."""


def splits(rows: int, kv_heads: int) -> int:
    """Programs for the pages of one row and one kv head."""
    count = 1
    while rows * kv_heads * count < SPLIT_TARGET and count < MOST_SPLITS:
        count *= 2
    return count


def shares(rows: int, kv_heads: int) -> int:
    """Programs for the common pages of one cluster and one kv head."""
    return 4 if 4 * rows * kv_heads <= SHARES_TARGET else 2 if 2 * rows * kv_heads <= SHARES_TARGET else 1


def most_members(group: int) -> int:
    """Rows that read common pages together, with ``group`` query heads to a kv head."""
    return max(QUERIES // group, 8)


def clusters(pages: Sequence[list[int]], most: int) -> list[tuple[list[int], int]]:
    """Rows that read their first pages together, at most ``most`` in one cluster: (rows, pages in common). Of all ways
    to cut the rows, sorted by their pages, the one that spares most reading; rows that share nothing are in none."""
    order = sorted(range(len(pages)), key=pages.__getitem__)
    alike = [_common(pages[a], pages[b]) for a, b in pairwise(order)]
    spares, sizes = [0], [0]  # of the first rows in that order, and the size of their last cluster
    for end in range(1, len(order) + 1):
        best, best_size, common = spares[end - 1], 1, len(pages[order[end - 1]])
        for size in range(2, min(most, end) + 1):
            common = min(common, alike[end - size])
            if not common:
                break
            if (found := spares[end - size] + (size - 1) * common) > best:
                best, best_size = found, size
        spares.append(best)
        sizes.append(best_size)
    cut, end = [], len(order)
    while end:
        first = end - sizes[end]
        if sizes[end] > 1:
            cut.append((order[first:end], min(alike[first : end - 1])))
        end = first
    return cut[::-1]


def spared(found: Sequence[tuple[Sequence[int], int]]) -> int:
    """Pages that clusters need not read."""
    return sum((len(rows) - 1) * common for rows, common in found)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for k, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return k
    return min(len(a), len(b))


@dataclass
class Common:
    """Clusters as tensors, whose addresses stay: what captured graphs read."""

    seats: int
    members: int
    device: torch.device
    member_CM: Tensor = field(init=False)
    """The rows of each cluster; -1 where there is none."""
    pages_C: Tensor = field(init=False)
    first_N: Tensor = field(init=False)
    """The first page that a row reads alone."""
    count: int = 0

    def __post_init__(self) -> None:
        most = self.seats // 2
        self.member_CM = torch.full((most, self.members), -1, dtype=torch.int32, device=self.device)
        self.pages_C = torch.zeros(most, dtype=torch.int32, device=self.device)
        self.first_N = torch.zeros(self.seats, dtype=torch.int32, device=self.device)

    def put(self, found: Sequence[tuple[Sequence[int], int]]) -> None:
        """These clusters from now on."""
        if not found and not self.count:
            return
        member = np.full(self.member_CM.shape, -1, dtype=np.int32)
        pages, first = np.zeros(len(member), dtype=np.int32), np.zeros(self.seats, dtype=np.int32)
        for c, (rows, common) in enumerate(found):
            member[c, : len(rows)] = rows
            pages[c], first[rows] = common, common
        for target, source in ((self.member_CM, member), (self.pages_C, pages), (self.first_N, first)):
            target.copy_(torch.from_numpy(source))
        self.count = len(found)

    def of(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a step of this many rows needs: it has half as many clusters at most."""
        return self.member_CM[: rows // 2], self.pages_C[: rows // 2], self.first_N[:rows]
