"""Creates the engine of a team file: in this process, or over workers that each build the team or their part of it."""

from __future__ import annotations

import os
from functools import partial

from teamtr.config import TeamFile, dump, loads
from teamtr.engines.cluster.engine import ClusterEngine
from teamtr.engines.cluster.groups import GroupedEngine
from teamtr.engines.cluster.ray_members import Group, Room, require_room, start_members
from teamtr.engines.local import LocalEngine
from teamtr.engines.shards import Shards
from teamtr.errors import UserError
from teamtr.presets import Plan
from teamtr.session.models import OBJECT, Loader, Models, codecs_of, device_of, local_engine
from teamtr.session.task import build_task
from teamtr.session.vllm import sampled_by_vllm
from teamtr.tasks import Task
from teamtr.tasks.players import PlayerConfig


def engine_of(
    team_file: TeamFile,
    task: Task,
    plan: Plan,
    player: PlayerConfig | None,
    *,
    taught: bool = True,
    again: bool = False,
    load: Loader | None = None,
) -> Models:
    """The engine that the file asks for. ``again``: replaces a lost engine, with as many workers as there is room for.
    ``load``: as for ``local_engine``."""
    if team_file.cluster.engine == "local":
        models = local_engine(team_file, task, plan, player, taught=taught, load=load)
    else:
        models = _over_workers(team_file, player, taught, again)
    return sampled_by_vllm(models, team_file, task, load) if team_file.sampling.engine == "vllm" else models


def require_workers(team_file: TeamFile) -> None:
    """Raises a UserError if there is no room for the workers, before anything is loaded or started."""
    settings = team_file.cluster
    require_room([group.workers for group in settings.groups] or [settings.workers], _room(team_file))


def _room(team_file: TeamFile, *, again: bool = False) -> Room:
    settings = team_file.cluster
    return Room(
        shards=settings.parts,
        address=settings.address,
        patience_s=settings.patience_s,
        on_cards=device_of(team_file).type == "cuda",
        may_be_fewer=again,
        lockstep=settings.shard_base,
    )


def _over_workers(team_file: TeamFile, player: PlayerConfig | None, taught: bool, again: bool) -> Models:
    _require_text(team_file)
    settings, room = team_file.cluster, _room(team_file, again=again)
    codecs, make = codecs_of(team_file, player), partial(_member, dump(team_file), taught, os.getcwd())
    groups = [
        Group(partial(make, settings.held_by(number)), group.workers, number, group.agents)
        for number, group in enumerate(settings.groups)
    ]
    started = start_members(groups or [Group(partial(make, None), settings.workers)], room)
    try:
        engines = [ClusterEngine(members, settings.parts, lockstep=settings.shard_base) for members in started]
    except BaseException:
        for members in started:
            members.close()
        raise
    if not groups:
        return Models(engines[0], codecs)
    return Models(GroupedEngine(engines, settings.group_names, tuple(codecs)), codecs)


def _member(text: str, taught: bool, folder: str, held: tuple[str, ...] | None, shards: Shards) -> LocalEngine:
    """Runs in a worker: builds the whole team, or the models of its group, to compute the shards of this worker."""
    os.chdir(folder)
    team_file = loads(text, name="team.yaml", stored=True)
    player = team_file.task.wanted_player
    engine = local_engine(
        team_file, build_task(team_file), team_file.sized_plan(), player, taught=taught, shards=shards, held=held
    ).engine
    assert isinstance(engine, LocalEngine)
    return engine


def _require_text(team_file: TeamFile) -> None:
    """Refuses objects of this program: a worker builds the team from its file."""
    objects = [agent.name for agent in team_file.team.agents if str(agent.model).startswith(OBJECT)]
    held = [*(f"the model of agent {name!r}" for name in objects), *team_file.python]
    if held:
        raise UserError(
            f"cluster.engine: ray builds the team in other processes, and {', '.join(held)} is an object of this "
            "program: save the model to a folder and name that, or use cluster.engine: local"
        )
