"""vLLM servers for a team file: which agents share one, how it is started, and what it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from teamtr.config import AgentConfig, TeamFile
from teamtr.config.vllm import room_for
from teamtr.engines.vllm.engine import VllmEngine
from teamtr.engines.vllm.hosts import Host, OwnServer, SharedBase
from teamtr.engines.vllm.memory import ModelSize, ServerMemory, Servers, slots
from teamtr.engines.vllm.server import Launch
from teamtr.errors import UserError
from teamtr.ports import GB, Engine
from teamtr.session.models import (
    OBJECT,
    Loader,
    Models,
    base_model,
    device_of,
    save_pretrained,
    weights_hash,
)
from teamtr.settings.paths import BUILT_IN_MODELS
from teamtr.tasks import Task

TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SHARE = 0.4
"""Share of the memory for all servers together, where the learner uses the same memory."""
SHARE_OF_THEIR_OWN = 0.9
"""Share of the memory of cards that only the servers use."""
FREE_AT_START = 0.01
"""Share of the memory that must be free when a server starts with a given size of its KV cache: vLLM uses its share for
nothing else then. By default that is nearly all memory, which a learner on the same card does not leave free."""

Source = tuple[str, str | None]


def sampled_by_vllm(models: Models, team_file: TeamFile, task: Task, load: Loader | None = None) -> Models:
    """The same models, with the team's messages sampled by vLLM."""
    settings = team_file.sampling
    launch = None if settings.vllm.python is None else _launch(team_file, settings.vllm.python)
    try:
        if launch is not None:
            launch.require()
        hosts = _hosts(team_file, task, models.engine, launch, load)
    except BaseException:
        models.engine.close()  # it may be in other processes
        raise
    precision, device = "" if launch is None else _precision(team_file), device_of(team_file)
    infos = {name: models.engine.info(name) for name in hosts}
    sizes = {name: ModelSize(info.parameters, info.trained_parameters) for name, info in infos.items()}
    on_card = device.type == "cuda"
    engine = VllmEngine(
        models.engine,
        hosts,
        settings.temperature,
        precision,
        servers=servers_of(team_file, sizes, precision, on_card=on_card),
        card_bytes=torch.cuda.get_device_properties(device).total_memory if on_card else None,
        sharing=-(-team_file.cluster.workers // torch.cuda.device_count()) if on_card else 1,
    )
    return Models(engine, models.codecs)


def servers_of(team_file: TeamFile, sizes: Mapping[str, ModelSize], precision: str, *, on_card: bool) -> Servers:
    """The memory of this team's servers, as ``_launch`` starts them; ``sizes`` by agent."""
    settings = team_file.sampling.vllm
    if settings.python is None:
        return Servers(urls=settings.urls)
    sharing, alone = _grouped(team_file)
    return Servers(
        tuple(
            _server(team_file, agents, [sizes[agent.name] for agent in agents], precision, on_card)
            for agents in (*sharing.values(), *([agent] for agent in alone))
        )
    )


def _server(
    team_file: TeamFile, agents: Sequence[AgentConfig], sizes: Sequence[ModelSize], precision: str, on_card: bool
) -> ServerMemory:
    adapted = [(size, agent.lora.rank) for agent, size in zip(agents, sizes, strict=True) if agent.train == "lora"]
    itemsize = 4 if precision == "fp32" else 2
    place, beside = _where(team_file, on_card)
    return ServerMemory(
        agents=tuple(agent.name for agent in agents),
        weights=itemsize * sizes[0].parameters,
        adapters=itemsize * slots(adapted, room_for(max((rank for _, rank in adapted), default=0))),
        precision=precision,
        share=_share(team_file),
        cache=_cache(team_file),
        place=place,
        beside=beside,
    )


def _where(team_file: TeamFile, on_card: bool) -> tuple[str, bool]:
    """Where the servers run, in words, and whether the learner runs there."""
    cards = team_file.sampling.vllm.cards
    if not on_card:
        return "in this machine's memory", True
    if cards is not None:
        return f"on card {cards} alone (sampling.vllm.cards)", False
    if team_file.device in ("auto", "cuda", "cuda:0"):
        return "on the card that trains, the first of this process", True
    return f"on the first card of this process; {team_file.device} trains", False


def _hosts(
    team_file: TeamFile, task: Task, engine: Engine, launch: Launch | None, load: Loader | None
) -> dict[str, Host]:
    """Adapters of one base share a server, together with agents that are the base itself; any other agent has its
    own."""
    hosts: dict[str, Host] = {}
    place = _place(team_file)
    sharing, alone = _grouped(team_file)
    for agent in alone:
        if launch is None:
            raise UserError(
                f"sampling.vllm.urls: agent {agent.name!r} has a model of its own, which needs a server started "
                "here: give sampling.vllm.python instead"
            )
        hosts[agent.name] = OwnServer(launch, place)
    for agents in sharing.values():
        adapted = [agent for agent in agents if agent.train == "lora"]
        host = SharedBase(
            agents[0].model,
            revision=agents[0].revision,
            launch=launch,
            urls=team_file.sampling.vllm.urls,
            patience_s=team_file.sampling.vllm.patience_s,
            place=place,
            rank=room_for(max(agent.lora.rank for agent in adapted)) if adapted else 0,
            adapters=len(adapted),
            unchanged={agent.name: engine.version(agent.name) for agent in agents if agent.train == "full"},
            make=None if _is_stored(agents[0]) else partial(_write_base, team_file, task, adapted[0], engine, load),
        )
        hosts.update((agent.name, host) for agent in agents)
    return hosts


def _grouped(team_file: TeamFile) -> tuple[dict[Source, list[AgentConfig]], list[AgentConfig]]:
    """The agents that share a server, by source, and those with their own."""
    sharing: dict[Source, list[AgentConfig]] = {}
    alone = []
    for agent in team_file.team.agents:
        if agent.train == "lora" or (agent.frozen and _is_stored(agent)):
            sharing.setdefault(agent.source, []).append(agent)
        else:
            alone.append(agent)
    return sharing, alone


def _is_stored(agent: AgentConfig) -> bool:
    """Whether the model is in a folder or on the hub, where vLLM can load it."""
    return agent.model not in BUILT_IN_MODELS and not agent.model.startswith(OBJECT)


def _write_base(
    team_file: TeamFile, task: Task, agent: AgentConfig, engine: Engine, load: Loader | None, folder: Path
) -> None:
    """Write the base of this agent's adapter, created again."""
    model, tokenizer = base_model(team_file, task, agent, load)
    if weights_hash(model) != engine.info(agent.name).base_version:
        raise UserError(f"the base of agent {agent.name!r} was made anew with other weights: save it to a folder")
    save_pretrained(model, tokenizer, folder)


def _launch(team_file: TeamFile, python: str) -> Launch:
    settings, on_card = team_file.sampling.vllm, device_of(team_file).type == "cuda"
    arguments = [
        f"--dtype={TYPES[_precision(team_file)]}",
        "--logprobs-mode=processed_logprobs",
        "--generation-config=vllm",
        "--uvicorn-log-level=warning",
    ]
    environment = {}
    cache = _cache(team_file)
    share = _share(team_file) if cache is None else FREE_AT_START
    arguments.append(f"--gpu-memory-utilization={share:.3f}")  # of a card's memory, or of this machine's
    if cache is not None:
        arguments.append(f"--kv-cache-memory-bytes={cache}")
    if not on_card:
        arguments.append("--enforce-eager")  # compiling takes longer than it saves, and needs a compiler
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if settings.context_tokens is not None:
        arguments.append(f"--max-model-len={settings.context_tokens}")
    if settings.cards is not None:
        environment["CUDA_VISIBLE_DEVICES"] = settings.cards
    return Launch(python, [*arguments, *settings.arguments], environment, settings.start_s, settings.patience_s)


def _share(team_file: TeamFile) -> float:
    """Share of the memory for one server."""
    share = SHARE if team_file.sampling.vllm.cards is None else SHARE_OF_THEIR_OWN
    return round(share / _count(team_file), 3)


def _cache(team_file: TeamFile) -> int | None:
    """Bytes of KV cache per server, if the team file sets them."""
    memory = team_file.sampling.memory_gb
    return None if memory is None else int(memory * GB / _count(team_file))


def _count(team_file: TeamFile) -> int:
    """The number of servers."""
    return sum(map(len, _grouped(team_file)))


def _precision(team_file: TeamFile) -> str:
    asked = team_file.sampling.precision
    if asked != "auto":
        return asked
    return "fp16" if device_of(team_file).type == "cuda" else "fp32"


def _place(team_file: TeamFile) -> Path | None:
    folder = team_file.sampling.vllm.folder
    return None if folder is None else Path(folder)
