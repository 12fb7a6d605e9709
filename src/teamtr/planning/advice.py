"""Advice on a plan: changed settings that make it fit or run faster, and how many workers fit on a card."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from teamtr.engines.estimate import Served
from teamtr.planning.memory import held, memory_of
from teamtr.planning.setup import Setup
from teamtr.planning.stage import Prediction, fitting, predict
from teamtr.ports import GB

WORTH_TELLING = 0.95
"""If a plan fits already, a change is reported only if it brings a stage to at most this share of its time."""
FEWEST_ROWS = 2
"""KV pages for fewer of the longest rows are not suggested."""


@dataclass(frozen=True)
class Change:
    """Changed settings as command-line arguments, the seconds of a stage with them, and their ratio to those of the
    plan."""

    settings: str
    seconds: float
    ratio: float

    def as_record(self) -> dict[str, Any]:
        return {"settings": self.settings, "stage_seconds": self.seconds, "ratio": self.ratio}


def helpful(prediction: Prediction) -> list[Change]:
    """Changes that make the plan fit, or make it faster if it fits already; the fastest first."""
    found = []
    fits = prediction.memory.fits
    candidates = _alternatives(prediction.setup) if fits else _that_fit(prediction.setup)
    for settings, setup in dict(candidates).items():
        other = predict(setup)
        if other.memory.fits and (not fits or other.seconds <= WORTH_TELLING * prediction.seconds):
            found.append(Change(settings, other.seconds, other.seconds / prediction.seconds))
    return sorted(found, key=lambda change: change.seconds)


def _that_fit(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yields setups, with micro-batch and KV pages reduced as needed: as planned, with recomputation, with one copy of
    the base, with other numbers of workers, and with partitioned layers over the fewest workers that can hold them."""
    told, other = made_to_fit("", setup)
    yield told, other
    if not _fits(other):
        yield from _with_fewer_pages("", setup)
    if setup.learning.recompute == "never":
        yield made_to_fit("learner.recompute=auto", replace(setup, learning=replace(setup.learning, recompute="auto")))
    for base in ("fp16", "int8"):
        if once := _held_once(setup, base):
            told, other = made_to_fit(*once)
            yield told, other
            if _fits(other):
                break  # int8 degrades the model, so it is suggested only if fp16 is not enough
            yield from _with_fewer_pages(*once)
    for settings, other in _of_cluster(setup):
        yield made_to_fit(settings, other)
    if not setup.cluster.shard_base and (spread := _in_parts(setup)):
        yield made_to_fit(*spread)


def _held_once(setup: Setup, base: str) -> tuple[str, Setup] | None:
    """The settings and setup with one copy of the base below adapters; None if there is only one already, or if nothing
    can be shared."""
    sampling = setup.sampling
    other = replace(setup, learning=replace(setup.learning, base=base), sampling=replace(sampling, by_row=True))
    may = sampling.paged and sampling.servers is None and not setup.cluster.shard_base
    may = may and (base != "int8" or all(member.adapted for member in setup.members))
    if other == setup or not may or not any(one.shared_bytes for group in other.by_group for one in held(group).served):
        return None
    return f"learner.base={base} sampling.adapters=by_row", other


def _in_parts(setup: Setup) -> tuple[str, Setup] | None:
    """The settings and setup with partitioned layers, where each group that does not fit gets at least the fewest
    workers that can hold them; None if no number of workers can."""
    told, other = [], setup
    for number, one in enumerate(setup.by_group):
        if fitting(one)[1].fits:
            continue
        least = smallest_sharing(one)
        if least is None:
            return None
        settings, other = _with_workers(other, number, max(least, one.cluster.workers))
        told.append(settings)
    told.append(_spread(setup))
    return " ".join(filter(None, told)), replace(other, cluster=replace(other.cluster, shard_base=True))


def _alternatives(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yields the setup with one setting changed."""
    yield from _of_cluster(setup)
    size = setup.learning.micro_batch
    for count in sorted({2 * size, max(1, size // 2)} - {size}):
        yield f"learner.micro_batch={count}", _with_micro_batch(setup, count)


def _of_cluster(setup: Setup) -> Iterator[tuple[str, Setup]]:
    cluster = setup.cluster
    for number, one in enumerate(setup.by_group):
        now, idle = one.cluster.workers, cluster.cards - cluster.workers
        for count in sorted({now + idle, 2 * now, now // 2} - {now}):
            if count > 0:
                yield _with_workers(setup, number, count)
    if cluster.shards > cluster.together:
        yield f"cluster.shards={cluster.together}", replace(setup, cluster=replace(cluster, shards=cluster.together))
    if cluster.together > 1:
        other = replace(cluster, shard_base=not cluster.shard_base)
        told = _spread(setup) if other.shard_base else "cluster.shard_base=false"
        yield told, replace(setup, cluster=other)


def _spread(setup: Setup) -> str:
    """The settings that partition layers across workers. A partitioned base is float32."""
    return f"cluster.shard_base=true{'' if setup.learning.base == 'fp32' else ' learner.base=fp32'}"


def _with_workers(setup: Setup, number: int, count: int) -> tuple[str, Setup]:
    """The settings and setup with this number of workers in the group, and cards for them."""
    cluster, other = setup.cluster, setup.cluster.with_workers(number, count)
    if other.workers == cluster.workers:
        return "", setup
    told = ["cluster.engine=ray"] if cluster.workers == 1 and not cluster.groups else []
    told += [f"cluster.groups.{number}.workers={count}" if cluster.groups else f"cluster.workers={count}"]
    told += [] if other.shards == other.together else [f"cluster.shards={other.shards}"]
    told += [] if other.shard_base == cluster.shard_base else ["cluster.shard_base=false"]
    told += [] if other.cards == cluster.cards else [f"--cards {other.cards}"]
    return " ".join(told), replace(setup, cluster=other)


def _with_micro_batch(setup: Setup, count: int) -> Setup:
    return replace(setup, learning=replace(setup.learning, micro_batch=count))


def made_to_fit(settings: str, setup: Setup) -> tuple[str, Setup]:
    """The settings and setup, reduced to fit: by a smaller micro-batch, or else by KV pages for one batch only and a
    micro-batch that fits with them. Unchanged if neither fits."""
    least = pages_of_a_batch(setup)
    for memory in (setup.sampling.memory, least):
        size = setup.learning.micro_batch
        while size:
            sampling = replace(setup.sampling, memory=memory)
            other = replace(_with_micro_batch(setup, size), sampling=sampling)
            if _fits(other):
                told = [settings] if settings else []
                told += [] if size == setup.learning.micro_batch else [f"learner.micro_batch={size}"]
                told += [] if memory == setup.sampling.memory else [f"sampling.memory_gb={least / GB:.2f}"]
                return " ".join(told), other
            size //= 2
    return settings, setup


def _with_fewer_pages(settings: str, setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yields it with one message at a time and as many KV pages as fit then, which are fewer than a batch's; nothing if
    they are too few."""
    other = _with_micro_batch(setup, 1)
    left = min(_left_for_pages(group) for group in other.by_group)
    memory = GB * (100 * left // GB) // 100  # as it is told, rounded down
    if memory < FEWEST_ROWS * max(_longest_row(group) for group in other.by_group):
        return
    changed = [settings, "learner.micro_batch=1" if setup.learning.micro_batch > 1 else ""]
    changed.append(f"sampling.memory_gb={memory / GB:.2f}")
    yield " ".join(filter(None, changed)), replace(other, sampling=replace(other.sampling, memory=memory))


def _fits(setup: Setup) -> bool:
    return all(memory_of(one).fits for one in setup.by_group)


def _served(group: Setup) -> list[Served]:
    return [one for one in held(group).served if one.precision is not None]


def _left_for_pages(group: Setup) -> int:
    """Bytes that everything else leaves for the KV pages of each server; 0 if there are none, or if memory is not
    counted."""
    plan, served = memory_of(group).plan, _served(group)
    if not served or plan.available is None:
        return 0
    return max(0, (plan.available - plan.total + sum(one.budget for one in served)) // len(served))


def _longest_row(group: Setup) -> int:
    alone = replace(group.worker_demand, episodes=1)
    return max((one.wanted_bytes(alone) for one in _served(group)), default=0)


def pages_of_a_batch(setup: Setup) -> int:
    """Bytes of keys and values that one worker needs to sample a shard at once: for ``sampling.memory_gb``."""
    return max(sum(one.wanted_bytes(group.worker_demand) for one in _served(group)) for group in setup.by_group)


@dataclass(frozen=True)
class Placement:
    """How workers are placed on a card. ``workers_on_a_card`` are planned; ``fit_on_a_card`` is how many fit into its
    memory with KV pages for one batch each (None: memory is not counted). ``sharding``: whether layers must be
    partitioned, as text."""

    workers_on_a_card: int
    fit_on_a_card: int | None
    sharding: str

    def as_record(self) -> dict[str, Any]:
        return {
            "workers_on_a_card": self.workers_on_a_card,
            "fit_on_a_card": self.fit_on_a_card,
            "sharding": self.sharding,
        }


def placement(prediction: Prediction) -> Placement:
    """The placement of the workers of one group."""
    cluster, memory = prediction.setup.cluster, prediction.memory
    servers = prediction.setup.sampling.servers
    taken = 0 if servers is None else servers.taken(cluster.card.memory)
    fit = None if cluster.card.memory is None else max(0, int((cluster.card.memory - taken) // max(1, memory.least)))
    return Placement(cluster.workers_on_a_card, fit, _sharding(prediction))


def _sharding(prediction: Prediction) -> str:
    setup, cluster = prediction.setup, prediction.setup.cluster
    if cluster.card.is_cpu:
        return "not needed: a CPU's memory is not counted"
    whole = memory_of(replace(setup, cluster=replace(cluster, shard_base=False)))
    if whole.fits:
        return "not needed: models fit whole"
    least = smallest_sharing(setup)
    if least is None:
        return "cannot help: what stays whole (embeddings, output layers, the sampler's copy) does not fit"
    return f"needed: cluster.shard_base=true over at least {least} workers"


def smallest_sharing(setup: Setup) -> int | None:
    """The fewest workers, one per card, whose parts of the models fit, with micro-batch and KV pages reduced as needed;
    None if 1,024 are too few."""

    def fits(count: int) -> bool:
        cards = count + setup.cluster.beside
        cluster = replace(setup.cluster, workers=count, shards=count, cards=cards, shard_base=True)
        return memory_of(made_to_fit("", replace(setup, cluster=cluster))[1]).fits

    enough = next((2**k for k in range(1, 11) if fits(2**k)), None)
    if enough is None:
        return None
    between = range(max(2, enough // 2 + 1), enough + 1)
    return between[bisect_left(between, True, key=fits)]
