"""Builds a session from a team file. This is the only module that combines all parts: task, models, router and
tools."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from teamtr.chat import ChatCodec, MessageFilter
from teamtr.config import TeamFile
from teamtr.errors import UserError
from teamtr.own_code import make_own
from teamtr.ports import Engine
from teamtr.presets import Plan
from teamtr.progress import working
from teamtr.rollout import RolloutContext
from teamtr.session.cluster import engine_of
from teamtr.session.models import EngineMaker, make_player
from teamtr.session.task import build_task
from teamtr.session.tools import build_tools, check_names, check_prompts, some_problems, with_tool_turns
from teamtr.tasks import Task
from teamtr.team import Agent, Router, Team, visibility
from teamtr.training.batch import Optimization


@dataclass(frozen=True)
class Session:
    """All objects that a run needs."""

    team_file: TeamFile
    task: Task
    engine: Engine
    context: RolloutContext
    team: Team
    plan: Plan
    optimization: Optimization

    def load(self, folder_of: Callable[[str], Path]) -> Team:
        """Load stored weights into every agent and return the resulting team."""
        for name in self.team.names:
            self.engine.learner(name).load(folder_of(name))
        return self.current_team()

    def breaches(self) -> dict[str, int]:
        """How often messages violated the team's protocol so far, by reason. Agents of one model share a codec."""
        protocols = [c.sharing for c in self.context.codecs.values() if isinstance(c, ChatCodec)]
        counters = {id(p): p.breaches for p in protocols if isinstance(p, MessageFilter)}
        return dict(sum(counters.values(), Counter[str]()))

    def current_team(self) -> Team:
        team = self.team
        for name in team.names:
            team = team.replace(name, self.engine.version(name))
        return team

    def precisions(self) -> dict[str, str]:
        """The precision in which each agent is scored and trained."""
        return {name: self.engine.info(name).precision for name in self.team.names}

    def settle_precisions(self, settled: Mapping[str, str]) -> tuple[str, ...]:
        """Restore the precisions that "auto" chose when the run began; on a CPU, "auto" stays float32 whatever a GPU
        had chosen. Returns messages about precisions that differ."""
        told = []
        for name, precision in settled.items():
            info = self.engine.info(name)
            if self.team_file.learner.precision != "auto" or info.device != "cpu":
                self.engine.set_precision(name, precision)
            elif precision != info.precision:
                told.append(f"agent {name}: computed in {info.precision} on this device, was {precision}")
        return tuple(told)

    def references(self) -> dict[str, str]:
        """The version of each agent's reference policy, for agents that have one."""
        versions = {name: self.engine.info(name).reference_version for name in self.team.names}
        return {name: version for name, version in versions.items() if version is not None}


@dataclass(frozen=True)
class Parts:
    """Objects of a Python program that replace what the team file describes; None keeps the file's.

    ``make_engine`` decides where models are and how they are loaded.
    """

    task: Task | None = None
    plan: Plan | None = None
    router: Router | None = None
    make_engine: EngineMaker = engine_of

    def again(self) -> Parts:
        """The parts for an engine that replaces a lost one."""
        return replace(self, make_engine=partial(engine_of, again=True)) if self.make_engine is engine_of else self


AS_WRITTEN = Parts()


def build(team_file: TeamFile, *, taught: bool = True, parts: Parts = AS_WRITTEN) -> Session:
    """Load models, check templates, and assemble the team.

    ``taught=False``: built-in models are not trained on the form of messages, because their weights are loaded from a
    commit afterwards or do not matter. Reference policies are only correct with ``taught=True``.
    """
    _require_parts(team_file, parts)
    with _nothing_collected():
        task = build_task(team_file) if parts.task is None else parts.task
        plan = team_file.sized_plan() if parts.plan is None else parts.plan
        player = team_file.task.wanted_player
        with working("loading models"):
            models = parts.make_engine(team_file, task, plan, player, taught=taught)
    engine, codecs = models.engine, models.codecs
    team = Team(
        tuple(
            Agent(
                name=agent.name,
                version=engine.version(agent.name),
                system_prompt=agent.system_prompt,
                sees=visibility(agent.sees),
                max_tokens=agent.max_tokens,
                frozen=agent.frozen,
                tools=agent.own_tools,
            )
            for agent in team_file.team.agents
        )
    )
    if player is not None:
        task.player = make_player(player, engine, codecs)
    router = build_router(team_file) if parts.router is None else parts.router
    tools = build_tools(team_file, task)
    if any(agent.tools for agent in team):
        check_names(team, tools, some_problems(task))
    context = RolloutContext(
        sampler=engine,
        codecs={name: codecs[name] for name in team.names},
        router=router if tools is None else with_tool_turns(router, team, team_file.tools.steps),
        task=task,
        tools=tools,
        tell=team_file.tools.tell,
        answer=team_file.team.answer,
        history=team_file.team.history,
    )
    check_prompts(context, team)
    settings = team_file.learner
    optimization = Optimization(
        learning_rate=settings.learning_rate,
        value_learning_rate=settings.value_learning_rate,
        epochs=settings.epochs,
        minibatches=settings.minibatches,
        confidence=settings.confidence,
        max_backtracks=settings.max_backtracks,
        gate_share=settings.gate_share,
        certify_share=settings.certify_share,
        cross_fit=settings.cross_fit,
        score=settings.score,
    )
    return Session(team_file, task, engine, context, team, plan, optimization)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable garbage collection: a million objects of libraries, rows and modules are created within and stay, and the
    collector would traverse them repeatedly."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _require_parts(team_file: TeamFile, parts: Parts) -> None:
    """Refuses a run that was made with Python objects if they are missing: nothing replaces them."""
    given = {"task": parts.task, "router": parts.router, "advantage": parts.plan}
    missing = [f"{name} ({said})" for name, said in team_file.python.items() if given.get(name, parts) is None]
    if missing:
        raise UserError(
            f"this team was made by a Python program with {', '.join(missing)}, which a team file cannot hold: resume "
            "it with teamtr.TeamTrainer and the same objects"
        )


def build_router(team_file: TeamFile) -> Router:
    """The router that the file describes; a user-defined class is called with the names of the agents."""
    team, settings = team_file.team, team_file.team.router
    if not settings.is_own:
        return settings.made(team.names)
    router = make_own(settings.kind, settings.options, team.names, what="team.router")
    if not isinstance(router, Router):
        needed = ", ".join(part for part in ("next", "turns_of", "horizon", "rounds") if not hasattr(router, part))
        raise UserError(f"{settings.kind}: what it makes has no {needed}; see teamtr.team.Router and docs/teams.md")
    if team.answer in team.names and not router.turns_of(team.answer):
        raise UserError(f"team.answer names {team.answer!r}, who never speaks under the router {settings.kind}")
    return router
