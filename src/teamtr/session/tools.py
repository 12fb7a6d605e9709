"""What the agents of a team file can call: the tools of its task, its own functions, and servers, within its limits."""

from __future__ import annotations

from collections.abc import Sequence

from teamtr.calls import TOOL, name_of
from teamtr.chat import ChatCodec
from teamtr.chat.template import check_tools
from teamtr.config import TeamFile
from teamtr.errors import UserError
from teamtr.ports import Task as AnyTask
from teamtr.ports import Tools
from teamtr.rollout import RolloutContext
from teamtr.tasks import Task
from teamtr.team import Router, Team, ToolTurns
from teamtr.tools.functions import FunctionTools
from teamtr.tools.limits import Limited, Together
from teamtr.tools.mcp import McpTools, Server
from teamtr.types import Problem

PROBLEMS_LOOKED_AT = 64
"""Whose tools are known before a run: names in the team file must be among them."""


def build_tools(team_file: TeamFile, task: Task) -> Tools | None:
    """All of them as one; None where there are none."""
    settings = team_file.tools
    parts: list[Tools] = [] if task.tools is None else [task.tools]
    if settings.use:
        parts.append(
            FunctionTools(
                settings.use, seconds=settings.seconds, memory_mb=settings.memory_mb, workers=settings.workers
            )
        )
    for server in settings.mcp:
        started = Server(server.name, server.command, server.args, server.env)
        parts.append(McpTools(started, seconds=10 * settings.seconds))
    if not parts:
        return None
    return Limited(parts[0] if len(parts) == 1 else Together(tuple(parts)), settings.max_characters)


def with_tool_turns(router: Router, team: Team, steps: int) -> ToolTurns:
    """The router of a team with tools: whoever has called one speaks again."""
    if TOOL in team.names:
        raise UserError(f"an agent is called {TOOL!r}, as the results of tools are: call it otherwise")
    return ToolTurns(router, steps, tuple(agent.name for agent in team if agent.tools != ()))


def check_prompts(context: RolloutContext, team: Team) -> None:
    """Raises ProtocolError where an agent's chat template cannot tell it of its tools."""
    problems = some_problems(context.task) if context.tell and context.tools is not None else ()
    for agent in team if problems else ():
        codec, tools = context.codecs[agent.name], context.offered(agent, problems[0])
        if tools and isinstance(codec, ChatCodec):
            check_tools(codec, context.history, tools)


def some_problems(task: AnyTask) -> Sequence[Problem]:
    """Of the first split that has any."""
    for split in ("train", "test"):
        try:
            found = task.problems(split)[:PROBLEMS_LOOKED_AT]
        except UserError:  # a task may have one of them only
            continue
        if found:
            return found
    return ()


def check_names(team: Team, tools: Tools | None, task: Task) -> None:
    """Raises UserError where an agent is given a tool that no problem has."""
    if not any(agent.tools for agent in team):
        return
    looked_at = some_problems(task)
    known = {name_of(schema) for problem in looked_at for schema in tools.schemas(problem)} if tools else set()
    for agent in team:
        if unknown := [name for name in agent.tools or () if name not in known]:
            there = f"there are {', '.join(sorted(known))}" if known else "there are none; see tools in docs/tools.md"
            raise UserError(f"team.agents.{agent.name}.tools names no tool {unknown[0]!r}; {there}")
