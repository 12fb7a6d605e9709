"""TeamTR, every baseline and every ablation as values of one ``Plan``. The loop never asks which one it runs."""

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
    """When to sample the team's conversations anew within a stage, and what is made of those that are there.

    ``every=1`` before each update (TeamTR), ``every=2`` before every second, ``every=0`` only at stage start.
    ``reweight`` corrects reused episodes to the present team (``theory.weights``), and samples when they are worn out:
    when their effective share falls below ``min_effective_share``, or below what makes them the better buy, where
    ``sampling_cost`` says what one sampled token costs beside one that is trained on ("measured": in the run's first
    stage; None: the cost does not matter). ``partial`` keeps of worn-out episodes what the present team might have said
    itself (``rollout.redraw``); ``control`` is the share of problems that are sampled wholly anew beside it, to see by
    how much that is wrong. ``across_stages`` learns from the last stage's episodes once more, reweighted, where a
    problem is drawn again and they are still worth ``min_effective_share``.
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
    """How an update is held near the old policy.

    ``gate``: accept only when the upper KL bound is within the radius, back off otherwise, else restore.
    ``beta``: starting weight of the KL penalty; ``adapt_beta`` steers it towards the radius.
    """

    gate: bool = True
    beta: float = 0.1
    adapt_beta: bool = True

    @property
    def measures_all(self) -> bool:
        """Whether the KL of all messages is measured at once: without a gate, their mean steers beta."""
        return self.adapt_beta and not self.gate


Credit = Literal["team", "own", "difference", "crossed"]
"""Which returns an agent is trained on: the team's, its own, what the team would have lost without it, or the team's
with all that the others said in other episodes (``rollout.credit``)."""
Allocation = Literal["equal", "gain", "certified"]
OrderKind = Literal["fixed", "reverse", "random", "largest_gain", "together"]


@dataclass(frozen=True)
class Radii:
    """The KL allowed to one step, in nats per message unless ``per_token``.

    ``adapt``: move each agent's radius so that the KL it really uses settles at ``nats`` (the paper's ablation
    "adaptive delta"), within a factor of ten.
    ``allocation``: how a stage's total of ``nats`` times the number of agents is shared out: equally, in proportion to
    each agent's last gain (app:tightness), or so that the certified bound is largest; a tenth is equal in any case.
    """

    nats: float = 0.01
    per_token: bool = False
    adapt: bool = False
    allocation: Allocation = "equal"


@dataclass(frozen=True)
class Order:
    """Who is updated when: one agent a step, or all of them together in one step. ``largest_gain`` takes first the
    agent whose last update gained most."""

    kind: OrderKind = "fixed"


@dataclass(frozen=True)
class Overlong:
    """What happens to messages near or at their token limit (DAPO, arXiv 2503.14476, section 3.4).

    ``filter``: no step is made from a message that was cut at the limit; its episode still counts for its group.
    ``cache``: an episode is punished for its worst message, by up to 1 over the last ``cache`` of the limit and by 1
    where it was cut; 0 punishes nothing.
    """

    filter: bool = False
    cache: float = 0.0

    @property
    def punishes(self) -> bool:
        return self.cache > 0.0


@dataclass(frozen=True)
class DynamicSampling:
    """Put new problems in the place of groups without signal until every group has one, or all problems were tried
    (DAPO, arXiv 2503.14476, section 3.2). ``limit``: rounds of that at most; 0 sets no limit."""

    on: bool = False
    limit: int = 0


@dataclass(frozen=True)
class TeamSize:
    """What of a team decides what a plan spends: how many agents are trained, and how many messages an episode has at
    most (None: not known before the router is built)."""

    agents: int
    turns: int | None


@dataclass(frozen=True)
class Budget:
    """What a run spends on training, by its settings: episodes that are sampled, messages in them at most, updates."""

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
        """Largest minus smallest return of the team, when rewards have this range: a punishment adds 1."""
        return reward_range if reward_range is None or not self.overlong.punishes else reward_range + 1.0

    def first_state(self) -> AgentState:
        """What every agent's first update begins with."""
        return AgentState(beta=self.region.beta, step_scale=1.0, radius_nats=self.radii.nats)

    def batches(self, agents: int) -> int | None:
        """How many batches a stage of so many agents samples; None where the run decides that as it goes."""
        measured = self.resample.min_effective_share > 0.0 or self.resample.sampling_cost is not None
        if self.dynamic_sampling.on or (self.resample.reweight and measured):
            return None
        if self.order.kind == "together" or self.resample.every == 0:
            return 1
        return -(-agents // self.resample.every)

    def budget(self, size: TeamSize) -> Budget | None:
        """What the plan spends with a team of this size; None where the run decides that as it goes."""
        batches = self.batches(size.agents)
        if batches is None:
            return None
        rollouts = self.stages * batches * self.problems * self.group_size
        messages = None if size.turns is None else rollouts * size.turns
        return Budget(rollouts, messages, self.stages * size.agents)

    @property
    def critic(self) -> CriticAdvantage | None:
        """How advantages come from a critic; None in plans without one."""
        return self.advantage if isinstance(self.advantage, CriticAdvantage) else None

    @property
    def reuses_rollouts(self) -> bool:
        """Whether one batch may serve several updates, so that later ones learn from what an older team wrote."""
        return self.resample.may_be_stale or self.order.kind == "together"


MatchBy = Literal["rollouts", "tokens", "updates"]


def matched(plan: Plan, by: MatchBy, size: TeamSize, reference: TeamSize) -> Plan:
    """The plan with other sizes, so that a team of this size spends with it what TeamTR would spend with the team of
    reference at the plan's own sizes: by rollouts or tokens another number of problems, by updates one of stages.

    What messages are long is learned and not set, so tokens are counted by messages: rollouts times turns.
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
    """The whole number nearest to a / b, 1 at least; a half goes up."""
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
"""Every named plan. ``joint`` and ``naive_sequential`` differ in name more than in mathematics: with separate
parameters and one batch, updating together or in turn gives the same weights (bit for bit, also in whole runs:
tests/e2e/test_teams.py). ``no_clipping`` differs from ``teamtr`` only for groups of more than ten, as the default of
16 is: a group-normalized advantage cannot exceed sqrt(G - 1)."""
