"""From a team file to vLLM servers: which agents share one, what it is started with, and what it is given."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from teamtr.config import AgentConfig, TeamFile
from teamtr.config.vllm import room_for
from teamtr.engines.vllm.engine import VllmEngine
from teamtr.engines.vllm.hosts import Host, OwnServer, SharedBase
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
"""Of the memory of what trains as well, for all servers together."""
SHARE_OF_THEIR_OWN = 0.9
"""Of the memory of cards that are theirs alone."""

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
        models.engine.close()  # which may be elsewhere
        raise
    precision = "" if launch is None else _precision(team_file)
    return Models(VllmEngine(models.engine, hosts, settings.temperature, precision), models.codecs)


def _hosts(
    team_file: TeamFile, task: Task, engine: Engine, launch: Launch | None, load: Loader | None
) -> dict[str, Host]:
    """Adapters of one base share a server, with agents that are the base itself; whoever else has one alone."""
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
    """Who shares a server, by source, and who has one alone."""
    sharing: dict[Source, list[AgentConfig]] = {}
    alone = []
    for agent in team_file.team.agents:
        if agent.train == "lora" or (agent.frozen and _is_stored(agent)):
            sharing.setdefault(agent.source, []).append(agent)
        else:
            alone.append(agent)
    return sharing, alone


def _is_stored(agent: AgentConfig) -> bool:
    """Whether its model is in a folder or on the hub, where vLLM can read it too."""
    return agent.model not in BUILT_IN_MODELS and not agent.model.startswith(OBJECT)


def _write_base(
    team_file: TeamFile, task: Task, agent: AgentConfig, engine: Engine, load: Loader | None, folder: Path
) -> None:
    """The base under this agent's adapter, made once more."""
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
    servers = sum(map(len, _grouped(team_file)))
    memory = team_file.sampling.memory_gb
    if memory is not None:
        arguments.append(f"--kv-cache-memory-bytes={int(memory * GB / servers)}")
    else:  # of a card's memory, or of this machine's
        share = SHARE if settings.cards is None else SHARE_OF_THEIR_OWN
        arguments.append(f"--gpu-memory-utilization={share / servers:.3f}")
    if not on_card:
        arguments.append("--enforce-eager")  # compiling takes longer than it saves, and needs a compiler
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if settings.context_tokens is not None:
        arguments.append(f"--max-model-len={settings.context_tokens}")
    if settings.cards is not None:
        environment["CUDA_VISIBLE_DEVICES"] = settings.cards
    return Launch(python, [*arguments, *settings.arguments], environment, settings.start_s, settings.patience_s)


def _precision(team_file: TeamFile) -> str:
    asked = team_file.sampling.precision
    if asked != "auto":
        return asked
    return "fp16" if device_of(team_file).type == "cuda" else "fp32"


def _place(team_file: TeamFile) -> Path | None:
    folder = team_file.sampling.vllm.folder
    return None if folder is None else Path(folder)
