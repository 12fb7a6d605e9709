"""From a team file to a team that can play and learn: the only place that knows how the parts fit together."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from teamtr.chat import ChatCodec, Sharing, check_template, check_thinking, render
from teamtr.config import AgentConfig, LoraConfig, TeamFile
from teamtr.engines.hashing import hash_tensors
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged.pool import SamplerPool, has_kernels
from teamtr.engines.policy import Policy
from teamtr.engines.tabular import TabularPolicy
from teamtr.engines.torch.fused_lora import slim
from teamtr.engines.torch.loading import TinyShape, load_pretrained, quieten, share_base, teach_form, tiny_model
from teamtr.engines.torch.policy import CHEAPEST_FIRST, Precision, TransformerPolicy
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.errors import UserError
from teamtr.presets import Plan
from teamtr.randomness import generator, seed_of
from teamtr.rollout import RolloutContext
from teamtr.settings.paths import BUILT_IN_MODELS
from teamtr.tasks import Task, TaskContext, registry
from teamtr.tasks.benchmarks.arbench.endpoint import EndpointPlayer
from teamtr.tasks.players import Player, PlayerConfig, PolicyPlayer
from teamtr.team import Agent, Router, Team
from teamtr.training.batch import Optimization
from teamtr.types import Ids


@dataclass(frozen=True)
class Session:
    """Everything a run needs, built."""

    team_file: TeamFile
    task: Task
    engine: LocalEngine
    context: RolloutContext
    team: Team
    plan: Plan
    optimization: Optimization

    def load(self, folder_of: Callable[[str], Path]) -> Team:
        """Put stored weights into every agent and return the team they make."""
        for name in self.team.names:
            self.engine.learner(name).load(folder_of(name))
        return self.current_team()

    def breaches(self) -> dict[str, int]:
        """How often messages broke the team's protocol so far, by reason; agents of one model share a codec."""
        protocols = [c.sharing for c in self.context.codecs.values() if isinstance(c, ChatCodec)]
        counters = {id(p): p.breaches for p in protocols if isinstance(p, Sharing)}
        return dict(sum(counters.values(), Counter[str]()))

    def current_team(self) -> Team:
        team = self.team
        for name in team.names:
            team = team.replace(name, self.engine.version(name))
        return team


def build(team_file: TeamFile, *, taught: bool = True) -> Session:
    """Load models, check templates, and put the team together.

    ``taught=False``: built-in models are not taught the form of messages, where their weights are loaded from a commit
    afterwards, or do not matter. What a reference policy is made of is only right when they are.
    """
    _use_few_threads(team_file)
    task = build_task(team_file)
    plan = team_file.plan.plan()
    settings = team_file.learner
    room = sampler_pool(team_file)
    models = _agent_models(team_file if taught else _without_teaching(team_file), task, room)
    learners = {
        agent.name: PolicyLearner(
            agent.name,
            models[agent.name].policy,
            micro_batch=settings.micro_batch,
            betas=settings.betas,
            max_grad_norm=settings.max_grad_norm,
            keep_initial=plan.objective.has_reference and not agent.frozen,
        )
        for agent in team_file.team.agents
    }
    engine = LocalEngine(learners)
    team = Team(
        tuple(
            Agent(
                name=agent.name,
                version=engine.version(agent.name),
                system_prompt=agent.system_prompt,
                sees=agent.sees,
                max_tokens=agent.max_tokens,
                frozen=agent.frozen,
            )
            for agent in team_file.team.agents
        )
    )
    if (wanted := team_file.task.wanted_player) is not None:
        task.player = _player(team_file, wanted, task, engine, models, room)
    context = RolloutContext(
        sampler=engine,
        codecs={name: model.codec for name, model in models.items()},
        router=Router(team_file.team.speaking_order, team_file.team.router.rounds),
        task=task,
        answer=team_file.team.answer,
        history=team_file.team.history,
    )
    optimization = Optimization(
        learning_rate=settings.learning_rate,
        epochs=settings.epochs,
        minibatches=settings.minibatches,
        confidence=settings.confidence,
        max_backtracks=settings.max_backtracks,
        gate_share=settings.gate_share,
        certify_share=settings.certify_share,
        cross_fit=settings.cross_fit,
    )
    return Session(team_file, task, engine, context, team, plan, optimization)


def _without_teaching(team_file: TeamFile) -> TeamFile:
    """As it is where adapters rest on the built-in model: a commit holds them and not their base."""
    if any(agent.model == "tiny" and agent.train == "lora" for agent in team_file.team.agents):
        return team_file
    return team_file.model_copy(update={"tiny": team_file.tiny.model_copy(update={"warmup_steps": 0})})


def _use_few_threads(team_file: TeamFile) -> None:
    """One, for built-in models: their matrices are too small to share, and two threads on a busy machine wait for each
    other most of the time. What the environment asks for stands."""
    built_in = all(agent.model in BUILT_IN_MODELS for agent in team_file.team.agents)
    if built_in and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def build_task(team_file: TeamFile) -> Task:
    """The task that the file names."""
    return registry.build_task(team_file.task, TaskContext(team_file.seed, team_file.team.names))


def device_of(team_file: TeamFile) -> torch.device:
    if team_file.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if team_file.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device: {team_file.device} is asked for, but there is no CUDA device here; use auto or cpu")
    return torch.device(team_file.device)


# -- models: a policy and the codec it speaks through --------------------------------------------------------


@dataclass(frozen=True)
class AgentModel:
    policy: Policy
    codec: ChatCodec


def _agent_models(team_file: TeamFile, task: Task, room: SamplerPool | None) -> dict[str, AgentModel]:
    """One model per agent. Agents that name the same model share its codec, and its base when they train LoRA."""
    by_source: dict[str, list[AgentConfig]] = {}
    for agent in team_file.team.agents:
        by_source.setdefault(agent.model, []).append(agent)
    models: dict[str, AgentModel] = {}
    for source, agents in by_source.items():
        make = _tabular_models if source == "tabular" else _transformer_models
        models.update(make(team_file, task, source, agents, room))
    return models


def _player(
    team_file: TeamFile,
    settings: PlayerConfig,
    task: Task,
    engine: LocalEngine,
    models: Mapping[str, AgentModel],
    room: SamplerPool | None,
) -> Player:
    """Who plays the other roles: a model at an endpoint, an agent of this team, or a model of its own."""
    if settings.base_url is not None:
        return EndpointPlayer(
            settings.base_url,
            str(settings.model),
            key_variable=settings.key_variable,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
        )
    name = settings.agent or "player"
    if settings.agent is not None:
        model = models[name]
    else:
        alone = AgentConfig(name=name, model=settings.model, train="full", lora=LoraConfig(), system_prompt="")
        model = _transformer_models(team_file, task, str(settings.model), [alone], room)[name]
        engine = LocalEngine({name: PolicyLearner(name, model.policy)})
    return PolicyPlayer(engine, name, model.codec, settings.max_tokens, settings.temperature)


def _codec(team_file: TeamFile, tokenizer: Any) -> ChatCodec:
    protocol = team_file.team.protocol
    sharing = Sharing(think=protocol.think, tools=protocol.tools)
    codec = ChatCodec(tokenizer, team_file.team.template_kwargs, sharing=sharing, system=protocol.system)
    sharing.inside = check_thinking(codec, protocol.think)
    silent = any(not agent.system_prompt for agent in team_file.team.agents)
    check_template(codec, team_file.team.history, empty_system_prompt=silent and protocol.system == "explicit")
    return codec


def _tabular_models(
    team_file: TeamFile, task: Task, source: str, agents: Sequence[AgentConfig], room: SamplerPool | None
) -> Mapping[str, AgentModel]:
    tokenizer = character_tokenizer()
    codec = _codec(team_file, tokenizer)
    end = int(tokenizer.eos_token_id)
    letters = tokenizer.encode(task.alphabet, add_special_tokens=False) if task.alphabet else range(len(tokenizer))
    favoured = [end, *letters]
    return {
        agent.name: AgentModel(
            TabularPolicy(
                len(tokenizer),
                end_ids=frozenset({end}),
                favoured=favoured,
                temperature=team_file.sampling.temperature,
            ),
            codec,
        )
        for agent in agents
    }


def sampler_pool(team_file: TeamFile) -> SamplerPool | None:
    """Where the team's transformers sample; None for the plain path."""
    settings, device = team_file.sampling, device_of(team_file)
    on_gpu = device.type == "cuda"
    if settings.engine == "plain" or (settings.engine == "auto" and not (on_gpu and has_kernels())):
        return None
    # float16 is as fast as bfloat16 and eight times closer to what the learner computes (docs/performance.md); models
    # that overflow it exist.
    by_device = ("fp16", "bf16") if on_gpu else ("fp32", None)
    precision, fallback = by_device if settings.precision == "auto" else (settings.precision, None)
    return SamplerPool(
        precision=precision,
        fallback=fallback,
        device=device,
        memory_bytes=None if settings.memory_gb is None else int(settings.memory_gb * 2**30),
        compiled=settings.compiled,
    )


def _transformer_models(
    team_file: TeamFile, task: Task, source: str, agents: Sequence[AgentConfig], room: SamplerPool | None
) -> Mapping[str, AgentModel]:
    quieten()
    device = device_of(team_file)
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels of our own are launched on the current one
    if source == "tiny":
        model, tokenizer = _warm_tiny(team_file, task, [a.name for a in agents])
    else:
        model, tokenizer = load_pretrained(source)
    model.to(device)
    codec = _codec(team_file, tokenizer)
    precision = _precision(team_file, device)
    adapted = {a.name: a.lora for a in agents if a.train == "lora"}
    policies: dict[str, Policy] = {}
    whole = [a.name for a in agents if a.train == "full"]
    for k, name in enumerate(whole):
        own = model if k + 1 == len(whole) and not adapted else copy.deepcopy(model)
        policies[name] = TransformerPolicy(
            own, tokenizer, temperature=team_file.sampling.temperature, precision=precision, serving=room
        )
    if adapted:
        base_version = hash_tensors(dict(model.named_parameters()))
        # Adapters get names of our own: an agent may be called like a module of the model.
        adapters = {f"agent{k}": name for k, name in enumerate(adapted)}
        shared = share_base(
            model,
            {adapter: adapted[name] for adapter, name in adapters.items()},
            seed=seed_of(team_file.seed, "adapters", source),
        )
        slimmed = slim(shared)
        for adapter, name in adapters.items():
            policies[name] = TransformerPolicy(
                shared,
                tokenizer,
                adapter=adapter,
                base_version=base_version,
                temperature=team_file.sampling.temperature,
                precision=precision,
                serving=room,
                slim=slimmed,
            )
    return {a.name: AgentModel(policies[a.name], codec) for a in agents}


def _precision(team_file: TeamFile, device: torch.device) -> Precision:
    """``auto``: float32 on a CPU; on a GPU ``preflight.measure_floors`` goes on from the cheapest."""
    asked = team_file.learner.precision
    if asked != "auto":
        return asked
    return CHEAPEST_FIRST[0] if device.type == "cuda" else "fp32"


def _warm_tiny(team_file: TeamFile, task: Task, agents: Sequence[str]) -> tuple[Any, Any]:
    """The built-in model, taught the form of this task's messages when the task has examples of it."""
    tiny = team_file.tiny
    model, tokenizer = tiny_model(
        TinyShape(tiny.layers, tiny.width, tiny.heads), seed=seed_of(team_file.seed, "tiny") % 2**31
    )
    if tiny.warmup_steps == 0:
        return model, tokenizer
    codec = _codec(team_file, tokenizer)
    prompts = {a.name: a.system_prompt for a in team_file.team.agents}
    examples: list[tuple[Ids, Ids]] = []
    for agent, problem, history, text in task.format_examples(generator(team_file.seed, "form"), 1500):
        if agent not in agents:
            continue
        prompt = codec.encode(
            render(
                agent=agent,
                system_prompt=prompts[agent],
                problem=problem,
                history=history,
                style=team_file.team.history,
            )
        )
        examples.append((prompt, codec.encode_message(text)))
    teach_form(
        model,
        examples,
        steps=tiny.warmup_steps,
        learning_rate=tiny.warmup_learning_rate,
        batch=64,
        seed=seed_of(team_file.seed, "form", "order"),
    )
    return model, tokenizer
