"""Builds the tools of a team file: those of its task, user functions and MCP servers, within its limits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from teamtr.calls import TOOL, name_of
from teamtr.chat import ChatCodec
from teamtr.chat.template import check_tools
from teamtr.config import TeamFile
from teamtr.errors import UserError
from teamtr.ports import Task, Tools
from teamtr.rollout import RolloutContext
from teamtr.team import Router, Team, ToolTurns
from teamtr.tools.functions import FunctionTools
from teamtr.tools.limits import Limited, Together
from teamtr.tools.mcp import McpTools, Server
from teamtr.types import Problem

PROBLEMS_LOOKED_AT = 64
"""Problems whose tools are listed before a run: names in the team file must be among them."""


def build_tools(team_file: TeamFile, task: Task) -> Tools | None:
    """All tools as one; None if there are none."""
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
    """The router of a team with tools: an agent that has called a tool speaks again."""
    if TOOL in team.names:
        raise UserError(f"an agent is called {TOOL!r}, as the results of tools are: call it otherwise")
    return ToolTurns(router, steps, tuple(agent.name for agent in team if agent.tools != ()))


def some_problems(task: Task) -> Sequence[Problem]:
    """The training problems, or the test problems if a task has no others."""
    for split in ("train", "test"):
        with suppress(UserError):  # there is no such split
            if found := task.problems(split):
                return found
    return ()


def check_prompts(context: RolloutContext, team: Team) -> None:
    """Raises ProtocolError if an agent's chat template cannot describe its tools."""
    problems = some_problems(context.task) if context.tell and context.tools is not None else ()
    for agent in team if problems else ():
        codec, tools = context.codecs[agent.name], context.offered(agent, problems[0])
        if tools and isinstance(codec, ChatCodec):
            check_tools(codec, context.history, tools)


def check_names(team: Team, tools: Tools | None, problems: Sequence[Problem]) -> None:
    """Raises UserError if an agent is given a tool that no problem has."""
    asked = {name for agent in team for name in agent.tools or ()}
    if not asked:
        return
    looked_at = problems[:PROBLEMS_LOOKED_AT]
    known = {name_of(schema) for problem in looked_at for schema in tools.schemas(problem)} if tools else set()
    for agent in team:
        if unknown := [name for name in agent.tools or () if name not in known]:
            there = f"there are {', '.join(sorted(known))}" if known else "there are none; see tools in docs/tools.md"
            raise UserError(f"team.agents.{agent.name}.tools names no tool {unknown[0]!r}; {there}")
