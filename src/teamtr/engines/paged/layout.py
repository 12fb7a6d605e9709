"""Attention layouts over pages: decoding one token per row, and prefilling prompts in passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from teamtr.engines.paged import reference
from teamtr.engines.paged.pages import Pool
from teamtr.engines.paged.work_split import Together
from teamtr.engines.torch.rotation import Rotation
from teamtr.engines.transfer import send

BLOCK = 64
"""Query tokens of one program of the prefill kernel."""


def _computing(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return reference
    from teamtr.engines.paged import kernels

    return kernels


@dataclass(frozen=True)
class Decoding:
    """One new token per row, after ``length_N`` tokens in the row's pages."""

    pool: Pool
    table_NP: Tensor
    length_N: Tensor
    together: Together | None = None

    longest = 0  # sliding windows were checked by the prefill, for all pages of these rows

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, rotation: Rotation | None = None
    ) -> Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        attention: Tensor = _computing(query.device).decode_attention(
            query, key, value, keys, values, self.table_NP, self.length_N, scale, rotation, self.together
        )
        return attention


class Piece(NamedTuple):
    """The tokens of one prompt from ``start`` up to ``end``, exclusive."""

    prompt: int
    start: int
    end: int


def portions(prompts: Sequence[tuple[int, int]], most: int) -> Iterator[list[Piece]]:
    """The pieces of each prefill pass, in order, at most ``most`` tokens per pass; ``prompts`` are (tokens already in
    pages, tokens in total). A prompt is cut only if it is too long for a pass by itself, and then between two blocks of
    queries, so that attention computes the same blocks as without the cut."""
    most = max(BLOCK, most // BLOCK * BLOCK)
    part: list[Piece] = []
    room = most
    for prompt, (known, length) in enumerate(prompts):
        for start in range(known, length, most):
            piece = Piece(prompt, start, min(length, start + most))
            if piece.end - piece.start > room:
                yield part
                part, room = [], most
            part.append(piece)
            room -= piece.end - piece.start
    if part:
        yield part


@dataclass(frozen=True)
class Prefilling:
    """The new tokens of several prompts, each from ``known`` on, end to end."""

    pool: Pool
    table_RP: Tensor
    page_N: Tensor
    slot_N: Tensor
    position_N: Tensor
    blocks: Tensor
    last_R: Tensor
    longest: int

    @staticmethod
    def of(pool: Pool, rows: Sequence[tuple[Sequence[int], int, int]], device: torch.device) -> Prefilling:
        """``rows`` are (pages, tokens already in them, tokens in them after this pass)."""
        size = pool.books.size
        width = max(len(pages) for pages, _, _ in rows)
        table = np.array([[*pages, *[0] * (width - len(pages))] for pages, _, _ in rows], dtype=np.int32)
        position = np.concatenate([np.arange(known, length) for _, known, length in rows])
        row = np.repeat(np.arange(len(rows)), [length - known for _, known, length in rows])
        blocks, first, last = [], 0, []
        for r, (_, known, length) in enumerate(rows):
            for start in range(known, length, BLOCK):
                blocks.append((r, first + start - known, min(BLOCK, length - start), start))
            first += length - known
            last.append(first - 1)
        return Prefilling(
            pool=pool,
            table_RP=send(table, device),
            page_N=send(table[row, position // size].astype(np.int64), device),
            slot_N=send(position % size, device),
            position_N=send(position, device),
            blocks=send(np.ascontiguousarray(np.array(blocks, dtype=np.int32).T), device),
            last_R=send(np.array(last), device),
            longest=size * width,
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, rotation: Rotation | None = None
    ) -> Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        computing = _computing(query.device)
        if rotation is None:
            keys[self.page_N, :, self.slot_N] = key.to(keys.dtype)
            values[self.page_N, :, self.slot_N] = value.to(values.dtype)
        else:
            query = computing.rotate_into_pages(query, key, value, rotation, keys, values, self.page_N, self.slot_N)
        attention: Tensor = computing.prefill_attention(query, keys, values, self.table_RP, self.blocks, scale)
        return attention
