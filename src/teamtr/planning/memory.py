"""Memory of a worker, from the shapes of its models: sizes for ``engines.estimate``, computed instead of counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from teamtr.engines.card import SHARED_OUT
from teamtr.engines.estimate import (
    HALVES,
    Held,
    Served,
    Trained,
    cast_bytes,
    in_words,
    items,
    passing_bytes,
    recomputed,
    settled,
)
from teamtr.engines.paged.pool import SHARE_OF_FREE_MEMORY
from teamtr.engines.paged.row_adapters import numbers_of
from teamtr.engines.passes import LEAN, chunk_for
from teamtr.engines.torch.head import cast_rows
from teamtr.planning.setup import Cluster, Member, Setup
from teamtr.planning.shape import ModelShape, is_target
from teamtr.ports import MemoryPlan

JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Layers of a block that the paged sampler fuses into one product."""
PAGES_ON_A_CPU = 1 << 30
UNDER_AUTOCAST = 0.7
"""Activation memory as a share of float32's: products are in half precision, norms are not (measured on the built-in
model)."""


@dataclass(frozen=True)
class WorkerMemory:
    """``plan``: what a worker needs, and what is available to it. Loading needs less: a worker reads its part of a
    model and moves it to the device layer by layer. ``pages``: most bytes of keys and values, by agent; None on the
    plain path. ``least``: the plan's total with KV pages for one batch only."""

    plan: MemoryPlan
    pages: dict[str, int | None]
    least: int

    @property
    def fits(self) -> bool:
        return self.plan.fits


def tightest(memories: Iterable[WorkerMemory]) -> WorkerMemory:
    """The memory of the group with the least to spare, or with the largest need if memory is not counted."""
    return max(memories, key=lambda memory: (not memory.fits, memory.plan.missing))


def memory_of(setup: Setup) -> WorkerMemory:
    """The memory of the busiest worker, in a cluster without groups."""
    demand, cluster = setup.worker_demand, setup.cluster
    plan = MemoryPlan((), available(cluster), cluster.name)
    if setup.sampling.servers is not None:
        plan = setup.sampling.servers.beside(plan, cluster.card.memory, cluster.workers_on_a_card)
    found = settled(held(setup), demand, plan.available)
    plan = replace(plan, items=items(found, demand), recomputed=recomputed(found))
    pages = {name: None if one.precision is None else one.budget for one in found.served for name in one.agents}
    taken = sum(item.bytes for item in plan.items if item.what == "keys and values")
    wanted = sum(one.wanted_bytes(demand) for one in found.served if one.precision is not None)
    return WorkerMemory(plan, pages, plan.total - taken + min(taken, wanted or taken))


def available(cluster: Cluster) -> int | None:
    """Bytes of a card's memory that one of its workers may use; None if memory is not counted."""
    memory, workers = cluster.card.memory, cluster.workers_on_a_card
    return memory if memory is None or workers == 1 else int(memory * SHARED_OUT / workers)


def held(setup: Setup) -> Held:
    """The models of a worker, with sizes computed from their shapes."""
    members, on_card = setup.members, not setup.cluster.card.is_cpu
    weights = adapters = halves = 0
    for source in dict.fromkeys(member.source for member in members):
        own = [member for member in members if member.source == source]
        shape, adapted = own[0].shape, [member for member in own if member.adapted]
        weights += 4 * held_parameters(shape, setup.cluster) * (len(own) - len(adapted))
        if adapted:
            kept = kept_as(setup, shape)
            weights += 4 * held_parameters(shape, setup.cluster) - _spared(shape, kept)
            adapters += 4 * sum(member.trained for member in adapted)
            if kept == "fp32":
                halves += max(_half_bytes(shape, setup.precision(member), setup.cluster) for member in adapted)
    trained = [setup.member(name) for name in setup.demand.messages]
    return Held(
        who=in_words([member.name for member in members]),
        weights=weights,
        adapters=adapters,
        halves=halves,
        served=tuple(_served(setup, weights + adapters)),
        trained=tuple(_trained(setup, member) for member in trained),
        on_card=on_card,
        passing=max(_passing(setup, member) for member in members),
        cast=max(_cast(setup, member) for member in members),
    )


def kept_as(setup: Setup, shape: ModelShape) -> str:
    """The precision in which the matrices of a base below adapters are kept (with int8, those of linear layers);
    float32 if workers hold parts of it."""
    if setup.cluster.shard_base:
        return "fp32"
    base = shape.stored if setup.learning.base == "file" else setup.learning.base
    return base if base in (*HALVES, "int8") else "fp32"


def moved_by_cast(setup: Setup, member: Member, precision: str) -> int:
    """Bytes read and written per weight of a linear layer to cast it before a product, for a base kept in reduced
    precision and computed in another: by count, not measured. A float32 base has half-precision copies instead. A
    partitioned base and trained weights have none; the time to round these is not counted."""
    kept = kept_as(setup, member.shape) if member.adapted else "fp32"
    if kept in ("fp32", precision):
        return 0
    return (1 if kept == "int8" else 2) + (2 if precision in HALVES else 4)


def _spared(shape: ModelShape, kept: str) -> int:
    """Bytes that a base saves relative to float32: two per element of its matrices in half precision; with int8, three
    per element of linear layers, minus four per row for its scale."""
    if kept == "fp32":
        return 0
    return 2 * shape.matrices + (shape.body - 4 * shape.outputs if kept == "int8" else 0)


def _cast(setup: Setup, member: Member) -> int:
    if not member.adapted:
        return 0
    shape = member.shape
    head = min(shape.vocabulary, cast_rows(shape.width)) * shape.width
    layer = max(a * b for a, b in shape.products.values())
    return cast_bytes(layer, head, setup.precision(member), kept=kept_as(setup, shape))


def _passing(setup: Setup, member: Member) -> int:
    if not setup.cluster.shard_base:
        return 0
    layer = 4 * -(-member.shape.blocks // member.shape.layers)
    return passing_bytes(layer, trained=not member.adapted, half=setup.precision(member) in HALVES)


def held_parameters(shape: ModelShape, cluster: Cluster) -> int:
    """Number of a model's parameters that one worker holds: a part of partitioned blocks, and all others."""
    if not cluster.shard_base:
        return shape.parameters
    return shape.parameters - shape.blocks + -(-shape.blocks // cluster.workers)


def _half_bytes(shape: ModelShape, precision: str, cluster: Cluster) -> int:
    """Bytes of the half-precision copies that are kept of a float32 base; none of partitioned blocks."""
    body = 0 if cluster.shard_base else shape.body
    return 2 * (body + (shape.head if precision == "fp16" else 0)) if precision in HALVES else 0


def _served(setup: Setup, held_already: int) -> list[Served]:
    """One entry per shape, or per base that is sampled in place. KV pages get their share of the memory that is free
    after weights and copies."""
    sampling, free = setup.sampling, available(setup.cluster)
    size = 2 if sampling.precision in HALVES else 4
    groups: dict[tuple[ModelShape, str], list[Member]] = {}
    for member in setup.members:
        groups.setdefault((member.shape, member.source if is_shared(setup, member) else ""), []).append(member)
    found = []
    for (shape, shared_source), members in groups.items():
        names = tuple(member.name for member in members)
        features = shape.width * size if setup.learning.kept_features else 0
        if not sampling.paged:
            found.append(Served(names, shape.cache_bytes(4), feature_bytes=features * 4 // size))
            continue
        shared = _shared(setup, shape) if shared_source else _Shared(0, 0)
        copied = (shape.parameters - shared.numbers) * size
        by_row = _row_numbers(members) * size if sampling.by_row else 0
        held_already += copied + by_row
        budget = sampling.memory
        if budget is None:
            budget = PAGES_ON_A_CPU if free is None else int(SHARE_OF_FREE_MEMORY * max(0, free - held_already))
            held_already += budget
        found.append(
            Served(
                names,
                shape.cache_bytes(size),
                sampling.precision,
                copied,
                budget,
                shared.bytes,
                by_row,
                features,
                shared.cast,
            )
        )
    return found


def is_shared(setup: Setup, member: Member) -> bool:
    """Whether the sampler reads the matrices of the member's base in place; of an int8 base, those of linear layers."""
    by_row = setup.sampling.paged and setup.sampling.by_row and member.adapted and not setup.cluster.shard_base
    return by_row and kept_as(setup, member.shape) in (setup.sampling.precision, "int8")


@dataclass(frozen=True)
class _Shared:
    """What a sampler reads from the learner in place: ``numbers`` elements in ``bytes`` bytes; ``cast``: memory to cast
    its largest fused product."""

    numbers: int
    bytes: int
    cast: int = 0


def _shared(setup: Setup, shape: ModelShape) -> _Shared:
    precision = setup.sampling.precision
    if kept_as(setup, shape) != "int8":
        return _Shared(shape.matrices, shape.matrices * (2 if precision in HALVES else 4))
    words = shape.matrices - shape.body if precision == "fp16" else 0  # embedding and head, which are kept in fp16
    largest = max(sum(a * b for a, b in (shape.products[name] for name in names)) for names in JOINED)
    cast = cast_bytes(largest, 0, precision, kept="int8")
    return _Shared(shape.body + words, shape.body + 4 * shape.outputs + 2 * words, cast)


def _row_numbers(members: Sequence[Member]) -> int:
    """Elements of the stacked adapters in all layers. Agents with another base have their adapters merged, in a server
    that holds the first agent's base."""
    adapted = [member for member in members if member.adapted and member.source == members[0].source]
    if not adapted:
        return 0
    shape, rank = adapted[0].shape, max(member.rank or 0 for member in adapted)
    targets = {member.targets for member in adapted}
    joined = [
        [shape.products[name] for name in names]
        for block in range(shape.layers)
        for names in JOINED
        if any(is_target(f"model.layers.{block}.{name}", one) for name in names for one in targets)
    ]
    return numbers_of(joined, len(adapted), rank)


def _trained(setup: Setup, member: Member) -> Trained:
    shape, precision = member.shape, setup.precision(member)
    return Trained(
        agent=member.name,
        trained_bytes=4 * (member.trained if member.adapted else held_parameters(shape, setup.cluster)),
        precision=precision,
        micro_batch=setup.learning.micro_batch,
        layers=shape.layers,
        width=shape.width,
        vocabulary=shape.vocabulary,
        head_chunk=chunk_for(setup.cluster.card.memory, shape.vocabulary),
        kept_bytes_per_token=kept_bytes_per_token(shape, precision, rank=member.rank),
        copy_bytes_per_token=2 * (shape.query_width + shape.key_width) * (2 if precision in HALVES else 4),
        recompute="never" if setup.cluster.shard_base else setup.learning.recompute,
        kept_features=setup.learning.kept_features,
        spread_bytes_per_token=spread_bytes_per_token(shape, precision, rank=member.rank),
    )


def scored_at_once(setup: Setup, member: Member) -> int:
    """Most positions of a step whose logits are held at once: more where output layer and score are fused."""
    fused = member.adapted and setup.precision(member) == "fp16" and not setup.cluster.card.is_cpu
    chunk = chunk_for(setup.cluster.card.memory, member.shape.vocabulary)
    return int(chunk * LEAN) if fused else chunk


def spread_bytes_per_token(shape: ModelShape, precision: str, *, rank: int | None) -> float:
    """Bytes saved on top for each token when tokens are spread to rows: attention's output a second time, as it is
    gathered, and, where layers are fused, the values, which are otherwise part of the rows that the norms of queries
    and keys save."""
    fused = rank is not None and precision in HALVES
    values = shape.key_width if fused and shape.head_norms else 0
    return float((2 if precision in HALVES else 4) * (shape.query_width + values))


def kept_bytes_per_token(shape: ModelShape, precision: str, *, rank: int | None) -> float:
    """Bytes that autograd saves for one token: in each block, the inputs of its products, norms and gate, and the
    queries, keys, values and output of attention; for adapters of this rank, the activations between their two factors.
    Norms that are trained also save what they normalized. Under adapters in half precision, where layers are fused,
    only the residual stream is float32."""
    attended, width, inner = (shape.heads + shape.kv_heads) * shape.head_dim, shape.width, shape.inner
    scales = 4 * (2 + 2 * shape.heads + shape.kv_heads)  # of norms and of attention
    once = 8 * shape.head_dim  # the rotary angles of its position
    normed = attended if shape.head_norms else 0
    narrow = len(shape.products) * (rank or 0)
    if rank is not None and precision in HALVES:
        block = 12 * width + 6 * attended + 6 * inner + 2 * narrow + scales
        return float(shape.layers * block + once)
    block = 4 * (4 * width + 2 * attended + normed + 4 * inner + narrow) + scales
    if rank is None:
        block += 4 * (2 * width + normed)
        once += 8 * width  # the last norm
    return (UNDER_AUTOCAST if precision in HALVES else 1.0) * (shape.layers * block + once)
