"""The team: its agents, routers (who speaks when), visibility (who sees what), and how its answer is chosen."""

from teamtr.team.answer import team_answer
from teamtr.team.router import Addressed, Router, Schedule, Upcoming
from teamtr.team.team import Agent, Team, visible
from teamtr.team.tool_turns import ToolTurns
from teamtr.team.visibility import Blind, Each, Everything, Only, Visibility, visibility

__all__ = [
    "Addressed",
    "Agent",
    "Blind",
    "Each",
    "Everything",
    "Only",
    "Router",
    "Schedule",
    "Team",
    "ToolTurns",
    "Upcoming",
    "Visibility",
    "team_answer",
    "visibility",
    "visible",
]
