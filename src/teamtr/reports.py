"""Report types: warm-ups, updates with their outcomes and certificates, stages, and evaluations with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

from teamtr.types import Floats

Outcome = Literal[
    "accepted",  # within its trust region (or the plan has none)
    "accepted_unverifiable",  # within it, but the noise floor of scoring is above a tenth of the radius
    "restored",  # no step along the line was within the region with a positive surrogate
    "skipped_silent",  # the agent never spoke in the batch
    "skipped_no_signal",  # every group had equal rewards
    "skipped_non_finite",  # a loss, gradient, log-probability or every reward was not finite
]
KEPT: Final[frozenset[Outcome]] = frozenset({"accepted", "accepted_unverifiable"})
"""The outcomes after which the agent has a new policy."""
SKIPPED: Final[frozenset[Outcome]] = frozenset({"skipped_silent", "skipped_no_signal", "skipped_non_finite"})
"""The outcomes of updates that tried nothing."""
NOTHING_KEPT: Final = "the sampler kept none of these messages"
"""Why an update with ``learner.score: sampler`` computed its scores itself, if that is not a problem."""


def was_kept(outcome: object) -> bool:
    """Whether an update with this outcome was kept; False for invalid outcomes, as in a damaged log."""
    return isinstance(outcome, str) and outcome in KEPT


def was_skipped(outcome: object) -> bool:
    """Whether an update with this outcome tried nothing."""
    return isinstance(outcome, str) and outcome in SKIPPED


@dataclass(frozen=True)
class Certificate:
    """The gain is at least ``lower_bound``, the sum of the signed ``terms``. Floats, or arrays over teams."""

    kind: str
    terms: Mapping[str, float | Floats]
    lower_bound: float | Floats


@dataclass(frozen=True)
class WarmupReport:
    """The warm-up of one agent before the first stage. ``tokens`` counts prompts and completions each time they were
    processed; losses are nats per completion token, on the same few examples before and after."""

    source: str
    examples: int
    steps: int
    tokens: int
    loss_before: float
    loss_after: float
    seconds: float


@dataclass(frozen=True)
class CriticReport:
    """A critic compared with the returns of one update's batch, before it was trained on them; over tokens.

    ``explained_variance`` is 1 for a perfect critic, 0 for one as good as a constant, below 0 for a worse one; None
    if all returns were equal. ``value_error`` is a root mean square in units of reward; ``loss`` and ``clip_rate``
    are means over the steps of the update.
    """

    explained_variance: float | None
    value_error: float
    loss: float
    clip_rate: float
    thrown_away: int = 0  # steps discarded because of a non-finite loss or gradient


@dataclass(frozen=True)
class UpdateReport:
    """One update of one agent. It describes the policy that was kept, not the one that was tried.

    All KLs run from the policy before to the policy after, except ``kl_reference``, which runs from the policy after to
    the one that the run began with. ``radius``, ``kl_upper``, ``kl_rejected`` and ``noise_floor`` are in nats per
    ``unit``; ``kl_per_token`` and ``kl_reference`` per token; the others per message.
    """

    agent: str
    outcome: Outcome
    reason: str
    radius: float
    unit: Literal["message", "token"] = "message"
    kl_full: float = 0.0
    kl_upper: float = 0.0
    kl_k1: float = 0.0
    kl_k3: float = 0.0
    kl_discounted: float = 0.0
    kl_per_token: float = 0.0
    kl_reference: float | None = None  # by k3 on the batch's messages; None without a reference
    kl_rejected: float | None = None  # the upper bound of the first candidate, if it was outside the radius
    noise_floor: float | None = None
    surrogate: float = 0.0
    zeta_norm: float = 0.0
    zeta_clip: float = 0.0
    zeta_ratio: float = 0.0
    ratio_clip_rate: float = 0.0
    advantage_clip_rate: float = 0.0
    beta: float = 0.0
    step_scale: float = 1.0
    steps: int = 0
    backtracks: int = 0
    fraction: float = 0.0  # how far along the line from the old to the tried parameters the kept ones lie
    messages: int = 0
    messages_measured: int = 0  # messages in the gate check that decided
    groups: int = 0
    groups_without_signal: int = 0
    groups_non_finite: int = 0
    groups_aside: int = 0  # held out for certificates; 0: certificates come from the groups trained on
    mismatch_sampler: float | None = None  # mean |log p_sampler - log p_learner| per token
    mismatch_median: float | None = None  # the same, median over tokens
    mismatch_largest: float | None = None  # the same, largest over tokens
    mismatch_per_message: float | None = None  # median over messages of |difference of the message's log-probability|
    mismatch_kl: float | None = None  # exact KL, sampler to learner, nats per ``unit``; None: not measured
    sampler_scored: int = 0  # messages whose scores before the update were computed from the sampler's features
    own_scores: str = ""  # why the sampler's features were not used, with ``learner.score: sampler``
    critic: CriticReport | None = None  # None in plans without one
    certificates: tuple[Certificate, ...] = ()
    """Lower bounds on the gain of the kept step: ours ("turn_aware", units of reward) and the paper's ("single_step",
    units of the normalized advantage). Empty if nothing was kept or the range of rewards is not known."""
    version_before: str = ""
    version_after: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        return was_kept(self.outcome)

    def certificate(self, kind: str) -> Certificate | None:
        """The certificate of this kind; None if there is none."""
        return next((found for found in self.certificates if found.kind == kind), None)

    @property
    def zeta(self) -> float:
        return self.zeta_norm + self.zeta_clip + self.zeta_ratio


@dataclass(frozen=True)
class StageReport:
    """One stage: accepted steps, the sums of their certificates, and their gains measured on fresh batches.

    ``measured`` sums the gains of the steps after which the same problems were played again (all but the last);
    ``certified_of_measured`` sums the turn-aware certificates of the same steps, for comparison. No certificates are
    summed if one of the steps was accepted without.
    """

    stage: int
    steps: int
    accepted: int
    certificates: tuple[Certificate, ...] = ()
    measured: float | None = None
    certified_of_measured: float | None = None


@dataclass(frozen=True)
class MessageHealth:
    """Messages of a batch, of the whole team or of one agent; lengths in tokens, end token included.

    ``limit`` is the maximum length of a message (None if agents differ), ``cut`` the share of messages that ended at
    it, ``ended_mean`` the mean length of the others. ``entropy`` is in nats per token: minus the mean log-probability
    that the sampler reported for its tokens, an unbiased estimate; None without such log-probabilities. ``reward`` is
    the mean over the episodes with such a message; None if none is finite.
    """

    messages: int
    limit: int | None
    mean: float
    p95: float
    shortest: int
    longest: int
    cut: float
    ended_mean: float | None
    entropy: float | None
    reward: float | None


@dataclass(frozen=True)
class Health:
    """Key figures on whether a batch has a learning signal. ``agents``: those that spoke in it.

    ``without_signal`` is the share of groups whose rewards are all equal or not all finite; ``unparsed`` the share of
    answers that the grader could not parse, ``ungraded`` the share on which it failed. ``kl_share`` is the upper bound
    of the update's KL as a share of its radius; None if nothing was tried or there is no radius.
    """

    messages: MessageHealth | None
    agents: Mapping[str, MessageHealth]
    groups: int
    without_signal: float
    unparsed: float
    ungraded: float
    success: float
    reward_deviation: float | None
    kl_share: float | None = None


@dataclass(frozen=True)
class RewardReport:
    """The composition of a batch's rewards: the mean weighted part of each reward function; the mean individual reward
    of each agent, if the task reports them; and the grader's output since the previous update."""

    parts: Mapping[str, float] = field(default_factory=dict)
    agents: Mapping[str, float] = field(default_factory=dict)
    printed: str = ""


class Interval(NamedTuple):
    low: float
    high: float


class MeanInterval(NamedTuple):
    """A mean and its interval."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class HeldOut:
    """An evaluation of the checkpoint after ``updates`` updates, before ``stage``: the share of right answers to
    held-out problems."""

    updates: int
    stage: int
    success: float


class MeanDeviation(NamedTuple):
    """A mean over seeds, and the standard deviation of one seed; None with a single seed."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class LabelScores:
    """The problems of one label: a row of a table."""

    problems: int
    avg_at_k: float
    avg_interval: Interval
    pass_at_k: float
    """At k = K."""


@dataclass(frozen=True)
class EvalReport:
    """The results of an evaluation of P problems x K samples. Intervals are over problems, at ``confidence``."""

    problems: int
    samples: int
    confidence: float
    avg_at_k: float
    avg_interval: Interval
    pass_at_k: Mapping[int, float]
    pass_intervals: Mapping[int, Interval]
    majority_at_k: float
    majority_interval: Interval
    consensus_on_correct: float | None  # None if the agents' stated answers were not recorded
    mean_reward: float  # over finite rewards
    reward_interval: Interval
    rewards_non_finite: int
    verdicts: Mapping[str, int]
    success_P: tuple[float, ...] = ()
    """The share of right samples of each problem, for comparing two evaluations problem by problem."""
    problem_ids: tuple[str, ...] = ()
    tables: Mapping[str, Mapping[str, LabelScores]] = field(default_factory=dict)
    """Scores by the task's labels of problems: {"size": {"2*2": ..., "2*3": ...}}."""
    measures: Mapping[str, MeanInterval] = field(default_factory=dict)
    """The task's measures besides its verdicts."""
    pass_hat_k: Mapping[int, float] = field(default_factory=dict)
    """pass^k: the probability that all of k samples are right. Logs of earlier versions have none."""
    pass_hat_intervals: Mapping[int, Interval] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """As a dictionary with string keys, for the log and for JSON."""
        record = asdict(self)
        for name in ("pass_at_k", "pass_intervals", "pass_hat_k", "pass_hat_intervals"):
            record[name] = {str(k): value for k, value in record[name].items()}
        return record
