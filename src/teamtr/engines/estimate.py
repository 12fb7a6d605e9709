"""What a team takes in memory, from sizes: the one estimate, whether the sizes were counted on loaded models
(``engines.memory``) or computed from their configs (``planning.memory``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from teamtr.engines.paged.sampler import PAGE, SIZES, roomy
from teamtr.engines.passes import lowered
from teamtr.engines.policy import Recompute
from teamtr.ports import GB, Demand, Lengths, MemoryItem
from teamtr.types import PLAYER

WORKSPACES = 4 * (32 << 20)
"""What matrix products keep on a card: 32 MB (measured on an H200) for each of two threads, forward and backward, and
two streams, running and capturing."""
HALVES = ("fp16", "bf16")
ROOM_TO_FIND_AGAIN = 4
"""Times the pages of a batch: what may be found by a group's next turn, and by the next batch."""


@dataclass(frozen=True)
class Served:
    """The agents of one architecture, and how they are sampled.

    ``cache_bytes``: keys and values of one token. ``precision`` and ``copy_bytes``: of the copy that the paged sampler
    computes with, which has pages of ``budget`` bytes at most; None and 0 on the plain path. ``shared_bytes``: weights
    that it reads where the learner has them, which are in no copy. ``row_bytes``: adapters that it applies row by row.
    ``feature_bytes``: what it keeps of a token for the update, while its message is sampled; 0 where it keeps nothing.
    ``cast``: what its largest product takes that is cast in passing (``cast_bytes``).
    """

    agents: tuple[str, ...]
    cache_bytes: int
    precision: str | None = None
    copy_bytes: int = 0
    budget: int = 0
    shared_bytes: int = 0
    row_bytes: int = 0
    feature_bytes: int = 0
    cast: int = 0

    def page_bytes(self) -> int:
        return PAGE * self.cache_bytes

    def wanted_bytes(self, demand: Demand) -> int:
        """Pages of a batch that is played at once."""
        tokens = max(demand.lengths[name].whole for name in self.agents)
        return (min(demand.episodes, SIZES[-1]) * -(-tokens // PAGE) + 1) * self.page_bytes()


@dataclass(frozen=True)
class Trained:
    """One agent's model while it is updated.

    ``trained_bytes``: its own parameters in float32. ``kept_bytes_per_token``: what autograd keeps of a token between
    forward and backward; ``copy_bytes_per_token``: what attention alone keeps of a token that another row has as well;
    ``spread_bytes_per_token``: what is kept beside both of every token where tokens are spread to rows, because these
    begin alike: attention's answer as it is gathered beside that of rows, and values beside the product they came of.
    ``packs``: common beginnings are computed once. ``head_chunk``: positions whose logits are held at once.
    ``recompute``: whether it may be computed again instead, and ``recomputes``: whether it is (``settled``).
    ``kept_features``: most bytes that are kept of what sampling computed of its messages.
    """

    agent: str
    trained_bytes: int
    precision: str
    micro_batch: int
    layers: int
    width: int
    vocabulary: int
    head_chunk: int
    kept_bytes_per_token: float
    copy_bytes_per_token: float
    packs: bool = True
    recompute: Recompute = "auto"
    recomputes: bool = False
    kept_features: int = 0
    spread_bytes_per_token: float = 0.0

    def kept_bytes(self, lengths: Lengths, rows: int) -> float:
        """What autograd keeps of rows as long as can be: all that a token needs, common beginnings once, and what
        attention keeps of whole rows (queries, keys, values and its answer) for every copy. Rows that have nothing in
        common stand as they are, and are not spread."""
        distinct = self._distinct(lengths, rows)
        copies = rows * lengths.whole - distinct
        spread = self.spread_bytes_per_token if copies else 0.0
        return distinct * (self.kept_bytes_per_token + spread) + copies * self.copy_bytes_per_token

    def step_bytes(self, lengths: Lengths, rows: int) -> float:
        """What a step takes on the way back: going back through a layer makes gradients of what it kept, and of what
        came in between. Recomputed, all that is kept is what goes into each layer, in float32, and what one layer keeps
        once it was computed again."""
        kept = self.kept_bytes(lengths, rows)
        if not self.recomputes:
            return (1 + 2 / self.layers) * kept
        return 4 * self.layers * self.width * self._distinct(lengths, rows) + 3 / self.layers * kept

    def _distinct(self, lengths: Lengths, rows: int) -> int:
        """Tokens that are computed; padded rows share nothing."""
        return (lengths if self.packs else replace(lengths, shared=0)).distinct(rows)


@dataclass(frozen=True)
class Held:
    """A team in one process. ``weights``, ``adapters`` and ``halves`` (of bases, for training adapters on them) in
    bytes, shared ones once; ``who`` they belong to, in words."""

    who: str
    weights: int
    adapters: int
    halves: int
    served: tuple[Served, ...]
    trained: tuple[Trained, ...]
    on_card: bool
    passing: int = 0
    """What the largest spread layer takes while it is passed through (``passing_bytes``)."""
    cast: int = 0
    """What the largest part of a base that is kept short takes while the learner casts it (``cast_bytes``)."""


def passing_bytes(layer: int, *, trained: bool, half: bool) -> int:
    """Of a spread layer of so many bytes, whole for a moment: its weights, in half precision half as much again for
    rounded ones, and where they are trained their gradient, as it was computed, as it is sent and as it arrives."""
    return layer * (4 if trained else 1) + (layer // 2 if half else 0)


def cast_bytes(layer: int, head: int, precision: str, *, kept: str) -> int:
    """Of a base kept in half precision or int8, by the numbers of its largest layer and of what of the head is cast at
    once: a layer in the precision that is computed in, the head in float32 for its gradient."""
    if kept == "fp32":
        return 0
    body = 0 if precision == kept else layer * (2 if precision in HALVES else 4)
    return max(body, 4 * head)


@dataclass(frozen=True)
class Rows:
    """Most messages as long as can be that are computed at once. Of shorter ones it may be more, where passes are
    filled by tokens (``Passes.micro_batches``): their tokens are no more, nor are the logits that are held."""

    scored: int
    trained: int
    """With all that the way back needs."""

    @staticmethod
    def of(agent: str, micro_batch: int, demand: Demand) -> Rows:
        messages, checked = max(1, demand.messages[agent]), demand.checked[agent]
        step = -(-messages // min(demand.minibatches, messages))
        return Rows(min(micro_batch, max(messages, checked)), min(micro_batch, step))


def old_policy_bytes(lengths: Lengths, width: int) -> int:
    """The old policy's last hidden states of one message."""
    return lengths.message * width * 4


def kept_feature_bytes(budget: int, messages: int, lengths: Lengths, width: int) -> int:
    """What the sampler's features of an update's messages take at most, in float32."""
    return min(budget, messages * old_policy_bytes(lengths, width))


def in_words(names: Collection[str]) -> str:
    """Who they are: agents, and whoever plays the other roles."""
    agents = len(names) - (PLAYER in names)
    return f"{agents} {'agent' if agents == 1 else 'agents'}" + (f" and {PLAYER}" if PLAYER in names else "")


def items(held: Held, demand: Demand) -> tuple[MemoryItem, ...]:
    """What this demand takes, part by part."""
    return tuple(_items(held, demand))


def settled(held: Held, demand: Demand, available: int | None) -> Held:
    """With it decided who recomputes activations: whoever must, and whoever may and of whom a single message does not
    fit otherwise."""

    def decided(one: Trained) -> Trained:
        if one.recomputes or one.recompute != "auto" or available is None:
            return replace(one, recomputes=one.recomputes or one.recompute == "always")
        return replace(one, recomputes=_total(held, replace(one, micro_batch=1), demand) > available)

    return replace(held, trained=tuple(map(decided, held.trained)))


def recomputed(held: Held) -> tuple[str, ...]:
    """Whose activations are."""
    return tuple(one.agent for one in held.trained if one.recomputes)


def lowered_to_fit(held: Held, one: Trained, demand: Demand, available: int) -> int:
    """The agent's micro-batch, lowered until it fits by this estimate; 1 where none does."""
    size = one.micro_batch
    while size > 1 and _total(held, replace(one, micro_batch=size), demand) > available:
        size = lowered(size)
    return size


def _total(held: Held, one: Trained, demand: Demand) -> int:
    """With this agent's updates alone."""
    return sum(item.bytes for item in _items(replace(held, trained=(one,)), demand))


def _items(held: Held, demand: Demand) -> Iterator[MemoryItem]:
    yield MemoryItem("weights", held.weights, f"{held.who}, shared ones once")
    if held.adapters:
        yield MemoryItem("adapters", held.adapters)
    if held.halves:
        yield MemoryItem("base in half precision", held.halves, "for training adapters on it")
    if held.passing:
        yield MemoryItem("a spread layer", held.passing, "whole while it is passed through")
    if held.cast:
        yield MemoryItem("a layer, cast", held.cast, "of a base that is kept short, while it is passed through")
    for served in held.served:
        yield from _served(served, demand)
    if held.trained:
        for part in (_optimizer, _old_policy, _worst_step):
            yield max((part(trained, demand) for trained in held.trained), key=lambda item: item.bytes)
        kept = max((_kept_features(trained, demand) for trained in held.trained), key=lambda item: item.bytes)
        if kept.bytes:
            yield kept
    if held.on_card:
        yield MemoryItem("libraries", WORKSPACES, "workspaces of matrix products")


def _served(served: Served, demand: Demand) -> Iterator[MemoryItem]:
    """Sampling copies and keys and values; nothing on the plain path but what its cache grows to."""
    if demand.sampled_elsewhere.issuperset(served.agents):
        return
    if served.precision is None:
        tokens = max(demand.lengths[name].whole for name in served.agents)
        size = demand.episodes * tokens * served.cache_bytes
        yield MemoryItem("keys and values", size, f"{demand.episodes} rows of {tokens} tokens, plain path")
        yield from _open_features(served, demand.episodes, demand)
        return
    shared = f", {served.shared_bytes / GB:.3g} GB are the learner's own" if served.shared_bytes else ""
    yield MemoryItem("sampling copy", served.copy_bytes, f"{served.precision}{shared}")
    if served.cast:
        yield MemoryItem("a layer, cast to sample", served.cast, "of a base in int8, layers that are joined together")
    if served.row_bytes:
        yield MemoryItem("adapters by row", served.row_bytes, "those of all agents, beside each other")
    yield from _open_features(served, roomy(min(demand.episodes, SIZES[-1])) + 1, demand)
    wanted = served.wanted_bytes(demand)
    taken = min(ROOM_TO_FIND_AGAIN * wanted, served.budget)
    yield MemoryItem("keys and values", taken, f"{wanted / GB:.2g} GB for a batch; the rest is found again later")


def _open_features(served: Served, rows: int, demand: Demand) -> Iterator[MemoryItem]:
    """Of messages that are being sampled, with buffers for so many."""
    tokens = roomy(max(demand.lengths[name].message for name in served.agents))
    size = rows * tokens * served.feature_bytes
    if size:
        yield MemoryItem("features of open messages", size, f"buffers for {rows} messages of {tokens} tokens")


def _optimizer(trained: Trained, demand: Demand) -> MemoryItem:
    """Gradients (in float16 those of a micro-batch beside those of the step), two moments, and the two snapshots that
    the gate may go back to (weights and moments each)."""
    times = 10 if trained.precision == "fp16" else 9
    why = f"of the agent being updated ({trained.agent})"
    return MemoryItem("gradients, moments, snapshots", times * trained.trained_bytes, why)


def _old_policy(trained: Trained, demand: Demand) -> MemoryItem:
    messages, lengths = demand.messages[trained.agent], demand.lengths[trained.agent]
    size = messages * old_policy_bytes(lengths, trained.width)
    return MemoryItem("old policy", size, f"{messages} messages of {lengths.message} tokens")


def _kept_features(trained: Trained, demand: Demand) -> MemoryItem:
    """Beside the old policy that the learner computes where it does not use them."""
    messages, lengths = demand.messages[trained.agent], demand.lengths[trained.agent]
    size = kept_feature_bytes(trained.kept_features, messages, lengths, trained.width)
    return MemoryItem("features of the sampler", size, f"kept for the update of {trained.agent}")


def _worst_step(trained: Trained, demand: Demand) -> MemoryItem:
    lengths, rows = demand.lengths[trained.agent], Rows.of(trained.agent, trained.micro_batch, demand)
    with_gradient = trained.step_bytes(lengths, rows.trained)
    # Without a way back, what one layer makes, and what the one before it gave.
    without = 2 / trained.layers * trained.kept_bytes(lengths, rows.scored)
    positions = min(rows.scored * lengths.message, trained.head_chunk)
    logits = 4 * positions * trained.vocabulary * 4  # new, old, and the gradients of both passes
    alike = f", {lengths.shared} of them common" if lengths.shared else ""
    what = f"{rows.trained} messages" if with_gradient >= without else f"{rows.scored} messages, scored,"
    again = ", activations recomputed" if trained.recomputes else ""
    why = f"{what} of {lengths.whole} tokens{alike}{again} ({trained.agent}); out of memory lowers it"
    return MemoryItem("worst step", int(max(with_gradient, without)) + logits, why)
