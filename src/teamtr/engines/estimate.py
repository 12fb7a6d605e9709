"""Estimate of the memory that a team takes, from the sizes of its models.

The same estimate serves for sizes counted on loaded models (``engines.memory``) and for sizes computed from their
configs (``planning.memory``).
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
"""Workspaces of matrix products on a GPU: 32 MB each (measured on an H200) for two threads, forward and backward, times
two streams, running and capturing."""
HALVES = ("fp16", "bf16")
ROOM_TO_FIND_AGAIN = 4
"""KV blocks to plan for, as a multiple of those of one batch. The rest cache prefixes for a group's next turn and for
the next batch."""


@dataclass(frozen=True)
class Served:
    """The agents of one architecture, and how they are sampled.

    ``cache_bytes``: keys and values of one token. ``precision`` and ``copy_bytes`` are those of the paged sampler's
    copy of the weights, whose KV blocks take at most ``budget`` bytes; None and 0 on the plain path. ``shared_bytes``:
    weights that the sampler reads from the learner instead of a copy. ``row_bytes``: adapters that it applies row by
    row. ``feature_bytes``: features of a token that are kept for the update while its message is sampled; 0 if none are
    kept. ``cast``: memory to cast the weight of its largest product that is cast on the fly (``cast_bytes``).
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
        """KV blocks of a batch whose episodes are all sampled at once."""
        tokens = max(demand.lengths[name].whole for name in self.agents)
        return (min(demand.episodes, SIZES[-1]) * -(-tokens // PAGE) + 1) * self.page_bytes()


@dataclass(frozen=True)
class Trained:
    """One agent's model while it is updated.

    ``trained_bytes``: its own parameters in float32. ``kept_bytes_per_token``: what autograd saves for a token between
    forward and backward. ``copy_bytes_per_token``: what attention alone saves for a token that another row has as well.
    ``spread_bytes_per_token``: what is saved on top for every token when tokens are spread to rows because rows share a
    prefix: attention's output by token beside its output by row, and values beside the product that they come from.
    ``packs``: common prefixes are computed once. ``head_chunk``: positions whose logits are held at once.
    ``recompute``: whether activations may be recomputed; ``recomputes``: whether they are (``settled``).
    ``kept_features``: most bytes kept of the features that sampling computed of its messages.
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
        """What autograd saves for rows of maximal length: everything that a token needs, common prefixes once, and what
        attention saves of whole rows (queries, keys, values and output) for every copy. Rows without a common prefix
        are not spread."""
        distinct = self._distinct(lengths, rows)
        copies = rows * lengths.whole - distinct
        spread = self.spread_bytes_per_token if copies else 0.0
        return distinct * (self.kept_bytes_per_token + spread) + copies * self.copy_bytes_per_token

    def step_bytes(self, lengths: Lengths, rows: int) -> float:
        """Memory of a step with its backward pass, which allocates, layer by layer, gradients of what the layer saved
        and of its intermediates. With recomputation, only each layer's input is kept, in float32, plus one layer's
        recomputed activations and their gradients."""
        kept = self.kept_bytes(lengths, rows)
        if not self.recomputes:
            return (1 + 2 / self.layers) * kept
        return 4 * self.layers * self.width * self._distinct(lengths, rows) + 3 / self.layers * kept

    def _distinct(self, lengths: Lengths, rows: int) -> int:
        """Tokens that are computed; padded rows share no prefix."""
        return (lengths if self.packs else replace(lengths, shared=0)).distinct(rows)


@dataclass(frozen=True)
class Held:
    """The models of a team in one process. ``weights``, ``adapters`` and ``halves`` (copies of bases in half precision,
    for training adapters on them) are in bytes and count shared tensors once; ``who``: their owners, in words."""

    who: str
    weights: int
    adapters: int
    halves: int
    served: tuple[Served, ...]
    trained: tuple[Trained, ...]
    on_card: bool
    passing: int = 0
    """Memory of the largest partitioned layer while it is gathered (``passing_bytes``)."""
    cast: int = 0
    """Memory to cast the largest part of a base kept in reduced precision while the learner computes
    (``cast_bytes``)."""


def passing_bytes(layer: int, *, trained: bool, half: bool) -> int:
    """Memory of a partitioned layer of this size while it is gathered: its weights, in half precision half as much
    again for rounded copies, and for trained weights the gradient as computed, as sent and as received."""
    return layer * (4 if trained else 1) + (layer // 2 if half else 0)


def cast_bytes(layer: int, head: int, precision: str, *, kept: str) -> int:
    """Memory to cast parts of a base that is kept in half precision or int8. ``layer`` and ``head``: elements of its
    largest layer and of the part of the head that is cast at once. A layer is cast to the precision of computation, the
    head to float32 for its gradient."""
    if kept == "fp32":
        return 0
    body = 0 if precision == kept else layer * (2 if precision in HALVES else 4)
    return max(body, 4 * head)


@dataclass(frozen=True)
class Rows:
    """Most messages of maximal length that are computed at once. Of shorter ones there may be more where passes are
    filled by tokens (``Passes.micro_batches``), but with no more tokens and no more logits at once."""

    scored: int
    trained: int
    """With everything that the backward pass needs."""

    @staticmethod
    def of(agent: str, micro_batch: int, demand: Demand) -> Rows:
        messages, checked = max(1, demand.messages[agent]), demand.checked[agent]
        step = -(-messages // min(demand.minibatches, messages))
        return Rows(min(micro_batch, max(messages, checked)), min(micro_batch, step))


def old_policy_bytes(lengths: Lengths, width: int) -> int:
    """Bytes of the old policy's last hidden states of one message."""
    return lengths.message * width * 4


def kept_feature_bytes(budget: int, messages: int, lengths: Lengths, width: int) -> int:
    """Most bytes that the sampler's features of an update's messages take, in float32."""
    return min(budget, messages * old_policy_bytes(lengths, width))


def in_words(names: Collection[str]) -> str:
    """The owners of these models, in words: the number of agents, and the player of the other roles."""
    agents = len(names) - (PLAYER in names)
    return f"{agents} {'agent' if agents == 1 else 'agents'}" + (f" and {PLAYER}" if PLAYER in names else "")


def items(held: Held, demand: Demand) -> tuple[MemoryItem, ...]:
    """The memory that this demand takes, item by item."""
    return tuple(_items(held, demand))


def settled(held: Held, demand: Demand, available: int | None) -> Held:
    """Decides which agents recompute activations: those that must, and those that may and whose single message does not
    fit otherwise."""

    def decided(one: Trained) -> Trained:
        if one.recomputes or one.recompute != "auto" or available is None:
            return replace(one, recomputes=one.recomputes or one.recompute == "always")
        return replace(one, recomputes=_total(held, replace(one, micro_batch=1), demand) > available)

    return replace(held, trained=tuple(map(decided, held.trained)))


def recomputed(held: Held) -> tuple[str, ...]:
    """The agents that recompute activations."""
    return tuple(one.agent for one in held.trained if one.recomputes)


def lowered_to_fit(held: Held, one: Trained, demand: Demand, available: int) -> int:
    """The agent's micro-batch, lowered until the estimate fits; 1 if none does."""
    size = one.micro_batch
    while size > 1 and _total(held, replace(one, micro_batch=size), demand) > available:
        size = lowered(size)
    return size


def _total(held: Held, one: Trained, demand: Demand) -> int:
    """Total bytes when only this agent is updated."""
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
    """Copies of the weights for sampling, and keys and values; on the plain path, only what the cache grows to."""
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
    """Features of messages that are being sampled, in buffers for this many rows."""
    tokens = roomy(max(demand.lengths[name].message for name in served.agents))
    size = rows * tokens * served.feature_bytes
    if size:
        yield MemoryItem("features of open messages", size, f"buffers for {rows} messages of {tokens} tokens")


def _optimizer(trained: Trained, demand: Demand) -> MemoryItem:
    """Gradients (in float16 those of a micro-batch as well as those of the step), two moments, and the two snapshots
    that the gate may restore (weights and moments each)."""
    times = 10 if trained.precision == "fp16" else 9
    why = f"of the agent being updated ({trained.agent})"
    return MemoryItem("gradients, moments, snapshots", times * trained.trained_bytes, why)


def _old_policy(trained: Trained, demand: Demand) -> MemoryItem:
    messages, lengths = demand.messages[trained.agent], demand.lengths[trained.agent]
    size = messages * old_policy_bytes(lengths, trained.width)
    return MemoryItem("old policy", size, f"{messages} messages of {lengths.message} tokens")


def _kept_features(trained: Trained, demand: Demand) -> MemoryItem:
    """The sampler's features, in addition to the old policy that the learner computes for messages without them."""
    messages, lengths = demand.messages[trained.agent], demand.lengths[trained.agent]
    size = kept_feature_bytes(trained.kept_features, messages, lengths, trained.width)
    return MemoryItem("features of the sampler", size, f"kept for the update of {trained.agent}")


def _worst_step(trained: Trained, demand: Demand) -> MemoryItem:
    lengths, rows = demand.lengths[trained.agent], Rows.of(trained.agent, trained.micro_batch, demand)
    with_gradient = trained.step_bytes(lengths, rows.trained)
    # Without a backward pass: the activations of one layer and the output of the one before.
    without = 2 / trained.layers * trained.kept_bytes(lengths, rows.scored)
    positions = min(rows.scored * lengths.message, trained.head_chunk)
    logits = 4 * positions * trained.vocabulary * 4  # new, old, and the gradients of both passes
    alike = f", {lengths.shared} of them common" if lengths.shared else ""
    what = f"{rows.trained} messages" if with_gradient >= without else f"{rows.scored} messages, scored,"
    again = ", activations recomputed" if trained.recomputes else ""
    why = f"{what} of {lengths.whole} tokens{alike}{again} ({trained.agent}); out of memory lowers it"
    return MemoryItem("worst step", int(max(with_gradient, without)) + logits, why)
