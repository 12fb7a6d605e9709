"""The schema of a team file, section by section, with every default.

Types validate single values; relations between fields are checked in a section's ``_refusals``. The sections ``team``
and ``plan`` have their own modules. The keys of a task are in its class (``Config``), which the task registry looks up
by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, Field, SerializeAsAny, Strict, ValidationInfo
from pydantic_core import PydanticCustomError

from teamtr.config.cluster import ClusterConfig
from teamtr.config.plan import PlanConfig
from teamtr.config.team import TeamConfig
from teamtr.config.texts import Device, RunName
from teamtr.config.tools import AnyTools, ToolsConfig
from teamtr.config.vllm import RANKS, VllmConfig
from teamtr.config.warmup import WarmupConfig
from teamtr.errors import UserError
from teamtr.presets import (
    TEAMTR,
    Budget,
    Plan,
    TeamSize,
    matched,
)
from teamtr.settings.paths import Anchor, Nowhere, SeenFrom
from teamtr.settings.refusals import KeyPath, Refusal
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, Count, Decay, Flag, From0, NonEmpty, Positive
from teamtr.tasks.config import TaskConfig
from teamtr.tasks.registry import section_class


class TinyConfig(Section):
    """The built-in model: a small character-level transformer."""

    layers: Positive = key(2, "Transformer blocks.")
    width: Positive = key(64, "Hidden size; an even multiple of heads.")
    heads: Positive = key(4, "Attention heads.")
    warmup_steps: Count = key(200, "Supervised steps on the form of messages that make it; `warmup` is for any model.")
    warmup_learning_rate: From0 = key(3e-3, "Learning rate of those steps.")

    def _refusals(self) -> Iterator[Refusal]:
        if self.width % (2 * self.heads):
            # Rotary position embeddings rotate pairs of values, one from each half of a head: its size must be even.
            message = f"tiny.width must be an even multiple of tiny.heads ({self.heads}), got {self.width}"
            yield Refusal(("tiny", "width"), message, (("tiny", "width"), ("tiny", "heads")))


class LearnerConfig(Section):
    """How an agent is updated."""

    learning_rate: From0 = key(1e-3, "Adam's learning rate; 0 changes nothing.")
    value_learning_rate: From0 = key(1e-2, "The critic's, in plans that have one; its optimizer is its own.")
    epochs: Positive = key(2, "Passes over a batch in one update.")
    minibatches: Positive = key(4, "Optimizer steps in one pass.")
    micro_batch: Positive = key(
        64,
        "Messages per forward pass. On a GPU in half precision a pass is filled by tokens instead, up to as many as so "
        "many of the longest messages and their prompts have. Changes memory, not results.",
    )
    recompute: Literal["auto", "always", "never"] = key(
        "auto",
        "Keep what a step's layers computed for the way back (never), or compute it again layer by layer (always): "
        "memory for one layer instead of all, and one more forward pass. auto: where the memory plan says that a "
        "single message does not fit otherwise, and where memory runs out. Changes no result.",
    )
    max_grad_norm: Above0 = key(1.0, "Gradients are clipped to this norm.")
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = key(
        "auto",
        "Precision of training and scoring; auto: the cheapest whose measured noise is under a tenth of the radius.",
    )
    base: Literal["fp32", "file", "fp16", "int8"] = key(
        "fp32",
        "Frozen weights below adapters: fp32; file keeps the precision of their file, half the memory for bf16, and "
        "changes no result; fp16 rounds them; int8 rounds linear layers to 8 bits with a scale for each output, and "
        "the rest to fp16. Takes longer, most of all on a CPU. Where it is the sampler's precision, or int8, "
        "sampling.adapters: by_row samples with the same weights instead of a copy.",
    )
    score: Literal["own", "sampler"] = key(
        "own",
        "Who scores messages under the old policy: own, the learner; sampler: features that sampling computed with the "
        "same weights right before the update, where their measured error is under a tenth of the radius.",
    )
    score_memory_gb: Above0 = key(4.0, "Most memory for those features; messages beyond it are scored by the learner.")
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

    def _refusals(self) -> Iterator[Refusal]:
        if self.score == "own" and self.score_memory_gb != type(self).model_fields["score_memory_gb"].default:
            message = "learner.score_memory_gb needs learner.score: sampler; with own, no features are kept"
            yield Refusal(("learner", "score_memory_gb"), message, (("learner", "score"),), at_key=True, idle=True)

    @property
    def kept_bytes(self) -> int:
        """Maximum memory for the features that sampling keeps for the next update."""
        return int(self.score_memory_gb * 2**30) if self.score == "sampler" else 0


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
        "Let torch compile decoding, which takes up to a minute at the start; default: models of at least 0.4 billion "
        "parameters unless TeamTR has kernels for all of their layers, as for Llama, Qwen and Mistral in half "
        "precision."
    )
    adapters: Literal["merged", "by_row"] = key(
        "merged",
        "With paged: merged puts one agent's adapter into the weights at a time; by_row applies each row's own, so "
        "that messages of several agents of one base are sampled together.",
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
        yield from self._idle_keys()

    def _idle_keys(self) -> Iterator[Refusal]:
        """Refuses keys that the chosen engine does not have. ``auto`` may be paged on another machine."""
        engine: KeyPath = ("sampling", "engine")
        of_paged = {
            "precision": (self.precision != "auto", "it samples with the learner's own weights"),
            "compiled": (self.compiled is True, "it compiles nothing"),
            "adapters": (self.adapters == "by_row", "it samples for one agent at a time"),
            "memory_gb": (self.memory_gb is not None, "it has no KV blocks"),
        }
        for name, (is_given, why) in of_paged.items():
            if is_given and self.engine == "plain":
                message = f"sampling.{name} changes nothing with sampling.engine: plain: {why}; leave it out"
                yield Refusal(("sampling", name), message, (engine,), at_key=True, idle=True)
            elif is_given and self.engine == "vllm" and name == "compiled":
                message = (
                    "sampling.compiled is for the paged engine; vLLM compiles by settings of its own: leave it out"
                )
                yield Refusal(("sampling", name), message, (engine,), at_key=True, idle=True)
            elif is_given and self.engine == "vllm" and self.vllm.urls and name in ("precision", "memory_gb"):
                message = (
                    f"sampling.{name} is for servers started here, and those of sampling.vllm.urls run already: start "
                    "them with it, and leave it out"
                )
                yield Refusal(
                    ("sampling", name), message, (engine, ("sampling", "vllm", "urls")), at_key=True, idle=True
                )
        if self.engine == "auto":  # with plain or paged, somebody has chosen not to use the servers
            for name in self.vllm.given[:1]:
                message = (
                    f"sampling.vllm.{name} is for sampling.engine: vllm, and auto never chooses it: set "
                    "sampling.engine: vllm, or leave sampling.vllm out"
                )
                yield Refusal(("sampling", "vllm", name), message, (engine,), at_key=True, idle=True)


class EvalConfig(Section):
    """Evaluation during a run, and the defaults of `teamtr eval`."""

    every: Count = key(10, "Stages between evaluations; 0: never.")
    problems: Positive | None = unset("Most held-out problems; default: 64 during a run, all for teamtr eval.")
    samples: Positive | None = unset("Episodes per problem; default: 4 during a run, the paper's K for teamtr eval.")
    temperature: From0 | None = unset("Sampling temperature; 0 is greedy; default: as in training.")
    patience: Positive | None = unset(
        "Stop training once so many evaluations in a row were no better than the best before them; default: never."
    )

    def _refusals(self) -> Iterator[Refusal]:
        if self.patience is not None and self.every == 0:
            message = "eval.patience counts evaluations, and eval.every: 0 makes none; set eval.every, or leave it out"
            yield Refusal(("eval", "patience"), message, (("eval", "patience"), ("eval", "every")))


class DiagnosticsConfig(Section):
    """Measurements in addition to training."""

    every: Count = key(
        0,
        "Stages between probes of staleness and token shift; 0: never. A probed stage samples one extra batch at its "
        "start and one before every later update, and scores them; nothing is trained on them.",
    )


class StoreConfig(Section):
    """What a run folder keeps."""

    keep_checkpoints: Positive = key(
        2, "How many of the latest checkpoints to keep; the best by held-out success stays too."
    )
    episodes: Flag = key(True, "Keep the episodes for inspection.")


class TrackingConfig(Section):
    """How trackers file the run, and whether conversations are sent to them."""

    project: NonEmpty = key("teamtr", "Project of wandb and trackio, experiment of mlflow.")
    entity: NonEmpty | None = unset("User or team of wandb that owns the project; default: the one logged in.")
    group: NonEmpty | None = unset("Group of the run in wandb and trackio; a tag `group` in mlflow; default: none.")
    tags: tuple[NonEmpty, ...] = key((), "Tags of the run in wandb and mlflow; trackio and tensorboard have none.")
    conversations: Count = key(
        0,
        "Conversations of each stage that are sent as a table, with questions, answers and verdicts; 0: none ever "
        "leave the run folder. Needs store.episodes.",
    )


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


def _task_section(value: Any, info: ValidationInfo) -> Any:
    """Validate the task's section with the class that its name selects."""
    name = value.name if isinstance(value, TaskConfig) else value.get("name") if isinstance(value, dict) else None
    if name is None:
        raise PydanticCustomError("task_without_name", "must have a name")
    try:
        section = section_class(name) if isinstance(name, str) else None
    except UserError as error:  # a package with tasks that cannot be imported
        raise PydanticCustomError("broken_task", "{why}", {"why": str(error)}) from None
    if section is None or (isinstance(value, TaskConfig) and not isinstance(value, section)):
        raise PydanticCustomError("unknown_task", "must be the name of a task")
    return value if isinstance(value, TaskConfig) else section.model_validate(value, context=info.context)


AnyTask = Annotated[SerializeAsAny[TaskConfig], BeforeValidator(_task_section)]


class TeamFile(Section):
    """A whole team file."""

    name: RunName = Field(description="Name of the run.")
    seed: Count = key(0, "Seed of all randomness.")
    seeds: Positive = key(
        1,
        "Runs that `teamtr train` trains, with seeds from `seed` on, side by side where there is room; one table has "
        "their mean, deviation and interval.",
    )
    device: Device = key("auto", "auto, cpu, cuda or cuda:N.")
    task: AnyTask = Field(description="The problems: a generated game, your own data, or a benchmark.")
    team: TeamConfig
    tools: AnyTools = ToolsConfig()
    tiny: TinyConfig = TinyConfig()
    warmup: WarmupConfig = WarmupConfig()
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

    tracking: TrackingConfig = TrackingConfig()

    python: dict[str, str] = key(
        {},
        "Written by TeamTrainer: names of objects that only a Python program can give. Such a run resumes from Python.",
    )

    def _refusals(self) -> Iterator[Refusal]:
        """Checks between sections, such as the task's requirements on the team, and trackers named twice."""
        yield from self.task.refusals_of(self.team)
        yield from self.cluster.refusals_of(self.team)
        if self.learner.cross_fit and not self.plan.plan().region.gate:
            message = "learner.cross_fit changes what the gate is judged on, and this plan has no gate; leave it out"
            yield Refusal(("learner", "cross_fit"), message)
        yield from self._refusals_of_certificates()
        rate = self.learner.value_learning_rate
        if self.plan.plan().critic is None and rate != LearnerConfig.model_fields["value_learning_rate"].default:
            message = (
                "learner.value_learning_rate is the critic's, and this plan has none: set plan.critic: true, or leave "
                "it out"
            )
            yield Refusal(("learner", "value_learning_rate"), message, (("plan", "critic"),), at_key=True, idle=True)
        if self.plan.match == "tokens" and self.size().turns is None:
            message = (
                "plan.match: tokens needs to know how many messages an episode has, which the file does not say of a "
                "router of your own; use plan.match: rollouts"
            )
            yield Refusal(("plan", "match"), message)
        if self.learner.recompute == "always" and self.cluster.shard_base:
            message = (
                "learner.recompute: always computes layers again, and cluster.shard_base gives a layer away as soon as "
                "it was passed through; use auto, or lower learner.micro_batch"
            )
            yield Refusal(("learner", "recompute"), message, (("cluster", "shard_base"),))
        if self.learner.score == "sampler":
            yield from self._refusals_of_sampler_scores()
        if self.learner.base != "fp32":
            yield from self._refusals_of_base()
        if self.warmup.tokens and self.plan.plan().objective.has_reference:
            message = (
                "warmup and plan.reference_kl: the reference is the model as it was given, and would draw the team "
                "back to before its warm-up; leave one out, or start from an export of a team that is warmed up"
            )
            yield Refusal(("warmup", "tokens"), message, (("plan", "reference_kl"),))
        count = self.plan.problems
        if self.learner.cross_fit and count < 4:
            message = f"learner.cross_fit halves the problems of a batch: plan.problems must be 4 or more, got {count}"
            yield Refusal(("learner", "cross_fit"), message, (("learner", "cross_fit"), ("plan", "problems")))
        if self.sampling.engine == "vllm":
            yield from self._refusals_of_vllm()
        if self.tracking.conversations and not self.store.episodes:
            yield Refusal(
                ("tracking", "conversations"),
                "tracking.conversations needs store.episodes: true, where conversations are read",
            )
        for i, name in enumerate(self.trackers):
            if name in self.trackers[:i]:
                yield Refusal(("trackers", i), f'trackers names "{name}" twice')

    def _refusals_of_certificates(self) -> Iterator[Refusal]:
        """Refuses problems that are held out for certificates in plans that have none, or that leave too few."""
        here, share, plan = ("learner", "certify_share"), self.learner.certify_share, self.plan.plan()
        if not share:
            return
        if plan.dynamic_sampling.on or plan.credit == "own":
            key = "plan.dynamic_sampling: true" if plan.dynamic_sampling.on else "plan.credit: own"
            message = f"learner.certify_share holds out problems for certificates, and with {key} there are none"
            yield Refusal(here, f"{message}: leave it out", at_key=True, idle=True)
            return
        count = self.plan.problems
        if self.plan.match != "off":  # which may change how many there are
            return
        rests_on = (here, ("plan", "problems"))
        left = count - min(max(math.ceil(share * count), 2), count - 1)
        if count < 3:
            message = (
                "learner.certify_share holds out two problems or more and trains on the others: plan.problems must be "
                f"3 or more, got {count}"
            )
            yield Refusal(here, message, rests_on, idle=True)
        elif self.learner.cross_fit and left < 4:
            message = (
                f"learner.cross_fit halves the problems that learner.certify_share leaves, {left} of {count}: they "
                "must be 4 or more; raise plan.problems, or lower learner.certify_share"
            )
            yield Refusal(here, message, (*rests_on, ("learner", "cross_fit")))

    def _refusals_of_sampler_scores(self) -> Iterator[Refusal]:
        """Refuses ``learner.score: sampler`` with vLLM (log-probabilities only), a sharded base or tabular agents."""
        here = ("learner", "score")
        if self.sampling.engine == "vllm":
            message = "learner.score: sampler needs features, and vLLM gives only log-probabilities: set own"
            yield Refusal(here, message, (("sampling", "engine"),))
        if self.cluster.shard_base:
            message = (
                "learner.score: sampler is for models that a process holds whole, and cluster.shard_base spreads them: "
                "set own"
            )
            yield Refusal(here, message, (("cluster", "shard_base"),))
        for i, agent in enumerate(self.team.agents):
            if agent.model == "tabular":
                message = f'learner.score: sampler is for transformers, and agent "{agent.name}" is a table: set own'
                yield Refusal(here, message, (("team", "agents", i, "model"),))

    def _refusals_of_base(self) -> Iterator[Refusal]:
        """Refuses a base in any precision but fp32 if it is sharded or has no adapters, and an int8 base that vLLM
        would not sample from or that an agent trains in full."""
        here, base = ("learner", "base"), self.learner.base
        if self.cluster.shard_base:
            message = (
                f"learner.base: {base} needs a base that is held whole, and cluster.shard_base spreads it: set fp32"
            )
            yield Refusal(here, message, (("cluster", "shard_base"),))
        agents = self.team.agents
        if all(agent.train == "full" for agent in agents) and (base != "int8" or all(a.frozen for a in agents)):
            message = (
                f"learner.base: {base} is about frozen weights below adapters, and no agent has an adapter: set train: "
                "lora, or leave it out"
            )
            yield Refusal(here, message, (("team", "agents"),), idle=True)
        if base != "int8":
            return
        if self.sampling.engine == "vllm":
            message = (
                "learner.base: int8 rounds the base, and vLLM servers sample from the one in its file: set fp16, or "
                "sampling.engine: paged"
            )
            yield Refusal(here, message, (("sampling", "engine"),))
        for i, agent in enumerate(self.team.agents):
            if agent.train == "full" and not agent.frozen:
                message = (
                    f'learner.base: int8 is for a frozen base below adapters, and agent "{agent.name}" trains all its '
                    "weights: set train: lora, or learner.base: fp32"
                )
                yield Refusal(here, message, (("team", "agents", i, "train"),))

    def _refusals_of_vllm(self) -> Iterator[Refusal]:
        """Refuses tabular agents, adapters above vLLM's largest rank, and full training on servers that already run."""
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
            elif agent.train == "lora" and agent.lora.rank > RANKS[-1]:
                message = f"lora.rank: vLLM takes adapters up to rank {RANKS[-1]}, and {name} has {agent.lora.rank}"
                yield Refusal((*at, "lora", "rank"), message, (here,))

    def size(self) -> TeamSize:
        """The sizes of this team that determine what a plan spends."""
        router = self.team.known_router
        trained = sum(not agent.frozen for agent in self.team.agents)
        return TeamSize(max(1, trained), None if router is None else router.horizon)

    def _reference_size(self) -> TeamSize:
        own = self.size()
        return TeamSize(self.plan.match_agents or own.agents, self.plan.match_turns or own.turns)

    def sized_plan(self) -> Plan:
        """The plan, with the sizes set by ``plan.match``."""
        plan = self.plan.plan()
        return plan if self.plan.match == "off" else matched(plan, self.plan.match, self.size(), self._reference_size())

    def budgets(self) -> tuple[Budget | None, Budget | None]:
        """The budget of this run, and that of the preset teamtr at the file's own sizes."""
        own = self.plan
        reference = replace(TEAMTR, stages=own.stages, problems=own.problems, group_size=own.group_size)
        return self.sized_plan().budget(self.size()), reference.budget(self._reference_size())

    def anchored(self, folder: Path) -> TeamFile:
        """The team file with paths of data, code and model folders made absolute, relative to ``folder``."""
        return self._with_paths(Anchor(folder))

    def seen_from(self, folder: Path) -> TeamFile:
        """The team file with those paths made relative to the run folder, so that both can be moved together."""
        return self._with_paths(SeenFrom(folder))

    def without_places(self) -> TeamFile:
        """The team file without absolute paths, for comparisons only."""
        return self._with_paths(Nowhere(Path()))

    def _with_paths(self, anchor: Anchor) -> TeamFile:
        vllm = self.sampling.vllm.anchored(anchor)
        return self.model_copy(
            update={
                "task": self.task.anchored(anchor),
                "team": self.team.anchored(anchor),
                "tools": self.tools.anchored(anchor),
                "warmup": self.warmup.anchored(anchor),
                "sampling": self.sampling.model_copy(update={"vllm": vllm}),
            }
        )
