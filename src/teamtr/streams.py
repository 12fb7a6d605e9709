"""``ports.Sampler.stream`` for engines that sample one batch of one agent at a time, until its longest message ends.

Rows are queued by agent and decoding. The longest queue is sampled next; of equally long ones, the one with the oldest
row. If all episodes request the same agent, they run in lockstep, and messages that end early wait for the longest.
Engines with continuous batching have a stream of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from teamtr.answers import Decoding, Ended, Sample, Wanted
from teamtr.ports import Batches, Follow, Heard, More, unfollowed, unheard
from teamtr.progress import working
from teamtr.types import Ids


class Batch(NamedTuple):
    """The properties that rows must share to be sampled in one batch."""

    agent: str
    decoding: Decoding

    @staticmethod
    def of(wanted: Wanted) -> Batch:
        return Batch(wanted.agent, wanted.decoding)


def in_turns(sampler: Batches, more: More, *, heard: Heard = unheard, follow: Follow = unfollowed) -> None:
    """A stream implemented with ``sample``."""
    waiting: dict[Batch, dict[int, Wanted]] = {}
    ended: list[Ended] = []
    rows = 0
    while True:
        for one in more(ended):
            waiting.setdefault(Batch.of(one), {})[rows] = one
            rows += 1
        if not waiting:
            return
        batch = max(waiting, key=lambda batch: (len(waiting[batch]), -min(waiting[batch])))
        ended = sample_batch(sampler, waiting.pop(batch), heard, follow)


def sample_batch(sampler: Batches, wanted: Mapping[int, Wanted], heard: Heard, follow: Follow) -> list[Ended]:
    """Samples these rows in one batch; keys are their indices in the stream. Each row ends where its noise ends."""
    rows, limits = list(wanted), [len(one.noise_T) for one in wanted.values()]
    batch, noise_BT = Batch.of(wanted[rows[0]]), np.full((len(rows), max(limits)), np.nan)
    for noise_T, one in zip(noise_BT, wanted.values(), strict=True):
        noise_T[: len(one.noise_T)] = one.noise_T
    cut = min(limits) < max(limits)

    def told(place: int, sample: Sample) -> None:
        heard(rows[place], _cut(sample, limits[place]))

    def followed(place: int, before: int, token_ids: Ids) -> bool:
        room = limits[place] - before
        return bool(room > 0 and follow(rows[place], before, token_ids[:room])) and len(token_ids) < room

    with working(f"sampling {batch.agent}"):
        samples = sampler.sample(
            batch.agent,
            [one.prompt for one in wanted.values()],
            noise_BT,
            decoding=batch.decoding,
            heard=heard if heard is unheard else told,
            follow=followed if cut or follow is not unfollowed else follow,
        )
    return [Ended(row, _cut(sample, limit)) for row, sample, limit in zip(rows, samples, limits, strict=True)]


def _cut(sample: Sample, limit: int) -> Sample:
    """Truncates the sample of an engine that did not end the row where its noise ended."""
    if len(sample.token_ids) <= limit:
        return sample
    return replace(sample, token_ids=sample.token_ids[:limit], logprobs=sample.logprobs[:limit], finish="length")


class InTurns:
    """Mixin for a sampler whose stream consists of separate batches."""

    def stream(self: Batches, more: More, *, heard: Heard = unheard, follow: Follow = unfollowed) -> None:
        in_turns(self, more, heard=heard, follow=follow)
