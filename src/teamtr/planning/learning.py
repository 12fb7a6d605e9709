"""Seconds of an update: scoring, optimizer steps and the gate, each pass bound by matrix products or launches."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from teamtr.engines.estimate import HALVES
from teamtr.planning import rates
from teamtr.planning.cards import Card
from teamtr.planning.memory import moved_by_cast, scored_at_once
from teamtr.planning.seconds import Load, Spent, distinct
from teamtr.planning.setup import Member, Setup
from teamtr.training.gate import FEWEST
from teamtr.training.scoring import FLOOR_MESSAGES
from teamtr.training.update import messages_measured

ATTENTION_BACK = 2.5
"""Operations of attention in the backward pass, relative to the forward pass. Its kernels do not keep attention
weights: they recompute the scores, and then compute the gradients of weights, queries, keys and values, with five
products instead of two."""


@dataclass(frozen=True)
class Selection:
    """The messages of a pass: of how many problems and episodes, in how many micro-batches."""

    problems: float
    episodes: float
    micro_batches: float


@dataclass(frozen=True)
class PassCount:
    """Number of passes through the model that a phase makes on one worker; each pass gathers a partitioned base."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: PassCount) -> PassCount:
        return PassCount(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True)
class LearnerCost:
    """Costs of one agent's model during its update, on one card."""

    setup: Setup
    member: Member
    recomputes: bool = False
    """Whether the backward pass of a step recomputes activations."""

    @property
    def card(self) -> Card:
        return self.setup.cluster.card

    @property
    def turns(self) -> int:
        return len(self.setup.turns_of(self.member.name))

    def forward(self, rows: Selection, heads: int) -> Spent:
        """A pass without gradients. ``heads``: how often the output layer is computed, e.g. for the new and the old
        policy."""
        products = self._layers(rows, 2.0) + heads * self.member.shape.head_flops(self._said(rows))
        return self._bound(products, self._attention(rows), rates.SCORE, rows.micro_batches, rows.micro_batches)

    def step(self, rows: Selection) -> Spent:
        """A forward and a backward pass. The backward pass has one product for every product of the forward pass, and
        another one for weights that are trained themselves. The output layer is also computed for the old policy; both
        are computed again if the logits of a micro-batch are not held until the backward pass."""
        factor, again = 4.0 if self.member.adapted else 6.0, 1.0 if self.recomputes else 0.0
        heads = factor / 2.0 + 1.0 + (0.0 if self._holds_logits(rows) else 2.0)
        head = self.member.shape.head_flops(self._said(rows)) * heads
        adapters = 6.0 * self.member.trained * self._tokens(rows) if self.member.adapted else 0.0
        products = self._layers(rows, factor + 2.0 * again) + head + adapters
        attention = (1.0 + ATTENTION_BACK + again) * self._attention(rows)
        passes, casts = (3.0 + again) * rows.micro_batches, (2.0 + again) * rows.micro_batches
        return self._bound(products, attention, rates.TRAIN, passes, casts)

    def _tokens(self, rows: Selection) -> float:
        return sum(distinct(turn, rows.problems, rows.episodes) for turn in self.setup.turns_of(self.member.name))

    def _said(self, rows: Selection) -> float:
        return rows.episodes * sum(turn.message for turn in self.setup.turns_of(self.member.name))

    def _holds_logits(self, rows: Selection) -> bool:
        """Whether the logits of a step's largest micro-batch fit into one chunk. Its messages are of one shard."""
        turns, shards = self.setup.turns_of(self.member.name), Load.learned(self.setup).parts
        messages = min(self.setup.learning.micro_batch, ceil(rows.episodes * self.turns / shards))
        positions = messages * max((turn.message for turn in turns), default=0)
        return positions <= scored_at_once(self.setup, self.member)

    def _layers(self, rows: Selection, factor: float) -> float:
        """Operations of the layers' products: ``factor`` for each weight and token. Common prefixes count once."""
        return factor * self.member.shape.body * self._tokens(rows)

    def _attention(self, rows: Selection) -> float:
        """Operations of attention in the forward pass. It covers whole rows, also where their prefixes are common."""
        return sum(
            self.member.shape.attention_flops(rows.episodes * turn.whole, turn.whole / 2)
            for turn in self.setup.turns_of(self.member.name)
        )

    def _bound(self, products: float, attention: float, shares: dict[str, float], passes: float, casts: float) -> Spent:
        """On a card, operations and launches overlap, and the longer one counts. On a CPU they add up. ``casts``: how
        often all weights are cast, if they are kept in another precision than they are computed in."""
        precision, layers, beside = self.setup.precision(self.member), self.member.shape.layers, self.setup.cluster
        share = rates.CPU_SHARE if self.card.is_cpu else shares[precision]
        attended = share if self.card.is_cpu else rates.ATTENTION.get(precision, share)
        compute = (products / share + attention / attended) / self.card.flops[precision] * beside.busy_on_a_card
        moved = casts * moved_by_cast(self.setup, self.member, precision) * self.member.shape.body
        work = Spent.on(compute=compute, bandwidth=moved / (rates.READ * self.card.bandwidth) * beside.busy_on_a_card)
        if self.card.is_cpu:
            return work + Spent.on(launches=layers * rates.CPU_BLOCK_S * passes * beside.busy_on_a_card)
        launches = layers * rates.HOST_BLOCK_S * passes
        return work if work.seconds >= launches else Spent.on(launches=launches)


def score_seconds(learner: LearnerCost) -> tuple[Spent, PassCount]:
    """Scoring with the old policy and, if the objective has one, the reference policy, and measuring the noise
    floor."""
    load = Load.learned(learner.setup)
    everything = all_rows(learner, load)
    times = 2 if learner.setup.plan.objective.has_reference else 1
    floor = some_rows(learner, load, FLOOR_MESSAGES)
    spent = learner.forward(everything, 1) * times + learner.forward(floor, 2)
    return spent.waiting(load.busy), PassCount(times * everything.micro_batches + floor.micro_batches)


def train_seconds(learner: LearnerCost) -> tuple[Spent, PassCount]:
    """The steps of all epochs, the measurement that sizes the first step, and those that may stop training early."""
    load, setup = Load.learned(learner.setup), learner.setup
    step = step_rows(learner, load)
    steps = setup.learning.epochs * setup.learning.minibatches
    spent, passes = learner.step(step) * steps, PassCount(steps * step.micro_batches, steps * step.micro_batches)
    if setup.plan.region.gate:
        whole = setup.plan.problems * setup.plan.group_size * learner.turns
        turns = setup.turns_of(learner.member.name)
        measured = messages_measured(sum(turn.message for turn in turns) / len(turns))
        first = some_rows(learner, load, min(measured, ceil(whole / setup.learning.minibatches)))
        later, times = some_rows(learner, load, measured), setup.learning.epochs - 1
        spent += learner.forward(first, 2) + learner.forward(later, 2) * times
        passes += PassCount(first.micro_batches + times * later.micro_batches)
    return spent.waiting(load.busy), passes


def gate_seconds(learner: LearnerCost) -> tuple[Spent, PassCount]:
    """Measuring the first subsample, which is assumed to decide; or all messages, in plans that reuse rollouts or that
    adapt beta without a gate."""
    load, setup = Load.learned(learner.setup), learner.setup
    plan = setup.plan
    share = 1.0 if plan.reuses_rollouts or plan.region.measures_all else setup.learning.gate_share
    episodes = min(plan.group_size, max(-(-FEWEST // plan.problems), int(-(-share * plan.group_size // 1))))
    problems = load.problems * load.parts
    each = load.problems * episodes * learner.turns
    rows = Selection(problems, problems * episodes, load.parts * _micro_batches(learner, each))
    return learner.forward(rows, 2).waiting(load.busy), PassCount(rows.micro_batches)


def all_rows(learner: LearnerCost, load: Load) -> Selection:
    """All messages of a worker, shard by shard."""
    each = _micro_batches(learner, load.rows * learner.turns)
    return Selection(load.problems * load.parts, load.rows * load.parts, load.parts * each)


def step_rows(learner: LearnerCost, load: Load) -> Selection:
    """The messages of one step, drawn at random: few episodes of a problem are in the same step and share their
    prompt."""
    steps, group = learner.setup.learning.minibatches, learner.setup.plan.group_size
    problems = load.problems * load.parts * (1.0 - (1.0 - 1.0 / steps) ** group)
    each = _micro_batches(learner, load.rows * learner.turns / steps)
    return Selection(problems, load.rows * load.parts / steps, load.parts * each)


def some_rows(learner: LearnerCost, load: Load, messages: int) -> Selection:
    """This many of all messages, spread over the workers. Hardly any two of them are of one problem."""
    whole = learner.setup.plan.problems * learner.setup.plan.group_size * learner.turns
    share = min(1.0, messages / whole)
    own = share * load.rows * load.parts
    shards = min(load.parts, own * learner.turns)
    each = _micro_batches(learner, own * learner.turns / shards)
    return Selection(min(own, load.problems * load.parts), own, shards * each)


def _micro_batches(learner: LearnerCost, messages: float) -> float:
    """Number of passes over this many messages. On a card in half precision, passes are filled by tokens, up to those
    that a micro-batch of the longest turn has; messages of shorter turns take less."""
    setup, sizes = learner.setup, [turn.whole for turn in learner.setup.turns_of(learner.member.name)]
    if not learner.card.is_cpu and setup.precision(learner.member) in HALVES:
        messages *= sum(sizes) / (len(sizes) * max(sizes))
    return max(1.0, -(-messages // setup.learning.micro_batch))
