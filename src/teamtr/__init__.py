"""TeamTR: fine-tune teams of language models, one agent at a time, inside a KL trust region.

    from teamtr import Agent, Plan, TeamTrainer

Names are imported on first access, so that ``import teamtr`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from teamtr.version import __version__

_FROM = {
    "Advantages": "teamtr.theory.advantages",
    "Agent": "teamtr.api.agents",
    "Callback": "teamtr.api.callbacks",
    "CriticAdvantage": "teamtr.theory.estimators",
    "GroupAdvantage": "teamtr.theory.estimators",
    "LoraConfig": "teamtr.config",
    "Objective": "teamtr.theory.objective",
    "PRESETS": "teamtr.presets",
    "Plan": "teamtr.presets",
    "Problem": "teamtr.types",
    "Router": "teamtr.team",
    "Schedule": "teamtr.team",
    "Task": "teamtr.tasks",
    "TeamTrainer": "teamtr.api.trainer",
    "Turn": "teamtr.types",
    "UserError": "teamtr.errors",
    "Verdict": "teamtr.types",
    "load_team_file": "teamtr.config",
    "task": "teamtr.tasks",
    "train": "teamtr.session.train",
}

__all__ = ["__version__", *_FROM]

if TYPE_CHECKING:
    from teamtr.api.agents import Agent as Agent
    from teamtr.api.callbacks import Callback as Callback
    from teamtr.api.trainer import TeamTrainer as TeamTrainer
    from teamtr.config import LoraConfig as LoraConfig
    from teamtr.config import load_team_file as load_team_file
    from teamtr.errors import UserError as UserError
    from teamtr.presets import PRESETS as PRESETS
    from teamtr.presets import Plan as Plan
    from teamtr.session.train import train as train
    from teamtr.tasks import Task as Task
    from teamtr.tasks import task as task
    from teamtr.team import Router as Router
    from teamtr.team import Schedule as Schedule
    from teamtr.theory.advantages import Advantages as Advantages
    from teamtr.theory.estimators import CriticAdvantage as CriticAdvantage
    from teamtr.theory.estimators import GroupAdvantage as GroupAdvantage
    from teamtr.theory.objective import Objective as Objective
    from teamtr.types import Problem as Problem
    from teamtr.types import Turn as Turn
    from teamtr.types import Verdict as Verdict


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'teamtr' has no attribute {name!r}")
    value = getattr(importlib.import_module(_FROM[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
