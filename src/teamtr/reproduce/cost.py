"""The estimated cost of a recipe before anything is trained: runs, rollouts, tokens and GPU hours.

Tokens are an upper bound: every message is counted at its maximum length, and a plan that decides when to sample as one
that samples before every update. Groups that dynamic sampling replaces are not counted. Hours are extrapolated from one
H200 with a model of 1.7 billion parameters (docs/performance.md), in proportion to parameters. Attention over long
contexts, which grows faster, is left out, and so is the time for loading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from teamtr.config import TeamFile
from teamtr.presets import DynamicSampling
from teamtr.reproduce.recipe import Recipe, Variant
from teamtr.reproduce.scales import Setting
from teamtr.reproduce.teams import cells_of

MEASURED_BILLIONS = 1.7
SAMPLED_PER_SECOND = 37_000.0
"""Tokens per second, in a stage of three agents with messages of 256 tokens."""
TRAINED_PER_SECOND = 49_900.0
"""Tokens of contexts and messages per second, in an update with its measurements."""
PROMPT_TOKENS = 256
"""Assumed length of a problem with its instructions."""
TINY_PROBLEMS = 16
"""Number of held-out problems if the team file does not give it: all that the small games have."""
_BILLIONS = re.compile(r"(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Estimate:
    """The cost of all runs together. ``hours`` of one H200 are None if the size of the model is unknown, and for tiny
    models, which need no card."""

    runs: int
    updates: int
    rollouts: int
    evaluated: int
    tokens: int
    hours: float | None


def estimate(recipe: Recipe, setting: Setting) -> Estimate:
    swapped = Variant("swapped", (f"plan.stages={setting.stages_after}",))
    files = [
        cell.team_file if cell.team_file is not None else setting.team_file(recipe, swapped, cell.seed)
        for cell in cells_of(recipe, setting, Path())
    ]
    methods = [cell.method for cell in cells_of(recipe, setting, Path())]
    parts = [_of_run(file) if method is None else _of_method(file) for file, method in zip(files, methods, strict=True)]
    hours = [part.hours for part in parts]
    return Estimate(
        runs=len(files),
        updates=sum(part.updates for part in parts),
        rollouts=sum(part.rollouts for part in parts),
        evaluated=sum(part.evaluated for part in parts),
        tokens=sum(part.tokens for part in parts),
        hours=None if None in hours else sum(hour for hour in hours if hour is not None),
    )


def _of_run(file: TeamFile) -> Estimate:
    plan, agents, trained_agents = file.sized_plan(), file.team.agents, file.size().agents
    samples = file.eval.samples or 1
    lengths = [agent.max_tokens or file.team.max_tokens for agent in agents] * (file.team.rounds or 1)
    planned = replace(plan, dynamic_sampling=DynamicSampling()).batches(trained_agents)
    samplings = trained_agents if planned is None else planned  # if it is decided during the run: before every update
    rollouts = plan.stages * samplings * plan.problems * plan.group_size
    if file.diagnostics.every:  # probes also play the problems at the start of a stage and before each later update
        rollouts += math.ceil(plan.stages / file.diagnostics.every) * trained_agents * plan.problems * plan.group_size
    looks = 0 if file.eval.every == 0 else 1 + math.ceil(plan.stages / file.eval.every)
    evaluated = looks * (file.eval.problems or TINY_PROBLEMS) * samples
    tokens = (rollouts + evaluated) * sum(lengths)
    learning = [k for k in range(len(lengths)) if not agents[k % len(agents)].frozen]
    context = sum(PROMPT_TOKENS + sum(lengths[: k + 1]) for k in learning)
    trained = plan.stages * plan.problems * plan.group_size * context * file.learner.epochs
    billions = [_billions(agent.model or file.team.model or "") for agent in agents]
    hours = None
    if None not in billions:
        size = sum(b for b in billions if b is not None) / len(billions) / MEASURED_BILLIONS
        hours = size * (tokens / SAMPLED_PER_SECOND + trained / TRAINED_PER_SECOND) / 3600.0
    return Estimate(1, plan.stages * trained_agents, rollouts, evaluated, tokens, hours)


def _of_method(file: TeamFile) -> Estimate:
    """Nothing is trained, and there is one evaluation. The number of messages depends on the method, so it is counted
    as that of the team."""
    answered = _of_run(file)
    evaluated = (file.eval.problems or TINY_PROBLEMS) * (file.eval.samples or 1)
    tokens = evaluated * answered.tokens // max(1, answered.rollouts + answered.evaluated)
    hours = None if answered.hours is None else answered.hours * tokens / answered.tokens
    return Estimate(1, 0, 0, evaluated, tokens, hours)


def _billions(model: str) -> float | None:
    """Billions of parameters, from the weights in a folder (two bytes each) or from the name in a hub id."""
    weights: Sequence[Path] = list(Path(model).glob("*.safetensors")) if model and Path(model).is_dir() else []
    if weights:
        return sum(file.stat().st_size for file in weights) / 2e9
    found = _BILLIONS.findall(model.rsplit("/", 1)[-1])
    return float(found[-1]) if found else None
