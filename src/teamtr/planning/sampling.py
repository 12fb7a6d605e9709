"""Seconds of sampling a batch: prefill and decode steps, bound by products, memory bandwidth or launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from teamtr.engines.paged.sampler import PAGE, SIZES
from teamtr.engines.paged.work_split import most_members, worth_sparing
from teamtr.planning import rates
from teamtr.planning.cards import Card
from teamtr.planning.memory import is_shared, moved_by_cast
from teamtr.planning.seconds import Load, Spent
from teamtr.planning.setup import PlannedTurn, Setup
from teamtr.planning.shape import ModelShape


@dataclass(frozen=True)
class Decoder:
    """One model that samples on one card. ``pages``: most bytes of keys and values; None on the plain path, where steps
    are launched from Python and there is no paged KV cache. ``moved``: bytes per weight that a cast reads and writes
    before a product."""

    shape: ModelShape
    card: Card
    precision: str = "fp16"
    pages: int | None = None
    itemsize: int = 2
    moved: int = 0

    @property
    def paged(self) -> bool:
        return self.pages is not None

    def at_once(self, turn: PlannedTurn, rows: int, group: int) -> int:
        """Rows that are decoded together: as many as KV pages hold and graphs are captured for."""
        if self.pages is None:
            return rows
        shared = turn.alike // PAGE * (1.0 - 1.0 / group)
        page = PAGE * self.shape.cache_bytes(self.itemsize)
        return max(1, min(rows, SIZES[-1], int(self.pages / (page * (-(-turn.whole // PAGE) - shared)))))

    def waves(self, turn: PlannedTurn, rows: int, group: int) -> int:
        return -(-rows // self.at_once(turn, rows, group))

    def step(self, rows: int, context: float, alike: float = 0.0, group: int = 1) -> Spent:
        """A decode step: one token for each of the rows, whose contexts have this length."""
        shape, card = self.shape, self.card
        size = next((size for size in SIZES if size >= rows), rows) if self.paged else rows
        share = rates.CPU_SHARE if card.is_cpu else rates.DECODE_PRODUCTS
        products = self._roofline(shape.body, shape.forward_flops(size), share)
        head = self._roofline(shape.head, shape.head_flops(size), share if card.is_cpu else rates.DECODE_HEAD)
        tokens = rows * (context - alike) + alike * rows / self._together(rows, alike, group)
        cached = Spent.on(bandwidth=tokens * shape.cache_bytes(self.itemsize) / (rates.READ * card.bandwidth))
        launches = Spent.on(launches=shape.layers * self._block_s() + rates.DRAW_S)
        return products + head + cached + self._cast() + launches

    def prefill(self, tokens: float, context: float, prompts: float) -> Spent:
        """Prefill of this many tokens that are not cached, from this many prompts."""
        shape, share = self.shape, rates.CPU_SHARE if self.card.is_cpu else rates.PREFILL
        flops = shape.forward_flops(tokens) + shape.attention_flops(tokens, context / 2) + shape.head_flops(prompts)
        compute = Spent.on(compute=flops / (share * self.card.flops[self.precision]))
        return compute + self._cast() + Spent.on(launches=shape.layers * self._block_s())

    def _roofline(self, weights: int, flops: float, share: float) -> Spent:
        compute = flops / (share * self.card.flops[self.precision])
        read = weights * self.itemsize / (rates.READ * self.card.bandwidth)
        return Spent.on(compute=compute) if compute >= read else Spent.on(bandwidth=read)

    def _cast(self) -> Spent:
        """Casting the weights of all layers, once per pass."""
        return Spent.on(bandwidth=self.moved * self.shape.body / (rates.READ * self.card.bandwidth))

    def _together(self, rows: int, alike: float, group: int) -> int:
        """Number of rows of a group that read their common pages together."""
        shape = self.shape
        if not self.paged:
            return 1
        dtype = torch.float32 if self.itemsize == 4 else torch.float16
        members = min(group, most_members(shape.heads // shape.kv_heads, dtype))
        spared = rows * (1.0 - 1.0 / members) * alike * shape.cache_bytes(self.itemsize) / shape.layers
        return members if spared >= worth_sparing(rows, shape.kv_heads) else 1

    def _block_s(self) -> float:
        if self.card.is_cpu:
            return rates.CPU_BLOCK_S
        if not self.paged:
            return rates.HOST_BLOCK_S
        return rates.BLOCK_S


def decoder_of(setup: Setup, agent: str, pages: int | None) -> Decoder:
    """The decoder of this agent."""
    member, sampling = setup.member(agent), setup.sampling
    shape, card, own = member.shape, setup.cluster.card, setup.precision(member)
    if pages is None:
        return Decoder(shape, card, own, itemsize=4, moved=moved_by_cast(setup, member, own))
    moved = moved_by_cast(setup, member, sampling.precision) if is_shared(setup, member) else 0
    return Decoder(shape, card, sampling.precision, pages, 4 if sampling.precision == "fp32" else 2, moved)


def sample_seconds(setup: Setup, pages: Mapping[str, int | None], episodes: int) -> Spent:
    """Seconds of playing this many episodes once, with all turns one after the other."""
    load = Load.sampled(setup, episodes)
    found = Spent()
    for turn in setup.turns:
        decoder = decoder_of(setup, turn.agent, pages[turn.agent])
        own = call_seconds(decoder, turn, load, setup.plan.group_size) * load.parts + fill_seconds(decoder)
        found += own * setup.cluster.busy_on_a_card
    return found.waiting(load.busy)


def call_seconds(decoder: Decoder, turn: PlannedTurn, load: Load, group: int) -> Spent:
    """Seconds of one call: one message for every row of a shard."""
    rows, together = load.rows, min(group, load.rows)
    if decoder.paged:
        read = max(turn.alike, turn.known)
        tokens = load.problems * max(0, turn.alike - turn.known) + rows * (turn.context - read)
        found = decoder.prefill(tokens, turn.context, rows)
    else:  # identical prompts are computed once; nothing else is shared
        prompts = load.problems if turn.context == turn.alike else rows
        found = decoder.prefill(prompts * turn.context, turn.context, rows)
    at_once = decoder.at_once(turn, rows, together)
    full, rest = divmod(rows, at_once)
    context, steps = turn.context + turn.message / 2, turn.message - 1
    wave = decoder.step(at_once, context, turn.alike, together) * (steps * full)
    if rest:
        wave += decoder.step(rest, context, turn.alike, together) * steps
    whole = _all_at_once(decoder, rows, context, turn.alike, together, steps)
    late = wave.seconds - whole.seconds
    return found + (whole + Spent({"KV memory": late}) if late > 0.0 else wave)


def _all_at_once(decoder: Decoder, rows: int, context: float, alike: float, group: int, steps: int) -> Spent:
    """The decode steps if memory held every row: as few as the largest captured graph allows."""
    full, rest = divmod(rows, SIZES[-1]) if decoder.paged else (0, rows)
    found = decoder.step(SIZES[-1], context, alike, group) * (steps * full)
    return found + decoder.step(rest, context, alike, group) * steps if rest else found


def fill_seconds(decoder: Decoder) -> Spent:
    """Seconds of writing an agent's weights into the sampling copy."""
    if not decoder.paged:
        return Spent()
    return Spent.on(bandwidth=rates.FILL_BYTES * decoder.shape.body / (rates.READ * decoder.card.bandwidth))
