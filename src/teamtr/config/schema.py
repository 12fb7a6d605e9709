"""The schema: what a team file may say, section by section, with every default.

Types check single values; what only several fields together can have wrong, a section says in ``_refusals``. The team
has a module of its own (``team``); the keys of a task are in its class (``Config``), which the registry of tasks finds
by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, Field, SerializeAsAny, Strict, ValidationInfo
from pydantic_core import PydanticCustomError

from teamtr.config.cluster import ClusterConfig
from teamtr.config.team import TeamConfig
from teamtr.config.texts import Device, Preset, RunName
from teamtr.config.vllm import VllmConfig
from teamtr.errors import UserError
from teamtr.presets import (
    PRESETS,
    TEAMTR,
    Allocation,
    Budget,
    MatchBy,
    Order,
    OrderKind,
    Plan,
    Resample,
    TeamSize,
    matched,
)
from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, Count, Decay, Flag, From0, Positive, UpTo1
from teamtr.tasks.config import TaskConfig
from teamtr.tasks.registry import section_class
from teamtr.theory.estimators import AdvantageEstimator, CriticAdvantage, GroupAdvantage
from teamtr.theory.objective import AverageOver, Ratio

MOST_RANK = 512
"""Of an adapter in vLLM."""


class TinyConfig(Section):
    """The built-in model: a small transformer over characters."""

    layers: Positive = key(2, "Transformer blocks.")
    width: Positive = key(64, "Hidden size; an even multiple of heads.")
    heads: Positive = key(4, "Attention heads.")
    warmup_steps: Count = key(200, "Supervised warm-up steps on the form of messages, before training.")
    warmup_learning_rate: From0 = key(3e-3, "Learning rate of the warm-up.")

    def _refusals(self) -> Iterator[Refusal]:
        if self.width % (2 * self.heads):
            # Rotary positions turn the two halves of each head against each other.
            message = f"tiny.width must be an even multiple of tiny.heads ({self.heads}), got {self.width}"
            yield Refusal(("tiny", "width"), message, (("tiny", "width"), ("tiny", "heads")))


class PlanConfig(Section):
    """The algorithm: a preset, and the keys that differ from it. Keys that are left out come from the preset."""

    unset_means: ClassVar[str] = "the preset's"

    preset: Preset = key("teamtr", "The algorithm to start from; see teamtr.presets.")
    stages: Positive = key(40, "Stages; in each, every agent is updated once.")
    problems: Positive = key(32, "Problems in a batch.")
    group_size: Annotated[int, Strict(), Ge(2)] = key(16, "Episodes per problem.")
    radius_nats_per_message: Above0 | None = unset("Largest KL of one update, in nats per message.")
    radius_nats_per_token: Above0 | None = unset("The same, in nats per token instead of per message.")
    gamma: Annotated[float, Strict(), Gt(0), Le(1)] = key(1.0, "Discount per turn.")
    normalize: Flag | None = unset(
        "Divide advantages by the standard deviation of their group; with a critic, by that of the batch's tokens, "
        "after subtracting their mean."
    )
    a_clip: Above0 | None = unset("Advantages are clipped to this size; .inf for no clipping.", allow_inf_nan=True)
    critic: Flag | None = unset(
        "Take advantages per token from a critic (a value head per agent) instead of from the group, as in PPO; needs "
        "plan.ratio: token."
    )
    gae_lambda: UpTo1 | None = unset(
        "With a critic: 1 is the return less the value, 0 the one-step error (generalized advantage estimation)."
    )
    value_clip: Above0 | None = unset(
        "With a critic: a value that has moved this far in one update is drawn no further, in units of reward; .inf "
        "for no clipping.",
        allow_inf_nan=True,
    )
    clip: Above0 | None = unset("Clip range of the likelihood ratio: 1 - clip to 1 + clip.")
    clip_high: Above0 | None = unset("The upper clip range, if it differs from clip.")
    ratio: Ratio | None = unset("What the likelihood ratio is taken over.")
    average_over: AverageOver | None = unset("What the objective averages over.")
    reference_kl: From0 | None = unset(
        "Weight of the KL per token from the new policy to the run's initial policy, as in GRPO; 0 for none."
    )
    order: OrderKind | None = unset("Order of the updates in a stage; fixed is the order in which agents are listed.")
    resample_every: Count | None = unset(
        "Collect fresh rollouts before every n-th update; 0: only at the start of a stage."
    )
    reweight: Flag | None = unset(
        "Reweight reused episodes to the present team by their likelihood ratio, instead of taking them as they are."
    )
    min_effective_share: UpTo1 | None = unset(
        "With reweight: sample anew when reused episodes are worth less than this share of as many fresh ones."
    )
    sampling_cost: Literal["measured"] | Above0 | None = unset(
        "With reweight: cost of sampling one token, as a multiple of training on one; sample anew also when that is "
        "the better buy. measured: in the run's first stage, so that two runs may decide differently."
    )
    resample_partially: Flag | None = unset(
        "With reweight: of episodes that are worth too little, keep what the present team might have said itself."
    )
    reuse_across_stages: Flag | None = unset(
        "With reweight: learn once more from the last stage's episodes where a problem is drawn again, if they are "
        "still worth min_effective_share."
    )
    control_share: UpTo1 | None = unset(
        "With resample_partially: share of problems that are also sampled wholly anew, to measure the bias."
    )
    gate: Flag | None = unset("Accept an update only if its upper KL bound is within the radius.")
    beta: From0 | None = unset("Initial weight of the KL penalty.")
    adapt_beta: Flag | None = unset("Adapt beta so that the KL approaches the radius.")
    allocate: Allocation | None = unset(
        "How a stage's KL budget is split among agents: equally, by each agent's last gain, or for the best certified "
        "bound."
    )
    adapt_radius: Flag | None = unset("Move each agent's radius towards the KL that it actually uses.")
    overlong_filter: Flag | None = unset("Exclude messages truncated at max_tokens from the loss, as in DAPO.")
    overlong_cache: UpTo1 | None = unset(
        "Share of max_tokens, at its end, over which a message lowers its episode's reward by up to 1; a truncated "
        "message lowers it by 1, as in DAPO. The worst message counts; 0: no punishment."
    )
    dynamic_sampling: Flag | None = unset(
        "Replace groups with equal rewards by new problems, until every group has a signal or all problems were "
        "tried, as in DAPO."
    )
    dynamic_sampling_limit: Count = key(0, "Most rounds of dynamic sampling for one batch; 0: no limit.")
    match: Literal["off", MatchBy] = key(
        "off",
        "Spend what the preset teamtr would spend at these stages, problems and group_size. rollouts: changes the "
        "problems of a batch, so that as many episodes are sampled. tokens: the same, by episodes times messages per "
        "episode. updates: changes the stages.",
    )
    match_agents: Count = key(0, "With match: how many agents the team to be matched trains; 0: as many as this one.")
    match_turns: Count = key(
        0, "With match: tokens, how many messages its episodes have; 0: as many as this team's episodes."
    )

    def _settle(self) -> None:
        """Write out the preset's radius when none is given."""
        if self.radius_nats_per_message is None and self.radius_nats_per_token is None:
            radii = PRESETS[self.preset].radii
            unit = "radius_nats_per_token" if radii.per_token else "radius_nats_per_message"
            object.__setattr__(self, unit, radii.nats)

    def _refusals(self) -> Iterator[Refusal]:
        if self.radius_nats_per_message is not None and self.radius_nats_per_token is not None:
            message = "plan.radius_nats_per_message and plan.radius_nats_per_token exclude each other; give one"
            yield Refusal(("plan", "radius_nats_per_token"), message, at_key=True)
        if self.dynamic_sampling_limit and not self.plan().dynamic_sampling.on:
            message = "plan.dynamic_sampling_limit limits nothing: set plan.dynamic_sampling: true, or leave it out"
            yield Refusal(("plan", "dynamic_sampling_limit"), message, at_key=True)
        if self.allocate not in (None, "equal") and self.plan().reuses_rollouts:
            message = (
                f"plan.allocate: {self.allocate} goes by certificates, and a plan that reuses rollouts has none for "
                "its later updates; use plan.allocate: equal, or collect fresh rollouts before every update"
            )
            yield Refusal(("plan", "allocate"), message)

        if self.match == "off" and (self.match_agents or self.match_turns):
            name = "match_agents" if self.match_agents else "match_turns"
            message = f"plan.{name} needs plan.match: rollouts, tokens or updates"
            yield Refusal(("plan", name), message, at_key=True)
        elif self.match_turns and self.match != "tokens":
            message = f"plan.match_turns changes nothing with plan.match: {self.match}; leave it out"
            yield Refusal(("plan", "match_turns"), message, at_key=True)
        if self.match in ("rollouts", "tokens") and self.plan().batches(1) is None:
            message = (
                f"plan.match: {self.match} settles the sizes before the run, and this plan decides as it goes how much "
                "it samples: use plan.match: updates, or set plan.dynamic_sampling: false (and for plans that "
                "reweight plan.min_effective_share: 0)"
            )
            yield Refusal(("plan", "match"), message)
        yield from self._critic_refusals(self.plan())
        yield from self._idle_keys(self.plan().resample)

    def _critic_refusals(self, plan: Plan) -> Iterator[Refusal]:
        """What a critic needs, and keys about one that is not there."""
        if plan.critic is None:
            for name in ("gae_lambda", "value_clip"):
                if getattr(self, name) is not None:
                    message = f"plan.{name} needs a critic: set plan.critic: true, or plan.preset: ppo"
                    yield Refusal(("plan", name), message, at_key=True)
            return
        if plan.objective.ratio != "token":
            message = f"a critic gives advantages per token: set plan.ratio: token, not {plan.objective.ratio}"
            yield Refusal(("plan", "ratio" if self.ratio else "critic"), message)
        if plan.resample.reweight:
            message = "a critic learns from episodes as they are: plan.reweight and plan.critic exclude each other"
            yield Refusal(("plan", "reweight" if self.reweight else "critic"), message)

    def _idle_keys(self, resample: Resample) -> Iterator[Refusal]:
        """Keys about reused rollouts in a plan that does not use them so."""
        needs = {
            "min_effective_share": resample.reweight,
            "sampling_cost": resample.reweight,
            "resample_partially": resample.reweight,
            "reuse_across_stages": resample.reweight,
            "control_share": resample.partial,
        }
        for name, used in needs.items():
            if getattr(self, name) and not used:
                wanted = "resample_partially" if name == "control_share" else "reweight"
                yield Refusal(("plan", name), f"plan.{name} needs plan.{wanted}: true", at_key=True)
        if resample.reweight and resample.every == 1:
            message = "plan.reweight needs rollouts that are reused: set plan.resample_every: 0, or leave it out"
            yield Refusal(("plan", "reweight" if self.reweight else "resample_every"), message, at_key=True)
        if resample.partial and resample.across_stages:
            message = (
                "plan.reuse_across_stages and plan.resample_partially exclude each other: what is kept of a message is "
                "known for one update of its agent only; leave one of them out"
            )
            yield Refusal(("plan", "resample_partially"), message, at_key=True)

    def plan(self) -> Plan:
        """The preset with what this section changes."""
        preset = PRESETS[self.preset]
        per_token = self.radius_nats_per_token is not None
        nats = self.radius_nats_per_token if per_token else self.radius_nats_per_message
        clip_high = self.clip if self.clip_high is None else self.clip_high
        return _changed(
            preset,
            stages=self.stages,
            problems=self.problems,
            group_size=self.group_size,
            gamma=self.gamma,
            advantage=self._advantage(preset),
            radii=_changed(
                preset.radii, nats=nats, per_token=per_token, adapt=self.adapt_radius, allocation=self.allocate
            ),
            resample=_changed(
                preset.resample,
                every=self.resample_every,
                reweight=self.reweight,
                min_effective_share=self.min_effective_share,
                sampling_cost=self.sampling_cost,
                partial=self.resample_partially,
                control=self.control_share,
                across_stages=self.reuse_across_stages,
            ),
            region=_changed(preset.region, gate=self.gate, beta=self.beta, adapt_beta=self.adapt_beta),
            objective=_changed(
                preset.objective,
                ratio=self.ratio,
                clip_low=self.clip,
                clip_high=clip_high,
                average_over=self.average_over,
                reference_kl=self.reference_kl,
            ),
            order=Order(self.order) if self.order else None,
            overlong=_changed(preset.overlong, filter=self.overlong_filter, cache=self.overlong_cache),
            dynamic_sampling=_changed(
                preset.dynamic_sampling, on=self.dynamic_sampling, limit=self.dynamic_sampling_limit
            ),
        )

    def _advantage(self, preset: Plan) -> AdvantageEstimator:
        """The preset's estimator with what this section changes, or one of the other kind."""
        critic = preset.critic is not None if self.critic is None else self.critic
        changes = {"normalize": self.normalize, "clip": self.a_clip}
        if not critic:
            return _changed(GroupAdvantage() if preset.critic else preset.advantage, **changes)
        own = {"gae_lambda": self.gae_lambda, "value_clip": self.value_clip}
        return _changed(preset.critic or CriticAdvantage(), **changes, **own)


def plan_keys(plan: Plan) -> dict[str, Any]:
    """The keys of the section ``plan`` that give this plan; an advantage estimator of one's own has none."""
    nats = "radius_nats_per_token" if plan.radii.per_token else "radius_nats_per_message"
    keys = {
        "preset": _preset_of(plan),
        "stages": plan.stages,
        "problems": plan.problems,
        "group_size": plan.group_size,
        nats: plan.radii.nats,
        "gamma": plan.gamma,
        "clip": plan.objective.clip_low,
        "clip_high": plan.objective.clip_high,
        "ratio": plan.objective.ratio,
        "average_over": plan.objective.average_over,
        "reference_kl": plan.objective.reference_kl,
        "order": plan.order.kind,
        "resample_every": plan.resample.every,
        "reweight": plan.resample.reweight,
        "min_effective_share": plan.resample.min_effective_share,
        "sampling_cost": plan.resample.sampling_cost,
        "resample_partially": plan.resample.partial,
        "control_share": plan.resample.control,
        "reuse_across_stages": plan.resample.across_stages,
        "gate": plan.region.gate,
        "beta": plan.region.beta,
        "adapt_beta": plan.region.adapt_beta,
        "allocate": plan.radii.allocation,
        "adapt_radius": plan.radii.adapt,
        "overlong_filter": plan.overlong.filter,
        "overlong_cache": plan.overlong.cache,
        "dynamic_sampling": plan.dynamic_sampling.on,
        "dynamic_sampling_limit": plan.dynamic_sampling.limit,
    }
    advantage = plan.advantage
    if type(advantage) is GroupAdvantage or type(advantage) is CriticAdvantage:
        keys |= {"normalize": advantage.normalize, "a_clip": advantage.clip}
    keys["critic"] = plan.critic is not None
    if plan.critic is not None:
        keys |= {"gae_lambda": plan.critic.gae_lambda, "value_clip": plan.critic.value_clip}
    return keys


def _preset_of(plan: Plan) -> str:
    """The preset that this plan is, but for sizes and radius; what is none goes by the first."""
    sizes: dict[str, Any] = {
        "stages": plan.stages,
        "problems": plan.problems,
        "group_size": plan.group_size,
        "gamma": plan.gamma,
    }
    for name, preset in PRESETS.items():
        if replace(preset, **sizes, radii=replace(preset.radii, nats=plan.radii.nats)) == plan:
            return name
    return next(iter(PRESETS))


def _changed(record: Any, **values: Any) -> Any:
    """The record with those of the values that are given."""
    return replace(record, **{name: value for name, value in values.items() if value is not None})


class LearnerConfig(Section):
    """How one agent is updated."""

    learning_rate: From0 = key(1e-3, "Adam's learning rate; 0 changes nothing.")
    value_learning_rate: From0 = key(1e-2, "The critic's, in plans that have one; its optimizer is its own.")
    epochs: Positive = key(2, "Passes over a batch in one update.")
    minibatches: Positive = key(4, "Optimizer steps in one pass.")
    micro_batch: Positive = key(64, "Messages per forward pass; changes memory, not results.")
    max_grad_norm: Above0 = key(1.0, "Gradients are clipped to this norm.")
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = key(
        "auto",
        "Precision of training and scoring; auto: the cheapest whose measured noise is under a tenth of the radius.",
    )
    confidence: Annotated[float, Strict(), Ge(0.5), Lt(1)] = key(0.95, "Confidence level of the gate's upper KL bound.")
    gate_share: Annotated[float, Strict(), Gt(0), Le(1)] = key(
        0.25,
        "Share of every problem's episodes that the gate measures first; it measures all if those do not settle it. "
        "1: all at once, as in plans that reuse rollouts.",
    )
    certify_share: Annotated[float, Strict(), Ge(0), Lt(1)] = key(
        0.0,
        "Share of a batch's problems held out from training; certificates are then computed on them and hold. "
        "0: certificates are computed on the training batch, and are optimistic.",
    )
    cross_fit: Flag = key(
        False,
        "Judge an update by problems that it was not trained on: train on one half, judge on the other, then exchange "
        "the halves. Off: the training batch judges the update, and is optimistic.",
    )
    max_backtracks: Count = key(6, "Most backtracking tries before the old weights are restored.")
    betas: tuple[Decay, Decay] = key((0.9, 0.99), "Adam's two decay rates.")


class SamplingConfig(Section):
    """How messages are sampled in training."""

    temperature: Above0 = key(1.0, "Sampling temperature in training; it is part of the policy.")
    engine: Literal["auto", "paged", "plain", "vllm"] = key(
        "auto",
        "paged: KV blocks and CUDA graphs; plain: works on any device; vllm: servers, see sampling.vllm. auto is paged "
        "on a GPU.",
    )
    precision: Literal["auto", "fp32", "fp16", "bf16"] = key(
        "auto",
        "Precision of paged and vllm; auto is fp16 on a GPU (with paged, bf16 once a model overflows it), fp32 on a "
        "CPU.",
    )
    compiled: Flag | None = unset(
        "Compile decoding (takes a minute at the start); default: for models with at least 0.4 billion parameters."
    )
    memory_gb: Above0 | None = unset("Most memory for KV blocks; default: four tenths of the free memory.")
    vllm: VllmConfig = VllmConfig()

    def _refusals(self) -> Iterator[Refusal]:
        if self.engine == "vllm" and self.vllm.python is None and not self.vllm.urls:
            message = (
                "sampling.engine: vllm needs servers: give sampling.vllm.python, the Python of an environment that has "
                "vLLM (make vllm-env makes one), or the addresses of servers that run in sampling.vllm.urls"
            )
            yield Refusal(("sampling", "engine"), message)


class EvalConfig(Section):
    """Evaluation during a run, and the defaults of ``teamtr eval``."""

    every: Count = key(10, "Stages between evaluations; 0: never.")
    problems: Positive | None = unset("Most held-out problems; default: 64 during a run, all for teamtr eval.")
    samples: Positive | None = unset("Episodes per problem; default: 4 during a run, the paper's K for teamtr eval.")
    temperature: From0 | None = unset("Sampling temperature; 0 is greedy; default: as in training.")


class DiagnosticsConfig(Section):
    """What is measured in addition to training."""

    every: Count = key(
        0,
        "Stages between probes of staleness and token shift; 0: never. A probed stage samples one extra batch at its "
        "start and one before every later update, and scores them; nothing is trained on them.",
    )


class StoreConfig(Section):
    """What a run keeps."""

    keep_checkpoints: Positive = key(2, "How many of the latest checkpoints to keep.")
    episodes: Flag = key(True, "Keep the episodes for inspection.")


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


def _task_section(value: Any, info: ValidationInfo) -> Any:
    """The section that the task's name chooses, read as that section."""
    name = value.name if isinstance(value, TaskConfig) else value.get("name") if isinstance(value, dict) else None
    if name is None:
        raise PydanticCustomError("task_without_name", "must have a name")
    try:
        section = section_class(name) if isinstance(name, str) else None
    except UserError as error:  # a package with tasks that cannot be loaded
        raise PydanticCustomError("broken_task", "{why}", {"why": str(error)}) from None
    if section is None or (isinstance(value, TaskConfig) and not isinstance(value, section)):
        raise PydanticCustomError("unknown_task", "must be the name of a task")
    return value if isinstance(value, TaskConfig) else section.model_validate(value, context=info.context)


AnyTask = Annotated[SerializeAsAny[TaskConfig], BeforeValidator(_task_section)]


class TeamFile(Section):
    """A whole team file."""

    name: RunName = Field(description="Name of the run.")
    seed: Count = key(0, "Seed of all randomness.")
    device: Device = key("auto", "auto, cpu, cuda or cuda:N.")
    task: AnyTask = Field(description="The problems: a generated game, your own data, or a benchmark.")
    team: TeamConfig
    tiny: TinyConfig = TinyConfig()
    plan: PlanConfig = PlanConfig()
    learner: LearnerConfig = LearnerConfig()
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    store: StoreConfig = StoreConfig()
    cluster: ClusterConfig = ClusterConfig()
    trackers: tuple[Tracker, ...] = key(
        (), "Trackers that get the numbers of the log: tensorboard, wandb, mlflow, trackio; see docs/trackers.md."
    )

    python: dict[str, str] = key(
        {},
        "Written by TeamTrainer: names of objects that only a Python program can give. Such a run resumes from Python.",
    )

    def _refusals(self) -> Iterator[Refusal]:
        """What the task asks of the team that plays it, trackers named twice, and judges without anything to judge."""
        yield from self.task.refusals_of(self.team)
        yield from self.cluster.refusals_of(self.team)
        if self.learner.cross_fit and not self.plan.plan().region.gate:
            message = "learner.cross_fit changes what the gate is judged on, and this plan has no gate; leave it out"
            yield Refusal(("learner", "cross_fit"), message)
        if self.plan.match == "tokens" and self.size().turns is None:
            message = (
                "plan.match: tokens needs to know how many messages an episode has, which the file does not say of a "
                "router of your own; use plan.match: rollouts"
            )
            yield Refusal(("plan", "match"), message)
        count = self.plan.problems
        if self.learner.cross_fit and count < 4:
            message = f"learner.cross_fit halves the problems of a batch: plan.problems must be 4 or more, got {count}"
            yield Refusal(("learner", "cross_fit"), message, (("learner", "cross_fit"), ("plan", "problems")))
        if self.sampling.engine == "vllm":
            yield from self._refusals_of_vllm()
        for i, name in enumerate(self.trackers):
            if name in self.trackers[:i]:
                yield Refusal(("trackers", i), f'trackers names "{name}" twice')

    def _refusals_of_vllm(self) -> Iterator[Refusal]:
        """Models that vLLM cannot hold, and weights that a server which runs cannot be given."""
        here = ("sampling", "engine")
        for i, agent in enumerate(self.team.agents):
            at, name = ("team", "agents", i), f'agent "{agent.name}"'
            if agent.model == "tabular":
                message = f"sampling.engine: vllm samples from transformers, and {name} is a table; use plain"
                yield Refusal(here, message, (here, (*at, "model")))
            elif agent.train == "full" and not agent.frozen and self.sampling.vllm.urls:
                message = (
                    f"sampling.vllm.urls: {name} trains all its weights, which needs a server of its own that is "
                    "started here: give sampling.vllm.python instead, or set train: lora"
                )
                yield Refusal(("sampling", "vllm", "urls"), message, (here, (*at, "train")))
            elif agent.train == "lora" and agent.lora.rank > MOST_RANK:
                message = f"lora.rank: vLLM takes adapters up to rank {MOST_RANK}, and {name} has {agent.lora.rank}"
                yield Refusal((*at, "lora", "rank"), message, (here,))

    def size(self) -> TeamSize:
        """What of this team decides what a plan spends."""
        router = self.team.known_router
        trained = sum(not agent.frozen for agent in self.team.agents)
        return TeamSize(max(1, trained), None if router is None else router.horizon)

    def _reference_size(self) -> TeamSize:
        own = self.size()
        return TeamSize(self.plan.match_agents or own.agents, self.plan.match_turns or own.turns)

    def sized_plan(self) -> Plan:
        """The plan, with the sizes that ``plan.match`` gives it."""
        plan = self.plan.plan()
        return plan if self.plan.match == "off" else matched(plan, self.plan.match, self.size(), self._reference_size())

    def budgets(self) -> tuple[Budget | None, Budget | None]:
        """What this run spends by its settings, and what the preset teamtr would at the file's own sizes."""
        own = self.plan
        reference = replace(TEAMTR, stages=own.stages, problems=own.problems, group_size=own.group_size)
        return self.sized_plan().budget(self.size()), reference.budget(self._reference_size())

    def anchored(self, folder: Path) -> TeamFile:
        """The same with the paths of data, code and model folders made absolute, taken as relative to ``folder``, so
        that a stored copy means the same wherever it lies."""
        anchor = Anchor(folder)
        vllm = self.sampling.vllm.anchored(anchor)
        return self.model_copy(
            update={
                "task": self.task.anchored(anchor),
                "team": self.team.anchored(anchor),
                "sampling": self.sampling.model_copy(update={"vllm": vllm}),
            }
        )
