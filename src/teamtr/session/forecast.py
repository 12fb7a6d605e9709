"""Forecast of a run on a cluster that need not exist, from the team file and model configs, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from teamtr.config import AgentConfig, TeamFile
from teamtr.errors import UserError
from teamtr.planning.cards import Card, card_like, card_named
from teamtr.planning.configs import shape_of_source, tiny_shape
from teamtr.planning.engine import UnloadedEngine
from teamtr.planning.setup import Cluster, Group, Learning, Member, PlannedTurn, Sampling, Setup
from teamtr.planning.shape import ModelShape
from teamtr.planning.stage import Prediction, predict
from teamtr.ports import GB, Demand
from teamtr.presets import Plan
from teamtr.session.build import Parts, Session, build
from teamtr.session.memory import WORDS_OF_A_LINE, demand_of, openings, result_tokens
from teamtr.session.models import Models, codecs_of, device_of
from teamtr.session.success import planned_evaluations
from teamtr.session.vllm import ModelSize, servers_of
from teamtr.tasks import Task
from teamtr.tasks.players import PlayerConfig
from teamtr.team import Schedule, ToolTurns
from teamtr.types import PLAYER

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Spoken:
    """How an agent usually speaks: the tokens of a message, the messages in one turn of the team's order (several if it
    calls tools), and the tokens of tool results after a message. None: the most that it may."""

    message: int | None = None
    steps: int | None = None
    results: int | None = None


AT_MOST = Spoken()


@dataclass(frozen=True)
class Where:
    """The cluster to plan for: the kind and number of cards (by default one per worker), the network between machines
    in bytes per second, and the tokens of a typical message (by default the maximum)."""

    card: str
    cards: int | None = None
    network: float | None = None
    message_tokens: int | None = None


def forecast(team_file: TeamFile, where: Where) -> tuple[Session, Prediction]:
    """The session without weights, and the prediction of a stage on that cluster."""
    cluster = _cluster(team_file, where)
    session = build(team_file, taught=False, parts=Parts(make_engine=partial(_engine, cluster)))
    return session, _predicted(session, cluster, dict.fromkeys(session.team.names, Spoken(where.message_tokens)))


def forecast_here(session: Session, typical: Mapping[str, Spoken]) -> Prediction | None:
    """The same for loaded models, on their device and in the precisions that they compute in. None if the rates of the
    device or the shape of a model are not known. ``typical``: how each agent usually speaks."""
    device = device_of(session.team_file)
    card = card_named("cpu") if device.type == "cpu" else card_like(torch.cuda.get_device_name(device))
    if card is None:
        return None
    try:
        settled = {name: session.engine.info(name).precision for name in session.team.trainable}
        return _predicted(session, _cluster(session.team_file, Where(card.name)), typical, settled)
    except UserError:
        return None


def _predicted(
    session: Session, cluster: Cluster, typical: Mapping[str, Spoken], settled: Mapping[str, str] = NOTHING
) -> Prediction:
    team_file = session.team_file
    setup = _setup(team_file, session.plan, cluster, demand_of(session))
    setup = replace(setup, turns=_turns(session, typical), evaluated=planned_evaluations(session), settled=settled)
    if not setup.updated:
        raise UserError("nobody is trained and speaks in this team: there is nothing to plan; see team.agents")
    return predict(setup, local=team_file.cluster.engine == "local")


def _engine(
    cluster: Cluster, team_file: TeamFile, task: Task, plan: Plan, player: PlayerConfig | None, *, taught: bool
) -> Models:
    members = _members(team_file)
    names = [member.name for member in members]
    trained = {member.name: member.trained for member in members}
    engine = UnloadedEngine(names, trained, partial(_setup, team_file, plan, cluster))
    return Models(engine, codecs_of(team_file, player))


def _cluster(team_file: TeamFile, where: Where) -> Cluster:
    settings, card = team_file.cluster, card_named(where.card)
    if team_file.device == "cpu" and not card.is_cpu:
        raise UserError(
            f"device: cpu uses no card, and --card is {card.name}: leave device out, or plan for --card cpu"
        )
    named = enumerate(zip(settings.group_names, settings.groups, strict=True))
    found = Cluster(
        card,
        where.cards or settings.workers,
        settings.workers,
        settings.parts,
        shard_base=settings.shard_base,
        groups=tuple(Group(name, settings.held_by(number), group.workers) for number, (name, group) in named),
    )
    return found if where.network is None else replace(found, network=where.network)


def _setup(team_file: TeamFile, plan: Plan, cluster: Cluster, demand: Demand) -> Setup:
    learner, members, sampling = team_file.learner, _members(team_file), _sampling(team_file, cluster.card)
    if team_file.sampling.engine == "vllm":
        sizes = {member.name: ModelSize(member.shape.parameters, member.trained) for member in members}
        servers = servers_of(team_file, sizes, sampling.precision, on_card=not cluster.card.is_cpu)
        sampling = replace(sampling, servers=servers)
        demand = replace(demand, sampled_elsewhere=frozenset(team_file.team.names))
    return Setup(
        members=members,
        turns=(),
        demand=demand,
        plan=plan,
        cluster=cluster,
        learning=Learning(
            learner.epochs,
            learner.minibatches,
            learner.micro_batch,
            learner.gate_share,
            learner.precision,
            learner.base,
            learner.recompute,
            learner.kept_bytes,
        ),
        sampling=sampling,
    )


def _sampling(team_file: TeamFile, card: Card) -> Sampling:
    """The decisions of ``session.models.sampler_pool``, for a card that need not be present."""
    settings, on_card = team_file.sampling, not card.is_cpu
    paged = settings.engine == "paged" or (settings.engine == "auto" and on_card)
    by_device = "fp16" if on_card else "fp32"
    precision = by_device if settings.precision == "auto" else settings.precision
    memory = None if settings.memory_gb is None else int(settings.memory_gb * GB)
    return Sampling(paged, precision, memory, by_row=settings.adapters == "by_row")


def _members(team_file: TeamFile) -> tuple[Member, ...]:
    """Every model that would be loaded: those of the agents, and that of a player with a model of its own, which has no
    adapter."""
    shapes: dict[tuple[str, str | None], ModelShape] = {}

    def shape(model: str, revision: str | None) -> ModelShape:
        if (model, revision) not in shapes:
            shapes[model, revision] = _shape(team_file, model, revision)
        return shapes[model, revision]

    found = [_member(agent, shape(*agent.source)) for agent in team_file.team.agents]
    player = team_file.task.wanted_player
    if player is not None and player.has_own_model:
        source = str(player.model), player.revision
        found.append(Member(PLAYER, shape(*source), f"{PLAYER} {source}", rank=None, frozen=True))
    return tuple(found)


def _member(agent: AgentConfig, shape: ModelShape) -> Member:
    rank = agent.lora.rank if agent.train == "lora" else None
    return Member(agent.name, shape, str(agent.source), rank, agent.lora.targets, agent.frozen)


def _shape(team_file: TeamFile, model: str, revision: str | None) -> ModelShape:
    if model == "tabular":
        raise UserError("a tabular agent takes no memory and no time worth planning: run `teamtr plan` without --card")
    if model == "tiny":
        tiny = team_file.tiny
        return tiny_shape(tiny.layers, tiny.width, tiny.heads)
    return shape_of_source(model, revision)


def _turns(session: Session, typical: Mapping[str, Spoken]) -> tuple[PlannedTurn, ...]:
    """The turns of an episode that does not end early, with the longest prompts. If the router decides during the
    episode, agents speak in the order in which they are listed. Messages and tool calls are ``typical`` ones."""
    router, names = session.context.router, session.team.names
    calling, steps = (router.agents, router.steps) if isinstance(router, ToolTurns) else ((), 1)
    if isinstance(router, ToolTurns):
        router = router.inner
    if isinstance(router, Schedule):
        order = [(turn.round, turn.agent) for turn in router.turns()]
    else:
        speakers = [name for name in names if router.turns_of(name)]
        order = [(k // len(speakers), speakers[k % len(speakers)]) for k in range(router.horizon)]
    usual = {name: typical.get(name, AT_MOST) for name in names}
    order = [turn for turn in order for _ in range((usual[turn[1]].steps or steps) if turn[1] in calling else 1)]
    first, said, turns = openings(session), 0, list[PlannedTurn]()
    replied, read = dict[str, int](), dict[str, int]()
    for agent in session.team:
        results = usual[agent.name].results
        replied[agent.name] = result_tokens(session, agent) if results is None else results
    for round, name in order:
        most = session.team[name].max_tokens
        message = min(most, usual[name].message or most)
        opening = first[name]
        context = opening.prompt + said + opening.reply * round
        turns.append(PlannedTurn(name, context, message, opening.prompt, read.get(name, 0)))
        read[name] = context
        said += message + WORDS_OF_A_LINE + replied[name]
    return tuple(turns)
