"""How the reads of a decode step are divided: among several programs for one row, or one program for several rows.

A card needs many programs at once, so with few rows, the pages of each are split among several programs (``splits``).
Rows that begin with the same pages, such as the episodes of a group, read these together (``clusters``): once for up to
``most_members`` rows, each of which continues alone from its first page of its own. The common pages of a cluster are
also split among programs (``shares``), the more the fewer rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from teamtr.engines.transfer import send
from teamtr.types import common_beginning

SPLIT_TARGET = 4 * 132
"""Programs wanted on the card: with fewer rows times kv heads, a row's pages are split among several programs."""
MOST_SPLITS = 64
FEWEST_SEATS = 8
"""Rows of the smallest captured step. Some are empty where few rows are left or few long contexts fit, so each row gets
as many programs as if half of them were."""
SHARES_TARGET = 4096
"""Maximum number of programs, counting one for every row and kv head, among which the common pages of clusters are
split."""
QUERIES = 16
"""Queries for which one program reads a common page."""
MOST_QUERIES = 64
"""Upper limit in half precision, enough for eight rows; more would not fit into a program's registers."""
WORTH_SPARING = 48 << 20
"""Bytes of a layer's keys and values that clusters must save: one more kernel costs as much as reading these, and what
other rows have read is often still in the card's cache."""
WORTH_SPARING_FEW = 256 << 20
"""The same for few rows with several programs each: a card's cache holds their common pages, unless these are many. Not
measured on a card."""

Cluster = tuple[list[int], int]
"""Rows, and the number of pages that they begin with in common."""


def splits(rows: int, kv_heads: int) -> int:
    """Programs for the pages of one row and one kv head."""
    count, taken = 1, rows if rows > FEWEST_SEATS else rows / 2
    while taken * kv_heads * count < SPLIT_TARGET and count < MOST_SPLITS:
        count *= 2
    return count


def shares(rows: int, kv_heads: int) -> int:
    """Programs for the common pages of one cluster and one kv head."""
    return next((n for n in (16, 8, 4, 2) if n * rows * kv_heads <= SHARES_TARGET), 1)


def most_members(group: int, dtype: torch.dtype) -> int:
    """Rows that can read common pages together, with ``group`` query heads per kv head; 1 if none can."""
    queries = QUERIES if dtype == torch.float32 else min(MOST_QUERIES, max(QUERIES, 8 * group))
    return max(1, queries // group)


def worth_sparing(rows: int, kv_heads: int) -> int:
    """Bytes of a layer that clusters of this many rows must save."""
    return WORTH_SPARING if splits(rows, kv_heads) == 1 else WORTH_SPARING_FEW


def clusters(pages: Sequence[list[int]], most: int) -> list[Cluster]:
    """Rows that read their first pages together, at most ``most`` per cluster. The rows are sorted by their pages and
    cut into runs so that the fewest pages are read; rows that share nothing are in no cluster."""
    order = sorted(range(len(pages)), key=pages.__getitem__)
    alike = [_in_common(a, b) for a, b in pairwise(pages[row] for row in order)]
    spares, sizes = [0], [0]  # of the first rows in that order: pages saved, and the size of the last cluster
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


def _in_common(a: list[int], b: list[int]) -> int:
    """Number of pages that both begin with. Rows of different prompts mostly differ in the first one, so that is
    compared first."""
    return common_beginning(np.asarray(a), np.asarray(b)) if a[0] == b[0] else 0


def remaining(found: Sequence[Cluster], stays: Sequence[bool]) -> list[Cluster]:
    """The clusters after some rows have left and the others have moved up."""
    place = np.cumsum(stays) - 1
    kept = (([int(place[row]) for row in rows if stays[row]], common) for rows, common in found)
    return [cluster for cluster in kept if len(cluster[0]) > 1]


def spared(found: Sequence[Cluster]) -> int:
    """Number of page reads that clusters save."""
    return sum((len(rows) - 1) * common for rows, common in found)


class Together(NamedTuple):
    """The clusters of a step, as kernels read them."""

    member_CM: Tensor
    """The rows of each cluster; -1 for unused entries."""
    pages_C: Tensor
    """Number of pages that they have in common; 0 for unused entries."""
    first_N: Tensor
    """The first page that a row reads alone."""

    @staticmethod
    def none(rows: int, members: int, device: torch.device) -> Together:
        """Room for the clusters of this many rows: at most half as many."""
        return Together(
            torch.full((rows // 2, members), -1, dtype=torch.int32, device=device),
            torch.zeros(rows // 2, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def put(self, found: Sequence[Cluster]) -> None:
        """Write these clusters into the same tensors, which captured graphs read."""
        member = np.full(self.member_CM.shape, -1, dtype=np.int32)
        pages, first = np.zeros(len(member), dtype=np.int32), np.zeros(len(self.first_N), dtype=np.int32)
        for c, (rows, common) in enumerate(found):
            member[c, : len(rows)] = rows
            pages[c], first[rows] = common, common
        for target, source in zip(self, (member, pages, first), strict=True):
            target.copy_(send(source, target.device))

    def of(self, rows: int) -> Together:
        """The part that a step of the first rows needs."""
        return Together(self.member_CM[: rows // 2], self.pages_C[: rows // 2], self.first_N[:rows])
