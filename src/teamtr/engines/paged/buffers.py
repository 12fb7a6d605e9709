"""Tensors that captured decode steps read and write.

Every row of the running batch has a seat; every open row has a slot for its noise and its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teamtr.engines.paged.pages import SCRATCH
from teamtr.engines.paged.work_split import FEWEST_SEATS, Cluster, Together
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.transfer import send
from teamtr.types import Floats, Ids

SIZES = (FEWEST_SEATS, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batch sizes of captured steps."""
MOST_ENDS = 64
NOBODY = -1
"""Adapter index of a row that is computed with the weights of the copy alone."""


@dataclass(frozen=True)
class Seated:
    """What is written to a seat when a row is admitted."""

    slot: int
    prompt: Ids
    pages: Sequence[int]
    noise_T: NDArray[np.float64]
    end_ids: frozenset[int]
    adapter: int = NOBODY


@dataclass(frozen=True)
class Look:
    """The state of some seats at one point of the stream of steps. What ended before it does not change any more. Who
    reads it waits for that point, but not for what follows it."""

    found: Tensor
    when: torch.cuda.Event | None

    @cached_property
    def _read(self) -> list[list[int]]:
        if self.when is not None:
            self.when.synchronize()
        read: list[list[int]] = self.found.tolist()
        return read

    @property
    def alive(self) -> list[bool]:
        return list(map(bool, self._read[0]))

    @property
    def positions(self) -> list[int]:
        return self._read[1]


@dataclass
class DecodeBuffers:
    """The tensors that captured graphs read and write; their addresses do not change. ``next_uniform`` is the noise of
    each seat's next token. ``kept`` holds the features that each token was drawn from, ``kept_width`` numbers per token
    (0: they are not kept)."""

    rows: int
    tokens: int
    width: int
    members: int
    device: torch.device
    kept_width: int = 0
    kept_dtype: torch.dtype = torch.float32
    token: Tensor = field(init=False)
    position: Tensor = field(init=False)
    next_uniform: Tensor = field(init=False)
    step: Tensor = field(init=False)
    row: Tensor = field(init=False)
    alive: Tensor = field(init=False)
    limit: Tensor = field(init=False)
    ends: Tensor = field(init=False)
    adapter: Tensor = field(init=False)
    table: Tensor = field(init=False)
    uniform: Tensor = field(init=False)
    ids: Tensor = field(init=False)
    logp: Tensor = field(init=False)
    kept: Tensor | None = field(init=False)
    together: Together = field(init=False)
    clusters: list[Cluster] = field(default_factory=list)
    graphs: dict[tuple[int, TokenSampler, bool], Any] = field(default_factory=dict)
    memory: Any = None  # shared by the graphs, and freed with the last of them

    def __post_init__(self) -> None:
        sequences = SIZES[-1]

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        self.token, self.step, self.row = make(sequences), make(sequences), make(sequences)
        self.position = make(sequences, dtype=torch.int32)
        self.next_uniform = make(sequences, dtype=torch.float64)
        self.alive = make(sequences, dtype=torch.bool)
        self.limit, self.adapter, self.ends = make(sequences), make(sequences), make(sequences, MOST_ENDS)
        self.table = make(sequences, self.width, dtype=torch.int32)
        # One spare row, which seats without work write to.
        self.uniform = make(self.rows + 1, self.tokens, dtype=torch.float64)
        self.ids = make(self.rows + 1, self.tokens)
        self.logp = make(self.rows + 1, self.tokens, dtype=torch.float32)
        self.kept = None
        if self.kept_width:
            self.kept = make(self.rows + 1, self.tokens, self.kept_width, dtype=self.kept_dtype)
        self.together = Together.none(sequences, self.members, self.device)
        self._beside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.clear(0)

    def fits(self, rows: int, tokens: int, width: int) -> bool:
        return rows <= self.rows and tokens <= self.tokens and width <= self.width

    @property
    def seats(self) -> tuple[Tensor, ...]:
        """The tensors with an entry per seat, which move when a row changes seats."""
        return (
            self.token,
            self.position,
            self.next_uniform,
            self.step,
            self.row,
            self.alive,
            self.limit,
            self.ends,
            self.adapter,
            self.table,
        )

    def copy_from(self, other: DecodeBuffers) -> None:
        """Take over the rows of smaller buffers."""
        for mine, theirs in zip(self.seats[:-1], other.seats[:-1], strict=True):
            mine.copy_(theirs)
        self.row[self.row == other.rows] = self.rows
        self.table[:, : other.width] = other.table
        for mine, theirs in ((self.uniform, other.uniform), (self.ids, other.ids), (self.logp, other.logp)):
            mine[: other.rows, : other.tokens] = theirs[: other.rows]
        if self.kept is not None and other.kept is not None:
            self.kept[: other.rows, : other.tokens] = other.kept[: other.rows]
        self.clusters = other.clusters
        self.together.put(other.clusters)

    def seat(self, rows: Sequence[Seated], first: int) -> slice:
        """Write these rows to the seats from ``first`` on, before their first token."""
        count, longest = len(rows), max(len(row.noise_T) for row in rows)
        here = slice(first, first + count)
        table = np.full((count, self.width), SCRATCH, dtype=np.int32)
        ends = np.full((count, MOST_ENDS), -1, dtype=np.int64)
        noise = np.zeros((count, longest))
        for i, row in enumerate(rows):
            table[i, : len(row.pages)] = row.pages
            ends[i, : len(row.end_ids)] = sorted(row.end_ids)
            noise[i, : len(row.noise_T)] = row.noise_T

        def sent(values: object, dtype: type = np.int64) -> Tensor:
            return send(np.asarray(values, dtype=dtype), self.device)

        slots = sent([row.slot for row in rows])
        self.uniform[slots, :longest] = sent(noise, np.float64)
        self.table[here], self.ends[here] = sent(table, np.int32), sent(ends)
        self.row[here] = slots
        self.position[here] = sent([len(row.prompt) for row in rows], np.int32)
        self.next_uniform[here] = self.uniform[slots, 0]
        self.limit[here] = sent([len(row.noise_T) for row in rows])
        self.adapter[here] = sent([row.adapter for row in rows])
        self.step[here] = 0
        self.alive[here] = True
        return here

    def look(self, count: int) -> Look:
        """The state of the first seats after the steps so far."""
        found = torch.stack([self.alive[:count].int(), self.position[:count]])
        if self._beside is None:
            return Look(found, None)
        read = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
        when = torch.cuda.Event()
        when.record()
        return Look(read, when)

    def said(self, slots: Sequence[int], tokens: int, look: Look) -> tuple[Ids, Floats]:
        """The first tokens of these rows and their log-probabilities, as they were at that point; on a card, they are
        read beside the steps that follow it."""
        with self._reading(look):
            at = send(np.asarray(slots, dtype=np.int64), self.device)
            ids, logp = self.ids[:, :tokens][at].cpu(), self.logp[:, :tokens][at].cpu()
        return ids.numpy().astype(np.int32), logp.numpy()

    @contextmanager
    def _reading(self, look: Look) -> Iterator[None]:
        if self._beside is None or look.when is None:
            yield
            return
        self._beside.wait_event(look.when)
        with torch.cuda.stream(self._beside):
            yield

    def clear(self, first: int) -> None:
        """Mark the seats from ``first`` on as without work."""
        self.alive[first:] = False
        self.table[first:] = SCRATCH
        self.position[first:] = 0
        self.step[first:] = 0
        self.row[first:] = self.rows
        self.adapter[first:] = NOBODY

    def keep(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        index = send(np.asarray(sequences, dtype=np.int64), self.device)
        for state in self.seats:
            state[: len(sequences)] = state[index]
        self.clear(len(sequences))

    def record(self, here: slice, ids_N: Tensor, logp_N: Tensor, features_NH: Tensor, *, fed: bool = False) -> None:
        """Store the tokens of these seats, with the features they were drawn from, and advance. ``fed``: each of them
        was drawn after its row's last token had been fed, so one more key and value is in the pages. Seats without work
        write to the spare row."""
        if self.device.type == "cuda":
            from teamtr.engines.paged.drawing_kernels import record_tokens

            seats = tuple(state[here] for state in self.seats[:-2])  # all but adapter and table
            record_tokens(ids_N, logp_N, features_NH, seats, self.uniform, self.ids, self.logp, self.kept, fed=fed)
            return
        alive_N, step_N = self.alive[here], self.step[here]
        if fed:
            self.position[here] += alive_N
        target_N = torch.where(alive_N, self.row[here], self.rows)
        self.ids.index_put_((target_N, step_N), ids_N)
        self.logp.index_put_((target_N, step_N), logp_N)
        if self.kept is not None:
            self.kept.index_put_((target_N, step_N), features_NH.to(self.kept.dtype))
        ended_N = (ids_N[:, None] == self.ends[here]).any(1)
        goes_on_N = alive_N & ~ended_N & (step_N + 1 < self.limit[here])
        self.token[here] = torch.where(alive_N, ids_N, self.token[here])
        self.step[here] = step_N + goes_on_N
        self.next_uniform[here] = self.uniform[self.row[here], self.step[here]]
        self.alive[here] = goes_on_N
