"""Builds models from a team file: loads them, adds adapters, chooses device and precision, and creates the engine.

Everything else in ``session`` uses engines through ``ports``, except for the construction of engines in ``cluster`` and
``vllm``.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from teamtr.calls import allowed
from teamtr.chat import ChatCodec, MessageFilter, check_template, check_thinking, render
from teamtr.config import AgentConfig, LoraConfig, TeamFile
from teamtr.engines import card
from teamtr.engines.cluster.ranks import Ranks
from teamtr.engines.cluster.sharded_models import LayerSpread
from teamtr.engines.distillation import PolicyDistiller
from teamtr.engines.hashing import hash_tensors
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged.pool import SamplerPool, has_kernels
from teamtr.engines.policy import CHEAPEST_FIRST, Policy, Precision
from teamtr.engines.saving import raising_os_errors
from teamtr.engines.shards import Shards
from teamtr.engines.tabular import TabularPolicy
from teamtr.engines.torch import pretrained
from teamtr.engines.torch.adapter_files import AdapterShape, require_adapter
from teamtr.engines.torch.file_precision import as_in_file, file_precision, in_float32, round_as_noted
from teamtr.engines.torch.fused_lora import fuse_lora
from teamtr.engines.torch.loading import TinyShape, quieten, share_base, teach_form, tiny_model
from teamtr.engines.torch.outline import NotInParts, Slot, Unread, slots_of
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.pretrained import Unloaded, load_outline, load_pretrained, require_finite
from teamtr.engines.torch.short_base import ROUNDED, keep_short
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.errors import UserError
from teamtr.ports import Distiller, Engine
from teamtr.presets import Plan
from teamtr.randomness import generator, seed_of
from teamtr.session.taught import teach_once
from teamtr.settings.paths import BUILT_IN_MODELS
from teamtr.store.cache import keep_kernels
from teamtr.store.model_index import keep_model_index
from teamtr.tasks import Task
from teamtr.tasks.benchmarks.arbench.endpoint import EndpointPlayer
from teamtr.tasks.players import Player, PlayerConfig, PolicyPlayer
from teamtr.types import PLAYER, Ids

log = logging.getLogger(__name__)

OBJECT = "object:"
"""Prefix of the source of a model that a Python program passed as an object; a hash of its weights follows."""
MOST_IMITATED = 1_000_000
"""Most parameters of a model that may be scored in emulated bfloat16, which was 230 times slower than float32 where it
was measured: for models larger than the built-in ones, noise floors alone take hours."""


@dataclass(frozen=True)
class Models:
    """A team's engine, and the codec of each of its models."""

    engine: Engine
    codecs: Mapping[str, ChatCodec]


Loader = Callable[[str], tuple[Any, Any]]


class EngineMaker(Protocol):
    """Creates the engine of a team. Implementations other than ``local_engine`` may place the models elsewhere."""

    def __call__(
        self, team_file: TeamFile, task: Task, plan: Plan, player: PlayerConfig | None, *, taught: bool
    ) -> Models: ...


def local_engine(
    team_file: TeamFile,
    task: Task,
    plan: Plan,
    player: PlayerConfig | None,
    *,
    taught: bool = True,
    load: Loader | None = None,
    shards: Shards | None = None,
    held: Collection[str] | None = None,
) -> Models:
    """The engine with every model of the team in this process.

    ``load`` returns (model, tokenizer) for a source of its own. ``shards``: those that this process computes; by
    default all. ``held``: the agents whose models are created, with the same weights as if all were; by default all.
    ``taught=False``: built-in models are not trained on the form of messages; see ``build``.
    """
    _use_few_threads(team_file)
    keep_model_index()
    _keep_kernels(team_file)
    settings, pool = team_file.learner, sampler_pool(team_file)
    held = (*team_file.team.names, PLAYER) if held is None else held
    layers = LayerSpread(shards, device_of(team_file)) if isinstance(shards, Ranks) and shards.lockstep else None
    making = Making(team_file if taught else _without_teaching(team_file), task, pool, load, layers, taught)
    models = _agent_models(making, held)
    learners = {
        agent.name: PolicyLearner(
            agent.name,
            models[agent.name].policy,
            micro_batch=settings.micro_batch,
            recompute="auto" if agent.frozen else settings.recompute,
            betas=settings.betas,
            max_grad_norm=settings.max_grad_norm,
            keep_initial=plan.objective.has_reference and not agent.frozen,
            critic=plan.critic is not None and not agent.frozen,
            shards=Shards(team_file.cluster.parts) if shards is None else shards,
            kept_bytes=settings.kept_bytes,
        )
        for agent in team_file.team.agents
        if agent.name in held
    }
    if player is not None and player.has_own_model and PLAYER in held:
        alone = AgentConfig(
            name="player",
            model=str(player.model),
            revision=player.revision,
            train="full",
            lora=LoraConfig(),
            system_prompt="",
        )
        making = Making(team_file, task, pool, load)
        models[PLAYER] = _transformer_models(making, [alone], ["player"])["player"]
        learners[PLAYER] = PolicyLearner(PLAYER, models[PLAYER].policy)
    parts = team_file.cluster.parts if shards is None else 1  # one of several processes receives its rows already split
    return Models(LocalEngine(learners, parts), {name: model.codec for name, model in models.items()})


def make_player(settings: PlayerConfig, engine: Engine, codecs: Mapping[str, ChatCodec]) -> Player:
    """The player of the other roles: a model at an endpoint, an agent of this team, or its own model."""
    if settings.base_url is not None:
        return EndpointPlayer(
            settings.base_url,
            str(settings.model),
            key_variable=settings.key_variable,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
        )
    name = settings.agent or PLAYER
    return PolicyPlayer(engine, name, codecs[name], settings.max_tokens, settings.temperature)


def distiller(new: Engine, old: Engine, agent: str) -> Distiller:
    """A learner that distills the old agent into the new one; both must be in this process."""
    learner, teacher = new.learner(agent), old.learner(agent)
    if not isinstance(learner, PolicyLearner) or not isinstance(teacher, PolicyLearner):
        raise UserError("a swap needs both models in this process: run it with the local engine")
    return PolicyDistiller(learner, teacher)


def codecs_of(team_file: TeamFile, player: PlayerConfig | None = None) -> dict[str, ChatCodec]:
    """The codec of every speaker, for an engine whose models are elsewhere. Agents of one model share a codec."""
    agents = team_file.team.agents
    by_source = {agent.source: _codec(team_file, load_tokenizer(*agent.source)) for agent in agents}
    codecs = {agent.name: by_source[agent.source] for agent in agents}
    if player is not None and player.has_own_model:
        codecs[PLAYER] = _codec(team_file, load_tokenizer(str(player.model), player.revision))
    return codecs


def base_model(team_file: TeamFile, task: Task, agent: AgentConfig, load: Loader | None = None) -> tuple[Any, Any]:
    """The (model, tokenizer) that this agent started from, without its adapter.

    The built-in model is not on disk: it is created again from the same seed and examples.
    """
    if agent.model.startswith(OBJECT):
        if load is None:
            raise UserError(f"{agent.model} was given by a Python program: export this agent with TeamTrainer")
        return _given(load, agent.model)
    if agent.model != "tiny":
        return load_pretrained(*agent.source)
    return _warm_tiny(team_file, task, [a.name for a in team_file.team.agents if a.model == "tiny"])


def save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both in the format of transformers, in the precision of the model's file. Failures to write raise
    OSError."""
    with raising_os_errors():
        as_in_file(model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def copy_checkpoint(stored: Path, folder: Path, without: Collection[str]) -> None:
    """Copy an agent's checkpoint except for these files; weights are written in the precision of the model's file."""
    for file in stored.iterdir():
        if file.name not in without:
            shutil.copy2(file, folder / file.name)
    if (folder / "config.json").exists():
        with raising_os_errors():
            round_as_noted(folder)


def weights_hash(model: Any) -> str:
    """A hash of the weights of a transformers model."""
    return hash_tensors(dict(model.named_parameters()))


def require_source(source: str, revision: str | None = None) -> None:
    """Raises a UserError if the source is not a model, as far as its files or the hub's answer show without loading
    it."""
    if source not in BUILT_IN_MODELS:
        pretrained.require_source(source, revision)


def load_tokenizer(source: str, revision: str | None = None) -> Any:
    """The tokenizer of a folder, a hub id or the built-in model."""
    return character_tokenizer() if source in BUILT_IN_MODELS else pretrained.load_tokenizer(source, revision)


def device_of(team_file: TeamFile) -> torch.device:
    if team_file.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if team_file.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device: {team_file.device} is asked for, but there is no CUDA device here; use auto or cpu")
    return torch.device(team_file.device)


def share_cards(processes: int) -> None:
    """Limit this process to its part of the cards' memory, as one of so many that use the cards at once."""
    card.take_share(processes)


def _without_teaching(team_file: TeamFile) -> TeamFile:
    """The team file without training built-in models on the form of messages. Unchanged if adapters are on the built-in
    model: a commit holds them but not their base."""
    if any(agent.model == "tiny" and agent.train == "lora" for agent in team_file.team.agents):
        return team_file
    return team_file.model_copy(update={"tiny": team_file.tiny.model_copy(update={"warmup_steps": 0})})


def _use_few_threads(team_file: TeamFile) -> None:
    """Use one thread for built-in models: their matrices are too small to split, and two threads on a busy machine wait
    for each other most of the time. A number set in the environment takes precedence."""
    built_in = all(agent.model in BUILT_IN_MODELS for agent in team_file.team.agents)
    if built_in and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _keep_kernels(team_file: TeamFile) -> None:
    """On a GPU, keep compiled kernels on disk: the first sample waits for their compilation, and the next run reads
    them."""
    if device_of(team_file).type == "cuda":
        keep_kernels()


# -- models: a policy and the codec it speaks through --------------------------------------------------------


@dataclass(frozen=True)
class AgentModel:
    policy: Policy
    codec: ChatCodec


@dataclass(frozen=True)
class Making:
    """What models are created from. ``pool``: where they sample (None: the plain path). ``load``: as for
    ``local_engine``. ``layers``: over which processes their layers are sharded (None: this process holds all of them).
    ``begins``: adapters start from ``lora.start``, and no commit is loaded over them."""

    team_file: TeamFile
    task: Task
    pool: SamplerPool | None = None
    load: Loader | None = None
    layers: LayerSpread | None = None
    begins: bool = True


def _agent_models(making: Making, held: Collection[str]) -> dict[str, AgentModel]:
    """One model per held agent. Agents with the same model share its codec, and its base if they train LoRA."""
    by_source: dict[tuple[str, str | None], list[AgentConfig]] = {}
    for agent in making.team_file.team.agents:
        by_source.setdefault(agent.source, []).append(agent)
    models: dict[str, AgentModel] = {}
    for (model, _), agents in by_source.items():
        own = [agent for agent in agents if agent.name in held]
        if own and model == "tabular":
            models.update(_tabular_models(making.team_file, making.task, own))
        elif own:
            models.update(_transformer_models(making, own, [agent.name for agent in agents]))
    return models


def _codec(team_file: TeamFile, tokenizer: Any) -> ChatCodec:
    protocol = team_file.team.protocol
    sharing = MessageFilter(think=protocol.think, tools=protocol.tools)
    codec = ChatCodec(tokenizer, team_file.team.template_kwargs, sharing=sharing, system=protocol.system)
    sharing.inside = check_thinking(codec, protocol.think)
    silent = any(not agent.system_prompt for agent in team_file.team.agents)
    check_template(codec, team_file.team.history, empty_system_prompt=silent and protocol.system == "explicit")
    return codec


def _tabular_models(team_file: TeamFile, task: Task, agents: Sequence[AgentConfig]) -> Mapping[str, AgentModel]:
    tokenizer = character_tokenizer()
    codec = _codec(team_file, tokenizer)
    end = int(tokenizer.eos_token_id)
    alphabet = task.alphabet
    favoured = [end, *(tokenizer.encode(alphabet, add_special_tokens=False) if alphabet else range(len(tokenizer)))]
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
    """The sampler pool of the team's transformers; None for the plain path."""
    settings, device = team_file.sampling, device_of(team_file)
    on_gpu = device.type == "cuda"
    if settings.engine in ("plain", "vllm") or (settings.engine == "auto" and not (on_gpu and has_kernels())):
        return None
    # float16 is as fast as bfloat16 and eight times closer to what the learner computes (docs/performance.md), but some
    # models overflow it.
    by_device = ("fp16", "bf16") if on_gpu else ("fp32", None)
    precision, fallback = by_device if settings.precision == "auto" else (settings.precision, None)
    return SamplerPool(
        precision=precision,
        fallback=fallback,
        device=device,
        memory_bytes=None if settings.memory_gb is None else int(settings.memory_gb * 2**30),
        compiled=settings.compiled,
        adapters=settings.adapters,
        keeps=team_file.learner.score == "sampler",
    )


def _transformer_models(
    making: Making, agents: Sequence[AgentConfig], taught: Sequence[str]
) -> Mapping[str, AgentModel]:
    """One model for each agent, all of one source. ``taught``: the agents whose message form the built-in model is
    trained on, which may be more than are held."""
    quieten()
    team_file, source, device = making.team_file, agents[0].model, device_of(making.team_file)
    card.use(device)
    base = team_file.learner.base
    # A base in a shorter precision is converted in main memory: a card with room for the result may have none for
    # float32.
    first = device if base == "fp32" else torch.device("cpu")
    loaded = _loaded(making, agents[0], taught, first)
    model, tokenizer = loaded.model, loaded.tokenizer
    codec = _codec(team_file, tokenizer)
    temperature, precision = team_file.sampling.temperature, _precision(team_file, device)
    _require_arithmetic(source, model, precision, device)
    adapted = {a.name: a.lora for a in agents if a.train == "lora"}
    starts = {name: lora for name, lora in adapted.items() if lora.start is not None and making.begins}
    for lora in starts.values():
        require_adapter(Path(str(lora.start)), AdapterShape(lora.rank, lora.alpha, source))
    policies: dict[str, Policy] = {}
    whole = [a.name for a in agents if a.train == "full"]
    for k, name in enumerate(whole):
        own = model if k + 1 == len(whole) and not adapted else copy.deepcopy(model)
        _put(own, slots_of(own), loaded, making.layers, device)
        policies[name] = TransformerPolicy(
            own, tokenizer, temperature=temperature, precision=precision, serving=making.pool
        )
    if adapted:
        slots = slots_of(model)  # before adapters change the names
        # Adapters get our own names, since an agent may have the name of a module of the model.
        adapters = {f"agent{k}": name for k, name in enumerate(adapted)}
        shared = share_base(
            model,
            {adapter: adapted[name] for adapter, name in adapters.items()},
            seed=seed_of(team_file.seed, "adapters", source),
        )
        _put(shared, slots, loaded, making.layers, first)
        # An int8 base is a different model. Half precision only fits it to a machine, and runs resume on others.
        frozen = {name: slot.tensor for name, slot in slots.items() if slot.is_parameter}
        base_version = hash_tensors(frozen, salt=base if base == "int8" else "")
        fused = fuse_lora(shared)
        if base == "file":
            keep_short(model, fused, file_precision(model), rounded=False)
        elif base in ROUNDED:
            keep_short(model, fused, ROUNDED[base], rounded=True)
        if base != "fp32":
            shared.to(device)
        checked: dict[Hashable, TransformerPolicy] = {}
        for adapter, name in adapters.items():
            targets = adapted[name].targets
            layers = targets if isinstance(targets, str) else frozenset(targets)
            policy = TransformerPolicy(
                shared,
                tokenizer,
                adapter=adapter,
                base_version=base_version,
                temperature=temperature,
                precision=precision,
                serving=making.pool,
                fused=fused,
                alike=checked.get(layers),
            )
            checked.setdefault(layers, policy)
            if name in starts:
                policy.start_from(Path(str(starts[name].start)))
            policies[name] = policy
    return {a.name: AgentModel(policies[a.name], codec) for a in agents}


@dataclass(frozen=True)
class _Loaded:
    """``unloaded``: the outline of the model, if its weights are still to be read."""

    model: Any
    tokenizer: Any
    unloaded: Unloaded | None = None


def _loaded(making: Making, agent: AgentConfig, taught: Sequence[str], device: torch.device) -> _Loaded:
    """The model that an agent names; for a sharded one, the weights are left in their files if possible. Otherwise the
    whole model is in main memory before each worker keeps its part."""
    if agent.model == "tiny":
        return _Loaded(*_warm_tiny(making.team_file, making.task, taught))
    if making.load is not None and agent.model.startswith(OBJECT):
        model, tokenizer = _given(making.load, agent.model)
        require_finite(model.state_dict(), f"the model of agent {agent.name!r}")
        return _Loaded(model, tokenizer)
    if making.layers is None:
        return _Loaded(*load_pretrained(*agent.source, device))
    try:
        unloaded = load_outline(*agent.source)
    except NotInParts as reason:
        log.warning("model %r is loaded as a whole by each worker, which then keeps its part: %s", agent.model, reason)
        return _Loaded(*load_pretrained(*agent.source))
    return _Loaded(unloaded.model, unloaded.tokenizer, unloaded)


def _given(load: Loader, source: str) -> tuple[Any, Any]:
    """The model from a Python program, in float32 like models loaded from folders."""
    model, tokenizer = load(source)
    return in_float32(model).eval(), tokenizer


def _put(
    model: Any, slots: Mapping[str, Slot], loaded: _Loaded, layers: LayerSpread | None, device: torch.device
) -> None:
    """Move the model to the device, with all its weights or this process's part of them."""
    if layers is None:
        model.to(device)
        return
    unread = None if loaded.unloaded is None else Unread(slots, loaded.unloaded.stored)
    layers.spread(model, unread)
    if loaded.unloaded is not None:
        loaded.unloaded.require_finite({name: slot.tensor for name, slot in slots.items()})


def _precision(team_file: TeamFile, device: torch.device) -> Precision:
    """``auto``: float32 on a CPU; on a GPU the cheapest precision, from which ``checks.measure_floors`` continues."""
    asked = team_file.learner.precision
    if asked != "auto":
        return asked
    return CHEAPEST_FIRST[0] if device.type == "cuda" else "fp32"


def _require_arithmetic(source: str, model: Any, precision: str, device: torch.device) -> None:
    """Refuse to score a large model in a bfloat16 that this CPU only emulates: float32 is both faster and more
    accurate."""
    size = sum(parameter.numel() for parameter in model.parameters())
    if precision == "bf16" and device.type == "cpu" and size > MOST_IMITATED and not has_bf16():
        raise UserError(
            f"learner.precision: bf16 and model {source!r} of {size / 1e6:,.0f} million parameters: this CPU has no "
            "bfloat16 arithmetic and imitates it hundreds of times slower; set learner.precision: fp32, or use a GPU"
        )


def has_bf16() -> bool:
    """Whether this CPU computes in bfloat16 natively."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _warm_tiny(team_file: TeamFile, task: Task, agents: Sequence[str]) -> tuple[Any, Any]:
    """The built-in model, trained on the form of this task's messages if the task has examples of it."""
    tiny = team_file.tiny
    model, tokenizer = tiny_model(
        TinyShape(tiny.layers, tiny.width, tiny.heads), seed=seed_of(team_file.seed, "tiny") % 2**31
    )
    told = task.format_examples(generator(team_file.seed, "form"), 1500) if tiny.warmup_steps else []
    if not told:
        return model, tokenizer
    codec = _codec(team_file, tokenizer)
    message = cache(codec.encode_message)  # the examples contain few different messages
    of_agent = {a.name: a for a in team_file.team.agents}
    examples: list[tuple[Ids, Ids]] = []
    for agent, problem, history, text in told:
        if agent not in agents:
            continue
        chat = render(
            agent=agent,
            system_prompt=of_agent[agent].system_prompt,
            problem=problem,
            history=history,
            speakers=team_file.team.names,
            style=team_file.team.history,
        )
        told_of = task.tools if team_file.tools.tell else None
        tools = () if told_of is None else allowed(told_of.schemas(problem), of_agent[agent].own_tools)
        prompt = codec.encode(chat, tools)
        examples.append((prompt, message(text)))
    teach_once(
        model,
        examples,
        teach_form,
        steps=tiny.warmup_steps,
        learning_rate=tiny.warmup_learning_rate,
        batch=64,
        seed=seed_of(team_file.seed, "form", "order"),
    )
    return model, tokenizer
