"""What is reported: warm-ups, outcomes and certificates of updates, stages, and evaluations with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

from teamtr.types import Floats

Outcome = Literal[
    "accepted",  # inside its region (or no region was asked for)
    "accepted_unverifiable",  # inside, but the noise floor of scoring is above a tenth of the radius
    "restored",  # no step along the line was inside the region with a positive surrogate
    "skipped_silent",  # the agent never spoke in the batch
    "skipped_no_signal",  # every group had equal rewards
    "skipped_non_finite",  # a loss, gradient, log-probability or every reward was not finite
]
KEPT: Final[frozenset[Outcome]] = frozenset({"accepted", "accepted_unverifiable"})
"""The outcomes after which the agent's policy is another."""
SKIPPED: Final[frozenset[Outcome]] = frozenset({"skipped_silent", "skipped_no_signal", "skipped_non_finite"})
"""The outcomes of updates that tried nothing."""
NOTHING_KEPT: Final = "the sampler kept none of these messages"
"""Why an update with ``learner.score: sampler`` computed its scores itself, where nothing is wrong."""


def was_kept(outcome: object) -> bool:
    """Whether an update with this outcome was kept; no for whatever is not an outcome, as a damaged log may hold."""
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
    """What one agent was trained on before the first stage. ``tokens`` are of prompts and completions, as often as they
    were read; losses are nats per token of the completions, over the same few examples before and after."""

    source: str
    examples: int
    steps: int
    tokens: int
    loss_before: float
    loss_after: float
    seconds: float


@dataclass(frozen=True)
class CriticReport:
    """A critic beside the returns of one update's batch, before it learned from them; over tokens.

    ``explained_variance`` is 1 for a perfect critic, 0 for one as good as a constant, below 0 for a worse one; None
    where all returns were equal. ``value_error`` is a root mean square in units of reward; ``loss`` and ``clip_rate``
    are means over the steps of the update.
    """

    explained_variance: float | None
    value_error: float
    loss: float
    clip_rate: float
    thrown_away: int = 0  # steps with a loss or gradient that was not finite


@dataclass(frozen=True)
class UpdateReport:
    """One update of one agent: the policy that was kept, never the one that was tried.

    All KLs run from the policy before to the policy after, but ``kl_reference`` from the policy after to the one that
    the run began with. ``radius``, ``kl_upper``, ``kl_rejected`` and ``noise_floor`` are in nats per ``unit``;
    ``kl_per_token`` and ``kl_reference`` per token; the others per message.
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
    kl_rejected: float | None = None  # the upper bound of the first candidate, when it was outside
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
    messages_measured: int = 0  # of them, by the look of the gate that decided
    groups: int = 0
    groups_without_signal: int = 0
    groups_non_finite: int = 0
    groups_aside: int = 0  # not trained on: the certificates are theirs; 0: of those that were trained on
    mismatch_sampler: float | None = None  # mean |log p_sampler - log p_learner| per token
    mismatch_median: float | None = None  # the same, median over tokens
    mismatch_largest: float | None = None  # the same, largest over tokens
    mismatch_per_message: float | None = None  # median over messages of |log-probability of the whole message| apart
    mismatch_kl: float | None = None  # exact KL, sampler's law to learner's own, nats per ``unit``; None: not measured
    sampler_scored: int = 0  # messages whose scores before the update rest on the sampler's features
    own_scores: str = ""  # why on none of them, where the plan asks for it
    critic: CriticReport | None = None  # None in plans without one
    certificates: tuple[Certificate, ...] = ()
    """What the kept step is worth at least: ours ("turn_aware", units of reward) and the paper's ("single_step", units
    of the normalized advantage). Empty when nothing was kept or the range of rewards is not known."""
    version_before: str = ""
    version_after: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        return was_kept(self.outcome)

    def certificate(self, kind: str) -> Certificate | None:
        """The certificate of this kind; None when there is none."""
        return next((found for found in self.certificates if found.kind == kind), None)

    @property
    def zeta(self) -> float:
        return self.zeta_norm + self.zeta_clip + self.zeta_ratio


@dataclass(frozen=True)
class StageReport:
    """One stage: what was kept, the sum of its steps' certificates, and what fresh batches measured of their gains.

    ``measured`` sums the gains of the steps after which the same problems were played again (all but the last);
    ``certified_of_measured`` sums the turn-aware certificates of the same steps, to be compared with it.
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

    ``limit`` is the most that a message may have (None where agents differ), ``cut`` the share of messages that ended
    at it, ``ended_mean`` the mean length of the others. ``entropy`` is in nats per token: minus the mean of what the
    sampler says of the log-probability of its own tokens, an unbiased estimate; None where it said nothing. ``reward``
    is the mean of the episodes with such a message; None where none is finite.
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
    """Whether a batch can teach anything, at a glance. ``agents``: who spoke in it.

    ``without_signal`` is the share of groups whose rewards are all equal or not finite; ``unparsed`` the share of
    answers in which the grader found none, ``ungraded`` of those on which it failed. ``kl_share`` is the upper bound
    of the update's KL as a share of its radius; None where nothing was tried, or without a radius.
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
    """What the rewards of a batch are made of: the mean of each function's part, with its weight; what agents earned by
    themselves on average, where the task says so; and what the grader printed since the update before."""

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
    """What an evaluation found of the checkpoint after so many updates: the share of right answers to held-out
    problems, before this stage."""

    updates: int
    stage: int
    success: float


class MeanDeviation(NamedTuple):
    """A mean over seeds and the deviation of one seed; None where there is one seed alone."""

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
    """What an evaluation of P problems x K samples found. Intervals are over problems, at ``confidence``."""

    problems: int
    samples: int
    confidence: float
    avg_at_k: float
    avg_interval: Interval
    pass_at_k: Mapping[int, float]
    pass_intervals: Mapping[int, Interval]
    majority_at_k: float
    majority_interval: Interval
    consensus_on_correct: float | None  # None when nobody recorded what the agents stated
    mean_reward: float  # over finite rewards
    reward_interval: Interval
    rewards_non_finite: int
    verdicts: Mapping[str, int]
    success_P: tuple[float, ...] = ()
    """The share of right samples of each problem, so that two evaluations can be compared problem by problem."""
    problem_ids: tuple[str, ...] = ()
    tables: Mapping[str, Mapping[str, LabelScores]] = field(default_factory=dict)
    """By what the task labels problems with: {"size": {"2*2": ..., "2*3": ...}}."""
    measures: Mapping[str, MeanInterval] = field(default_factory=dict)
    """What the task measures besides its verdicts."""
    pass_hat_k: Mapping[int, float] = field(default_factory=dict)
    """pass^k: the chance that all of k samples are right. Logs of earlier versions have none."""
    pass_hat_intervals: Mapping[int, Interval] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """For the log and for JSON: keys are text."""
        record = asdict(self)
        for name in ("pass_at_k", "pass_intervals", "pass_hat_k", "pass_hat_intervals"):
            record[name] = {str(k): value for k, value in record[name].items()}
        return record
