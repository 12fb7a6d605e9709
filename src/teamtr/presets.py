"""TeamTR, every baseline and every ablation as values of one ``Plan``; the loop does not distinguish between them."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from teamtr.errors import UserError
from teamtr.theory.estimators import AdvantageEstimator, CriticAdvantage, GroupAdvantage
from teamtr.theory.objective import Objective
from teamtr.types import AgentState


@dataclass(frozen=True)
class Resample:
    """When to sample new rollouts within a stage, and how to use the existing ones.

    ``every=1`` samples before each update (TeamTR), ``every=2`` before every second, ``every=0`` only at stage start.
    ``reweight`` corrects reused episodes to the current team (``theory.weights``), and samples when they are no longer
    informative: when their effective share falls below ``min_effective_share``, or so low that sampling new ones gains
    more for its cost. ``sampling_cost`` is the cost of a sampled token relative to a token that is trained on
    ("measured": in the run's first stage; None: the cost does not matter). ``partial`` keeps the parts of such
    episodes that the current team might have written itself (``rollout.redraw``); ``control`` is the share of problems
    that are also sampled from scratch, to measure the bias of doing so. ``across_stages`` trains again on the last
    stage's episodes, reweighted, if their problem is drawn again and their effective share is at least
    ``min_effective_share``.
    """

    every: int = 1
    reweight: bool = False
    min_effective_share: float = 0.0
    sampling_cost: float | Literal["measured"] | None = None
    partial: bool = False
    control: float = 0.0
    across_stages: bool = False

    @property
    def may_be_stale(self) -> bool:
        return self.every != 1


@dataclass(frozen=True)
class Region:
    """How an update is kept near the old policy.

    ``gate``: accept only if the upper KL bound is within the radius; otherwise backtrack, and finally restore.
    ``beta``: initial weight of the KL penalty; ``adapt_beta`` adapts it so that the KL approaches the radius.
    """

    gate: bool = True
    beta: float = 0.1
    adapt_beta: bool = True

    @property
    def measures_all(self) -> bool:
        """Whether the KL of all messages is measured at once: without a gate, their mean steers beta."""
        return self.adapt_beta and not self.gate


Credit = Literal["team", "own", "difference", "crossed"]
"""The returns an agent is trained on: the team's, its own, what the team would have lost without it, or the team's
averaged over the others' messages in all episodes of the problem (``rollout.credit``)."""
Allocation = Literal["equal", "gain", "certified"]
OrderKind = Literal["fixed", "reverse", "random", "largest_gain", "together"]


@dataclass(frozen=True)
class Radii:
    """The KL allowed to one step, in nats per message unless ``per_token``.

    ``adapt``: adapt each agent's radius, within a factor of ten, so that the KL it actually uses settles at ``nats``
    (the paper's ablation "adaptive delta").
    ``allocation``: how a stage's total of ``nats`` times the number of agents is split: equally, in proportion to each
    agent's last gain (app:tightness), or so that the certified bound is largest. A tenth is always split equally.
    """

    nats: float = 0.01
    per_token: bool = False
    adapt: bool = False
    allocation: Allocation = "equal"


@dataclass(frozen=True)
class Order:
    """The order of updates: one agent per step, or all together in one step. ``largest_gain`` begins with the agent
    whose last update gained most."""

    kind: OrderKind = "fixed"


@dataclass(frozen=True)
class Overlong:
    """Treatment of messages near or at their token limit (DAPO, arXiv 2503.14476, section 3.4).

    ``filter``: messages cut at the limit are not trained on; their episodes still count for their groups.
    ``cache``: an episode is punished for its worst message: by up to 1 over the last share ``cache`` of the limit, and
    by 1 if it was cut. 0 disables punishment.
    """

    filter: bool = False
    cache: float = 0.0

    @property
    def punishes(self) -> bool:
        return self.cache > 0.0


@dataclass(frozen=True)
class DynamicSampling:
    """Replace groups without a signal by new problems until every group has one or all problems were tried (DAPO, arXiv
    2503.14476, section 3.2). ``limit``: maximum number of rounds; 0 sets no limit."""

    on: bool = False
    limit: int = 0


@dataclass(frozen=True)
class TeamSize:
    """The size of a team as far as a plan's budget depends on it: the number of trained agents, and the maximum number
    of messages of an episode (None: not known before the router is built)."""

    agents: int
    turns: int | None


@dataclass(frozen=True)
class Budget:
    """A run's training budget according to its settings: sampled episodes, their maximum messages, and updates."""

    rollouts: int
    messages: int | None
    updates: int


@dataclass(frozen=True)
class Plan:
    """The settings of the algorithm: everything that Algorithm 1 and its ablations can vary.

    A batch holds ``group_size`` episodes of each of ``problems`` problems; in each of ``stages`` every agent is updated
    once.
    """

    stages: int = 40
    problems: int = 32
    group_size: int = 16
    gamma: float = 1.0
    advantage: AdvantageEstimator = field(default_factory=GroupAdvantage)
    radii: Radii = field(default_factory=Radii)
    resample: Resample = field(default_factory=Resample)
    region: Region = field(default_factory=Region)
    objective: Objective = field(default_factory=Objective)
    order: Order = field(default_factory=Order)
    overlong: Overlong = field(default_factory=Overlong)
    dynamic_sampling: DynamicSampling = field(default_factory=DynamicSampling)
    credit: Credit = "team"

    @classmethod
    def preset(cls, name: str = "teamtr", *, radius: float | None = None, **changes: Any) -> Plan:
        """A named plan with some values changed: ``Plan.preset("teamtr", radius=0.05, stages=10)``.

        ``radius`` is the KL allowed to one update, in nats per message (or per token, as the plan's ``radii`` say).
        """
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UserError(f"there is no preset {name!r}{hint}; there are {', '.join(PRESETS)}")
        known = {value.name for value in fields(cls)}
        if unknown := sorted(changes.keys() - known):
            raise UserError(f"a plan has no {unknown[0]!r}; it has radius, {', '.join(sorted(known))}")
        plan = replace(PRESETS[name], **changes)
        return plan if radius is None else replace(plan, radii=replace(plan.radii, nats=radius))

    def return_range(self, reward_range: float | None) -> float | None:
        """Largest minus smallest return of the team if rewards have this range: a punishment adds 1."""
        return reward_range if reward_range is None or not self.overlong.punishes else reward_range + 1.0

    def first_state(self) -> AgentState:
        """The state that every agent's first update begins with."""
        return AgentState(beta=self.region.beta, step_scale=1.0, radius_nats=self.radii.nats)

    def batches(self, agents: int) -> int | None:
        """The number of batches that a stage samples; None if that is decided during the run."""
        measured = self.resample.min_effective_share > 0.0 or self.resample.sampling_cost is not None
        if self.dynamic_sampling.on or (self.resample.reweight and measured):
            return None
        if self.order.kind == "together" or self.resample.every == 0:
            return 1
        return -(-agents // self.resample.every)

    def budget(self, size: TeamSize) -> Budget | None:
        """The plan's budget with a team of this size; None if that is decided during the run."""
        batches = self.batches(size.agents)
        if batches is None:
            return None
        rollouts = self.stages * batches * self.problems * self.group_size
        messages = None if size.turns is None else rollouts * size.turns
        return Budget(rollouts, messages, self.stages * size.agents)

    @property
    def critic(self) -> CriticAdvantage | None:
        """The critic's advantage estimator; None in plans without a critic."""
        return self.advantage if isinstance(self.advantage, CriticAdvantage) else None

    @property
    def reuses_rollouts(self) -> bool:
        """Whether one batch may be used for several updates, the later ones on rollouts of an older team."""
        return self.resample.may_be_stale or self.order.kind == "together"


MatchBy = Literal["rollouts", "tokens", "updates"]


def matched(plan: Plan, by: MatchBy, size: TeamSize, reference: TeamSize) -> Plan:
    """The plan with sizes changed so that a team of size ``size`` spends what TeamTR would spend with a team of size
    ``reference`` at the plan's own sizes. Matching rollouts or tokens changes ``problems``, updates ``stages``.

    Message lengths are learned and cannot be set, so tokens are matched by messages: rollouts times turns.
    """
    if by == "updates":
        return replace(plan, stages=_nearest(plan.stages * reference.agents, size.agents))
    batches = plan.batches(size.agents)
    if batches is None:
        raise ValueError("a plan that decides as it goes what it samples cannot be matched before it runs")
    wanted, each = plan.problems * reference.agents, batches
    if by == "tokens":
        if size.turns is None or reference.turns is None:
            raise ValueError("matched tokens need to know how many turns an episode has")
        wanted, each = wanted * reference.turns, each * size.turns
    return replace(plan, problems=_nearest(wanted, each))


def _nearest(a: int, b: int) -> int:
    """a / b rounded to the nearest integer, halves up, and at least 1."""
    return max(1, (2 * a + b) // (2 * b))


TEAMTR = Plan()
STALE = Resample(every=0)
UNGATED = Region(gate=False, beta=0.0, adapt_beta=False)
PPO = replace(  # arXiv 1707.06347
    TEAMTR, advantage=CriticAdvantage(), objective=Objective(ratio="token", average_over="tokens"), region=UNGATED
)
GRPO = replace(  # arXiv 2402.03300
    TEAMTR,
    advantage=GroupAdvantage(clip=math.inf),
    objective=Objective(ratio="token", reference_kl=0.04),
    region=UNGATED,
)
DAPO = replace(  # arXiv 2503.14476
    TEAMTR,
    advantage=GroupAdvantage(clip=math.inf),
    objective=Objective(ratio="token", clip_low=0.2, clip_high=0.28, average_over="tokens"),
    region=UNGATED,
    overlong=Overlong(filter=True, cache=0.2),
    dynamic_sampling=DynamicSampling(on=True),
)

PRESETS: dict[str, Plan] = {
    "teamtr": TEAMTR,
    # resampling (tab:ablation)
    "naive_sequential": replace(TEAMTR, resample=STALE),
    "resample_every_2": replace(TEAMTR, resample=Resample(every=2)),
    "reweighted": replace(TEAMTR, resample=Resample(every=0, reweight=True)),
    "auto": replace(
        TEAMTR,
        resample=Resample(every=0, reweight=True, min_effective_share=0.3, sampling_cost="measured"),
        credit="crossed",
    ),
    "partial": replace(
        TEAMTR, resample=Resample(every=0, reweight=True, min_effective_share=0.5, partial=True, control=0.125)
    ),
    "joint": replace(TEAMTR, order=Order("together")),
    # trust region (tab:ablation)
    "no_trust_region": replace(TEAMTR, region=UNGATED),
    "kl_penalty_adaptive": replace(TEAMTR, region=Region(gate=False, adapt_beta=True)),
    "kl_penalty_fixed": replace(TEAMTR, region=Region(gate=False, adapt_beta=False)),
    "adaptive_radius": replace(TEAMTR, radii=Radii(adapt=True)),
    # order (tab:ablation)
    "fixed_order": TEAMTR,
    "reverse_order": replace(TEAMTR, order=Order("reverse")),
    "random_order": replace(TEAMTR, order=Order("random")),
    # advantage estimation (tab:ablation)
    "no_normalization": replace(TEAMTR, advantage=GroupAdvantage(normalize=False)),
    "no_clipping": replace(TEAMTR, advantage=GroupAdvantage(clip=math.inf)),
    # single agents: a team of one with another objective (tab:main-results)
    "ppo": PPO,
    "grpo": GRPO,
    "dapo": DAPO,
    # the same for teams, with one batch per stage (sec. 5.2)
    "sequential_ppo": replace(PPO, resample=STALE),
    "sequential_grpo": replace(GRPO, resample=STALE),
    "sequential_dapo": replace(DAPO, resample=STALE),
}
"""Every named plan. ``joint`` and ``naive_sequential`` are mathematically equivalent: with separate parameters and one
batch, updating together or in turn gives the same weights, bit for bit, also in whole runs (tests/e2e/test_teams.py).
``no_clipping`` differs from ``teamtr`` only for groups of more than ten, such as the default of 16, because a
group-normalized advantage cannot exceed sqrt(G - 1)."""
