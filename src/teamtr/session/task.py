"""Builds the task of a team file."""

from __future__ import annotations

from teamtr.config import TeamFile
from teamtr.tasks import Task, TaskContext, registry


def build_task(team_file: TeamFile) -> Task:
    """Build the task that the file names."""
    return registry.build_task(team_file.task, TaskContext(team_file.seed, team_file.team.names, team_file.team.rounds))
