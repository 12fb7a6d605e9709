"""The team and its router."""

from teamtr.team.router import Router, team_answer, visible
from teamtr.team.team import Agent, Team

__all__ = ["Agent", "Router", "Team", "team_answer", "visible"]
