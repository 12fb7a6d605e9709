"""Input of a plan: the team's models, the turns of an episode, the settings that affect costs, and the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from teamtr.engines.policy import Recompute
from teamtr.engines.vllm.memory import Servers
from teamtr.errors import UserError
from teamtr.planning.cards import Card
from teamtr.planning.shape import ModelShape
from teamtr.ports import Demand
from teamtr.presets import Plan, Radii
from teamtr.training.scoring import VERIFIABLE_SHARE

FLOOR_NATS_PER_TOKEN = {"fp16": 1.4e-5, "tf32": 5.5e-6}
"""KL that rounding alone produces, by precision: SmolLM2, messages of 256 tokens (docs/performance.md, "Precision"). It
grows with the length of a message."""


@dataclass(frozen=True)
class Member:
    """One model of the team. Agents with the same ``source`` share a base below adapters; with ``rank`` None, all
    weights are trained."""

    name: str
    shape: ModelShape
    source: str
    rank: int | None = 16
    targets: str | tuple[str, ...] = "all-linear"
    frozen: bool = False

    @property
    def adapted(self) -> bool:
        return self.rank is not None

    @cached_property
    def trained(self) -> int:
        """Number of parameters that an update changes."""
        return self.shape.parameters if self.rank is None else self.shape.adapter(self.rank, self.targets)


@dataclass(frozen=True)
class PlannedTurn:
    """One message of every episode, in tokens. The first ``alike`` tokens of its ``context`` are common to all episodes
    of a problem, and the agent has read the first ``known`` tokens in an earlier turn."""

    agent: str
    context: int
    message: int
    alike: int
    known: int = 0

    @property
    def whole(self) -> int:
        return self.context + self.message


@dataclass(frozen=True)
class Learning:
    """Settings of an update, as in the section ``learner`` of a team file."""

    epochs: int = 2
    minibatches: int = 4
    micro_batch: int = 64
    gate_share: float = 0.25
    precision: str = "auto"
    base: str = "fp32"
    recompute: Recompute = "auto"
    kept_features: int = 0
    """Most bytes of features that the sampler keeps for an update; 0: the learner scores by itself."""


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. ``memory``: bytes for KV pages; None: a share of what is free. ``servers``: the vLLM
    servers, if these sample. ``by_row``: adapters are applied row by row, and none is merged."""

    paged: bool = True
    precision: str = "fp16"
    memory: int | None = None
    servers: Servers | None = None
    by_row: bool = False


@dataclass(frozen=True)
class Group:
    """Members of the team, by name, that are placed on workers of their own."""

    name: str
    members: tuple[str, ...]
    workers: int


@dataclass(frozen=True)
class Cluster:
    """Where the workers run. On a CPU, a card is a core. ``network``: bytes per second between machines of
    ``cards_per_machine``. ``groups``: the members that each group of workers holds; without groups, all workers hold
    all members. ``name`` and ``beside``, in the cluster of one group: which group it is, and how many workers other
    groups have."""

    card: Card
    cards: int = 1
    workers: int = 1
    shards: int = 1
    shard_base: bool = False
    network: float = 25e9
    cards_per_machine: int = 8
    groups: tuple[Group, ...] = ()
    name: str = ""
    beside: int = 0

    def __post_init__(self) -> None:
        if min(self.cards, self.workers, self.cards_per_machine) < 1 or not self.network > 0:
            raise UserError("a cluster has at least one card and one worker, and a network that carries something")
        if self.shards < self.together:
            raise UserError(f"cluster.shards is {self.shards}, and {self.together} workers need as many at least")

    @property
    def together(self) -> int:
        """Most workers that share the rows of one agent."""
        return max((group.workers for group in self.groups), default=self.workers)

    @property
    def workers_on_a_card(self) -> int:
        """Workers that share the memory of one card, including those of other groups."""
        return -(-(self.workers + self.beside) // self.cards)

    @property
    def busy_on_a_card(self) -> int:
        """Most workers of a card that compute at once: groups compute one after the other."""
        return min(self.workers, self.workers_on_a_card)

    def of(self, group: Group) -> Cluster:
        """The cluster of one group's workers."""
        return replace(self, workers=group.workers, groups=(), name=group.name, beside=self.workers - group.workers)

    def with_workers(self, number: int, count: int) -> Cluster:
        """The cluster with this many workers in the group with this number, and cards for them. If there were as many
        shards as workers that share an agent's rows, this stays so."""
        groups = tuple(replace(group, workers=count) if k == number else group for k, group in enumerate(self.groups))
        workers = sum(group.workers for group in groups) if groups else count
        together = max((group.workers for group in groups), default=count)
        return replace(
            self,
            groups=groups,
            workers=workers,
            shards=together if self.shards == self.together else max(self.shards, together),
            cards=max(self.cards, workers),
            shard_base=self.shard_base and together > 1,
        )

    @property
    def machines(self) -> int:
        return -(-min(self.workers, self.cards) // self.cards_per_machine)

    @property
    def between_cards(self) -> float:
        """Bytes per second of the slowest link in a ring through all cards."""
        return self.card.link if self.machines == 1 else min(self.card.link, self.network)


@dataclass(frozen=True)
class Setup:
    """Everything that a plan depends on. ``evaluated``: episodes per evaluation, and evaluations per run.
    ``updated_beside``, in the setup of one group: how many agents of other groups a stage updates. ``settled``: known
    precisions of scoring and training, by member; the others follow ``learning``."""

    members: tuple[Member, ...]
    turns: tuple[PlannedTurn, ...]
    demand: Demand
    plan: Plan
    cluster: Cluster
    learning: Learning = Learning()
    sampling: Sampling = Sampling()
    evaluated: tuple[int, int] = (0, 0)
    updated_beside: int = 0
    settled: Mapping[str, str] = field(default_factory=dict)

    @property
    def by_group(self) -> tuple[Setup, ...]:
        """The setup of each group of workers; this one if there are no groups."""
        groups = self.cluster.groups
        return tuple(self._of(group) for group in groups) if groups else (self,)

    def _of(self, group: Group) -> Setup:
        own = replace(
            self,
            members=tuple(member for member in self.members if member.name in group.members),
            turns=tuple(turn for turn in self.turns if turn.agent in group.members),
            demand=self.demand.of(group.members),
            cluster=self.cluster.of(group),
        )
        return replace(own, updated_beside=len(self.updated) - len(own.updated))

    @property
    def worker_demand(self) -> Demand:
        """The demand of the busiest worker."""
        return self.demand.of_worker(self.cluster.shards, self.cluster.workers)

    def member(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)

    @property
    def updated(self) -> tuple[str, ...]:
        """Agents that are updated in a stage: those that are trained and speak."""
        return tuple(name for name in self.demand.messages if any(turn.agent == name for turn in self.turns))

    def turns_of(self, name: str) -> tuple[PlannedTurn, ...]:
        return tuple(turn for turn in self.turns if turn.agent == name)

    @property
    def batches(self) -> int:
        """Batches of rollouts per stage; 1 if the plan decides this during the run."""
        return self.plan.batches(len(self.updated) + self.updated_beside) or 1

    def precision(self, member: Member) -> str:
        """The precision of scoring and training this model."""
        if member.name in self.settled:
            return self.settled[member.name]
        if self.learning.precision != "auto":
            return self.learning.precision
        if self.cluster.card.is_cpu:
            return "fp32"
        message = self.demand.lengths[member.name].message
        return likely_precision(self.plan.radii, message, adapted=member.adapted)


def likely_precision(radii: Radii, message: int, *, adapted: bool) -> str:
    """The precision that ``learner.precision: auto`` is expected to choose: the cheapest one with a noise floor of at
    most a tenth of the radius.

    If all weights are trained, a step changes each by so little that every precision below float32 rounds the change
    away (SmolLM2 at a learning rate of 1e-6), so float32 is chosen.
    """
    if not adapted:
        return "fp32"
    tokens = 1 if radii.per_token else message
    for precision in ("fp16", "tf32"):
        if FLOOR_NATS_PER_TOKEN[precision] * tokens <= VERIFIABLE_SHARE * radii.nats:
            return precision
    return "fp32"
