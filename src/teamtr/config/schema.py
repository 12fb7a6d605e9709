"""The schema: what a team file may say, section by section, with every default.

Types check single values; what only several fields together can have wrong, a section says in ``_refusals``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Discriminator, Field, Strict, Tag

from teamtr.config.errors import Refusal, hint, show
from teamtr.config.section import Section, key, unset
from teamtr.config.texts import ANSWER_WORDS, AgentName, Device, Grader, Pattern, Preset, RunName, Symbols
from teamtr.presets import PRESETS, Order, Plan

# Strict, so that "12" is no number, true no 1 and 2.0 no whole number, wherever the models are built.
NonEmpty = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Ge(0)]
Positive = Annotated[int, Strict(), Ge(1)]
Above0 = Annotated[float, Strict(), Gt(0)]
From0 = Annotated[float, Strict(), Ge(0)]
UpTo1 = Annotated[float, Strict(), Ge(0), Le(1)]
Share = Annotated[float, Strict(), Gt(0), Lt(1)]  # strictly between none and all
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]
Train = Literal["full", "lora"]

_BUILT_IN_MODELS = ("tiny", "tabular")


class CodeTask(Section):
    """Code exchange: ``left`` and ``right`` each see half of a code, ``speaker`` must say it all."""

    name: Literal["code"]
    symbols: Symbols = key("ABCD", "The letters codes are made of.")
    half_length: Positive = key(1, "Letters in each half of a code.")
    held_out: Share = key(0.25, "Share of all codes kept for evaluation.")
    partial_credit: Flag = key(True, "Reward each right letter, not only the whole code.")
    skill: UpTo1 = key(0.0, "Share of right letters in the examples that warm up the tiny model; 0 starts at chance.")

    def _refusals(self) -> Iterator[Refusal]:
        # The logarithm first: the power itself may be too large to compute.
        if self.half_length * math.log2(len(self.symbols)) > 16:
            message = f"{len(self.symbols)} symbols and task.half_length {self.half_length} make more than 65536 halves"
            both = (("task", "symbols"), ("task", "half_length"))
            yield Refusal(("task", "half_length"), f"{message}; use fewer or shorter", both)

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """The speaker must answer, and every message have room for its letters."""
        if set(team.names) != {"left", "right", "speaker"}:
            message = f"task code needs the agents left, right and speaker, got {', '.join(team.names)}"
            yield Refusal(("team", "agents"), message, at_key=True)
            return
        answering = team.speaking_order[-1] if team.answer == "last" else team.answer
        if answering in ("left", "right", "majority"):  # a name of nobody is the team's own mistake
            message = f'task code is answered by the speaker, but team.answer gives the word to "{answering}"'
            yield Refusal(("team", "answer"), message, (("team", "answer"), ("team", "router", "order")))
        for i, agent in enumerate(team.agents):
            letters = self.half_length * (2 if agent.name == "speaker" else 1)
            if agent.model == "tiny" and agent.max_tokens < letters:
                message = f'agent "{agent.name}" must say {letters} letters, but max_tokens is {agent.max_tokens}'
                here = ("team", "agents", i, "max_tokens")
                yield Refusal(here, message, (here, ("team", "max_tokens"), ("task", "half_length")))


class RolesTask(Section):
    """Roles: in a blind round, exactly one of n agents, called a1 to an, must volunteer."""

    name: Literal["roles"]
    tags: Annotated[int, Strict(), Ge(1), Le(26)] = key(
        1, "How many different problems there are, told apart by a tag."
    )

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """Names are a1, a2 and so on, and all must speak."""
        expected = {f"a{i + 1}" for i in range(max(len(team.agents), 2))}
        silent = sorted(expected - set(team.speaking_order))
        if set(team.names) != expected:
            message = f"task roles needs two or more agents called a1, a2 and so on, got {', '.join(team.names)}"
            yield Refusal(("team", "agents"), message, at_key=True)
        elif silent:
            message = f"task roles needs a message of every agent; team.router.order leaves out {', '.join(silent)}"
            yield Refusal(("team", "router", "order"), message)


class SumsTask(Section):
    """Sums of whole numbers, made by code, for models that can already write."""

    name: Literal["sums"]
    terms: Annotated[int, Strict(), Ge(2), Le(16)] = key(2, "Numbers to add.")
    digits: Annotated[int, Strict(), Ge(1), Le(9)] = key(2, "Digits of each.")
    problems: Annotated[int, Strict(), Ge(8)] = key(4096, "Different sums, at most; a quarter, up to 256, is held out.")

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """Any team can add."""
        return iter(())


class DataTask(Section):
    """Your own questions and answers."""

    name: Literal["data"]
    path: NonEmpty = Field(description="A .jsonl or .parquet file, relative to the team file.")
    question: NonEmpty | None = unset("Column of the question; without it, prompt, question or problem.")
    answer: NonEmpty | None = unset("Column of the answer; without it, answer, solution or target.")
    held_out: Share = key(0.1, "Share of the rows kept for evaluation.")
    grader: Grader = key("exact", "exact, number, regex, or python:FILE:FUNCTION (FILE relative to the team file).")
    pattern: Pattern | None = unset(
        "For grader regex: its one group is the answer; its last match in a message counts."
    )
    threshold: Annotated[float, Strict()] = key(1.0, "A reward of at least this counts as right.")
    private: dict[str, NonEmpty] = key({}, "Agent name to the column that this agent alone sees.")
    seconds_per_item: Above0 = key(5.0, "Time limit for grading one answer.")

    def _refusals(self) -> Iterator[Refusal]:
        both = (("task", "grader"), ("task", "pattern"))
        if self.grader == "regex" and self.pattern is None:
            yield Refusal(("task", "grader"), 'task.grader is "regex", which needs task.pattern', both)
        if self.grader != "regex" and self.pattern is not None:
            message = f'task.pattern is used by grader "regex" only, and task.grader is "{self.grader}"'
            yield Refusal(("task", "pattern"), message, both)

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """Private columns must belong to somebody."""
        for name in self.private:
            if name not in team.names:
                message = f"task.private names no agent {show(name)}{hint(name, team.names, 'the agents are')}"
                yield Refusal(("task", "private", name), message, at_key=True)


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list | tuple) else None


class LoraConfig(Section):
    """A low-rank adapter on a frozen base."""

    rank: Positive = key(16, "Rank of the adapter.")
    alpha: Above0 = key(32.0, "Scale of the adapter; its output is multiplied by alpha / rank.")
    targets: Annotated[
        Annotated[NonEmpty, Tag("text")] | Annotated[tuple[NonEmpty, ...], Field(min_length=1), Tag("list")],
        Discriminator(_text_or_list, "text_or_list", "must be text or a list of text"),
    ] = key("all-linear", "Which layers carry it: all-linear, a pattern, or a list of names.")


class AgentConfig(Section):
    """One agent. What it leaves out of model, system_prompt, train, lora and max_tokens is as its team says."""

    unset_means: ClassVar[str] = "as the team says"

    name: AgentName = Field(description="How the others call it.")
    model: NonEmpty = unset("tiny, tabular, a folder (relative to the team file) or a hub id; else the team's.")
    system_prompt: str = unset("What it is told before everything else; else the team's.")
    train: Train = unset("All weights or an adapter; else the team's; else full for tiny and tabular, or lora.")
    lora: LoraConfig = unset("The adapter, when it trains one; else the team's, key by key.")
    sees: Literal["everything", "blind"] = key(
        "everything", "blind: it does not see the messages of the current round."
    )
    max_tokens: Positive = unset("Most tokens in one message, end included; else the team's.")
    frozen: Flag = key(False, "Speaks, but is never updated.")


class RouterConfig(Section):
    """Who speaks when."""

    rounds: Positive = key(1, "How often the speaking order is gone through.")
    order: Annotated[tuple[str, ...], Field(min_length=1)] | None = unset(
        "Names in speaking order; without it, the agents as listed."
    )


class TeamConfig(Section):
    """The agents and how they talk."""

    model: NonEmpty | None = unset("The model of agents that name none.")
    system_prompt: str = key("", "The system prompt of agents that have none.")
    train: Train | None = unset("What agents train that do not say: full or lora.")
    lora: LoraConfig = key(LoraConfig(), "The adapter of agents that do not say.")
    max_tokens: Positive = key(16, "Most tokens in a message of agents that do not say.")
    agents: Annotated[tuple[AgentConfig, ...], Field(min_length=1)]
    router: RouterConfig = RouterConfig()
    answer: str = key("last", "Whose message is the team's answer: last, majority or an agent.")
    history: Literal["transcript", "chat"] = key(
        "transcript", "The talk so far as lines of one user message, or as chat messages."
    )
    template_kwargs: dict[str, Any] = key({}, "Passed to the chat template, such as enable_thinking: false.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(agent.name for agent in self.agents)

    @property
    def speaking_order(self) -> tuple[str, ...]:
        return self.router.order or self.names

    def _settle(self) -> None:
        """Give every agent what it left to the team."""
        object.__setattr__(self, "agents", tuple(map(self._settled, self.agents)))

    def _settled(self, agent: AgentConfig) -> AgentConfig:
        model = agent.model or self.model
        own_lora = agent.lora.model_dump(exclude_unset=True) if agent.lora else {}
        return agent.model_copy(
            update={
                "model": model,
                "system_prompt": self.system_prompt if agent.system_prompt is None else agent.system_prompt,
                "train": agent.train or self.train or ("full" if model in _BUILT_IN_MODELS else "lora"),
                "lora": self.lora.model_copy(update=own_lora),
                "max_tokens": agent.max_tokens or self.max_tokens,
            }
        )

    def _refusals(self) -> Iterator[Refusal]:
        for i, agent in enumerate(self.agents):
            here = ("team", "agents", i)
            if agent.name in self.names[:i]:
                yield Refusal((*here, "name"), f'two agents are called "{agent.name}"; names must differ')
            if agent.model is None:
                message = f'agent "{agent.name}" has no model; give it one, or set team.model for all'
                yield Refusal(here, message, (("team", "model"), (*here, "model")))
            if agent.model == "tabular" and agent.train == "lora":
                yield Refusal(here, f'agent "{agent.name}" is tabular and cannot train lora; set train: full')
        for i, name in enumerate(self.router.order or ()):
            if name not in self.names:
                message = f"team.router.order names no agent {show(name)}{hint(name, self.names, 'the agents are')}"
                yield Refusal(("team", "router", "order", i), message)
        if self.answer not in (*ANSWER_WORDS, *self.names):
            near = hint(self.answer, (*ANSWER_WORDS, *self.names), "one of")
            message = f"team.answer must be last, majority or an agent, got {show(self.answer)}{near}"
            yield Refusal(("team", "answer"), message)
        elif self.answer not in (*ANSWER_WORDS, *self.speaking_order):
            message = f'team.answer names "{self.answer}", who never speaks in team.router.order'
            yield Refusal(("team", "answer"), message)


class TinyConfig(Section):
    """The built-in model: a small transformer over characters."""

    layers: Positive = key(2, "Transformer blocks.")
    width: Positive = key(64, "Size of a hidden state; an even multiple of heads.")
    heads: Positive = key(4, "Attention heads.")
    warmup_steps: Count = key(200, "Supervised steps that teach the form of messages before training.")
    warmup_learning_rate: From0 = key(3e-3, "Learning rate of those steps.")

    def _refusals(self) -> Iterator[Refusal]:
        if self.width % (2 * self.heads):
            # Rotary positions turn the two halves of each head against each other.
            message = f"tiny.width must be an even multiple of tiny.heads ({self.heads}), got {self.width}"
            yield Refusal(("tiny", "width"), message, (("tiny", "width"), ("tiny", "heads")))


class PlanConfig(Section):
    """The algorithm: a preset and what differs from it. What is left out is as the preset says."""

    unset_means: ClassVar[str] = "as the preset says"

    preset: Preset = key("teamtr", "The algorithm to start from; see teamtr.presets.")
    stages: Positive = key(40, "Stages; in each, every agent is updated once.")
    problems: Positive = key(32, "Problems in a batch.")
    group_size: Annotated[int, Strict(), Ge(2)] = key(16, "Episodes of each problem.")
    radius_nats_per_message: Above0 | None = unset("KL allowed to one update, in nats per message.")
    radius_nats_per_token: Above0 | None = unset("The same in nats per token, instead of per message.")
    gamma: Annotated[float, Strict(), Gt(0), Le(1)] = key(1.0, "Discount per turn.")
    normalise: Flag | None = unset("Divide advantages by the deviation of their group.")
    a_clip: Above0 | None = unset("Advantages are clipped to this size; .inf for no clipping.", allow_inf_nan=True)
    clip: Above0 | None = unset("How far from 1 the likelihood ratio counts, both ways.")
    clip_high: Above0 | None = unset("The same upwards only.")
    ratio: Literal["message", "token", "length_normalised"] | None = unset("What the likelihood ratio is taken over.")
    average_over: Literal["messages", "tokens"] | None = unset("What the objective averages over.")
    order: Literal["fixed", "reverse", "random", "largest_gain", "together"] | None = unset(
        "Who is updated when; fixed is as listed."
    )
    resample_every: Count | None = unset("Sample anew before every n-th update; 0 is only at the start of a stage.")
    importance_weighted: Flag | None = unset("Weigh reused episodes by their likelihood ratio.")
    gate: Flag | None = unset("Accept an update only when its upper KL bound is within the radius.")
    beta: From0 | None = unset("Weight of the KL penalty at the start.")
    adapt_beta: Flag | None = unset("Steer beta towards the radius.")
    allocate: Literal["equal", "gain", "certified"] | None = unset(
        "How a stage's radii are shared out: equally, by each agent's last gain, or for the best certified bound."
    )
    adapt_radius: Flag | None = unset("Move each agent's radius towards the KL it really uses.")
    dynamic_sampling_rounds: Count | None = unset("How often to redraw problems whose groups carry no signal.")

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

    def plan(self) -> Plan:
        """The preset with what this section changes."""
        preset = PRESETS[self.preset]
        per_token = self.radius_nats_per_token is not None
        nats = self.radius_nats_per_token if per_token else self.radius_nats_per_message
        clip_high = self.clip if self.clip_high is None else self.clip_high
        return _changed(
            preset,
            group_size=self.group_size,
            gamma=self.gamma,
            normalise=self.normalise,
            a_clip=self.a_clip,
            radii=_changed(preset.radii, nats=nats, per_token=per_token, adapt=self.adapt_radius),
            resample=_changed(preset.resample, every=self.resample_every, importance_weighted=self.importance_weighted),
            region=_changed(preset.region, gate=self.gate, beta=self.beta, adapt_beta=self.adapt_beta),
            objective=_changed(
                preset.objective,
                ratio=self.ratio,
                clip_low=self.clip,
                clip_high=clip_high,
                average_over=self.average_over,
            ),
            order=Order(self.order) if self.order else None,
            dynamic_sampling_rounds=self.dynamic_sampling_rounds,
        )


def _changed(record: Any, **values: Any) -> Any:
    """The record with those of the values that are given."""
    return replace(record, **{name: value for name, value in values.items() if value is not None})


class LearnerConfig(Section):
    """How one agent is updated."""

    learning_rate: From0 = key(1e-3, "Adam's learning rate; 0 changes nothing.")
    epochs: Positive = key(2, "Passes over a batch in one update.")
    minibatches: Positive = key(4, "Optimizer steps in one pass.")
    micro_batch: Positive = key(64, "Messages computed at a time; changes memory, not results.")
    max_grad_norm: Above0 = key(1.0, "Gradients longer than this are shortened to it.")
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = key(
        "auto",
        "Arithmetic of training and scoring; auto: the cheapest whose measured noise is under a tenth of the radius.",
    )
    confidence: Annotated[float, Strict(), Ge(0.5), Lt(1)] = key(
        0.95, "Confidence of the upper KL bound that the gate looks at."
    )
    max_backtracks: Count = key(6, "Tries along the line back to the old weights before restoring them.")
    betas: tuple[Decay, Decay] = key((0.9, 0.99), "Adam's two decay rates.")


class SamplingConfig(Section):
    """How messages are sampled in training."""

    temperature: Above0 = key(1.0, "Temperature of training; the policy is defined with it.")
    engine: Literal["auto", "paged", "plain"] = key(
        "auto", "paged: pages of keys and values, captured graphs; plain: any device. auto is paged on a GPU."
    )
    precision: Literal["auto", "fp32", "fp16", "bf16"] = key(
        "auto", "Arithmetic of the paged engine; auto is bf16 on a GPU, fp32 on a CPU."
    )
    compiled: Flag | None = unset("Compile decoding (a minute at start); without it, for models of 0.4 billion up.")
    memory_gb: Above0 | None = unset("Most memory for keys and values; without it, a third of what is free.")


class EvalConfig(Section):
    """Evaluation during a run."""

    every: Count = key(10, "Stages between evaluations; 0 is never.")
    problems: Positive = key(64, "Held-out problems, at most.")
    samples: Positive = key(4, "Episodes of each problem.")
    temperature: From0 | None = unset("Without it, as trained; 0 is greedy.")


class StoreConfig(Section):
    """What a run keeps."""

    keep_checkpoints: Positive = key(2, "How many of the latest checkpoints to keep.")
    episodes: Flag = key(True, "Keep the episodes for inspection.")


class TeamFile(Section):
    """A whole team file."""

    name: RunName = Field(description="Names the run.")
    seed: Count = key(0, "All randomness comes from it.")
    device: Device = key("auto", "auto, cpu, cuda or cuda:N.")
    task: CodeTask | RolesTask | SumsTask | DataTask = Field(
        discriminator="name", description="The problems; name is code, roles, sums or data."
    )
    team: TeamConfig
    tiny: TinyConfig = TinyConfig()
    plan: PlanConfig = PlanConfig()
    learner: LearnerConfig = LearnerConfig()
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()
    store: StoreConfig = StoreConfig()

    def _refusals(self) -> Iterable[Refusal]:
        """What the task asks of the team that plays it."""
        return self.task.refusals_of(self.team)

    def anchored(self, folder: Path) -> TeamFile:
        """The same with the paths of data, grader and model folders made absolute, taken as relative to ``folder``,
        so that a stored copy means the same wherever it lies."""

        def absolute(path: str) -> str:
            return os.path.abspath(folder / Path(path).expanduser())

        def model(name: str | None) -> str | None:
            if name is None or name in _BUILT_IN_MODELS:
                return name
            is_path = name.startswith((".", "~")) or Path(name).is_absolute() or (folder / name).is_dir()
            return absolute(name) if is_path else name

        task = self.task
        if isinstance(task, DataTask):
            update = {"path": absolute(task.path)}
            if task.grader.startswith("python:"):
                file, _, function = task.grader.removeprefix("python:").rpartition(":")
                update["grader"] = f"python:{absolute(file)}:{function}"
            task = task.model_copy(update=update)
        agents = tuple(agent.model_copy(update={"model": model(agent.model)}) for agent in self.team.agents)
        team = self.team.model_copy(update={"model": model(self.team.model), "agents": agents})
        return self.model_copy(update={"task": task, "team": team})
