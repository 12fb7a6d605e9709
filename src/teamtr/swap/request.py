"""The request of a swap, and the team file that results from it."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from teamtr.chat.message_filter import ToolPolicy
from teamtr.chat.systems import SystemPolicy
from teamtr.chat.thinking import ThinkPolicy
from teamtr.config import AgentConfig, TeamFile, dump, loads
from teamtr.errors import UserError
from teamtr.session.export import agent_of
from teamtr.session.models import base_model, require_source, save_pretrained
from teamtr.session.task import build_task
from teamtr.settings.paths import BUILT_IN_MODELS
from teamtr.store.atomic import whole_folder

Mode = Literal["aligned", "direct", "reset"]

_LEAST = {"probes": 2, "batch": 1, "check_every": 1, "max_steps": 1, "doublings": 0}


@dataclass(frozen=True)
class Request:
    """The settings of a swap. ``mode``: "aligned" aligns the new agent first; "direct" installs it unchanged; "reset"
    installs it and restarts all agents from their initial weights.

    ``train`` is "full" or "lora"; None: "full" for built-in models, otherwise "lora". ``stages``: number of stages of
    the new run; None: the plan's remaining stages, or all of them if none remain. ``learning_rate`` None: several
    multiples of the team file's are tried. ``doublings``: how often the probes may be doubled when the student overfits
    them. ``think``, ``tools`` and ``system`` change the team's protocol from the swap on; None leaves each unchanged.
    ``revision`` is that of the model, if it is a hub id.
    """

    agent: str
    model: str
    mode: Mode = "aligned"
    train: Literal["full", "lora"] | None = None
    probes: int = 500
    held_out: float = 0.2
    learning_rate: float | None = None
    batch: int = 64
    check_every: int = 25
    max_steps: int = 2000
    doublings: int = 5
    stages: int | None = None
    eval_problems: int | None = None
    eval_samples: int | None = None
    think: ThinkPolicy | None = None
    tools: ToolPolicy | None = None
    system: SystemPolicy | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise UserError(f"--learning-rate is a finite number above 0, not {rate}; without it several are tried")
        if not 0 < self.held_out < 1:
            raise UserError(f"--held-out is a share strictly between 0 and 1, not {self.held_out}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UserError(f"--{name.replace('_', '-')} is at least {least}, not {getattr(self, name)}")

    @property
    def protocol(self) -> dict[str, str]:
        """The protocol settings that change."""
        switches = {"think": self.think, "tools": self.tools, "system": self.system}
        return {name: value for name, value in switches.items() if value is not None}

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def new_team_file(team_file: TeamFile, request: Request, *, next_stage: int, models: Path) -> TeamFile:
    """The team file of the run after the swap: another model for one agent, the protocol, and the remaining stages.

    Adapters of kept agents on the built-in model use a base that is trained on the examples of all agents that share
    it. Without one of them that base would differ, so it is written to ``models`` and the team file points there. The
    same holds for the initial weights of fully trained agents if the plan has a reference KL.
    """
    agent_of(team_file, request.agent)
    model = _absolute(request.model)
    train = request.train or ("full" if model in BUILT_IN_MODELS else "lora")
    has_reference = team_file.plan.plan().objective.has_reference
    agents = []
    for config in team_file.team.agents:
        if config.name == request.agent:
            lora = team_file.team.lora if train == "full" else config.lora
            lora = lora.model_copy(update={"start": None})  # it belonged to the old model
            changes = {"model": model, "revision": request.revision, "train": train, "lora": lora}
            agents.append(config.model_copy(update=changes))
        elif config.model == "tiny" and (config.train == "lora" or has_reference):
            agents.append(config.model_copy(update={"model": _keep_base(team_file, config, models)}))
        else:
            agents.append(config)
    protocol = team_file.team.protocol.model_copy(update=request.protocol)
    sized = team_file.sized_plan()  # keep the matched sizes, whatever the new team is
    left = sized.stages - next_stage
    more = request.stages or (left if left > 0 else sized.stages)
    unmatched = {"match": "off", "match_agents": 0, "match_turns": 0, "problems": sized.problems}
    has_adapter = any(agent.train == "lora" for agent in agents)
    learner = team_file.learner if has_adapter else team_file.learner.model_copy(update={"base": "fp32"})
    changed = team_file.model_copy(
        update={
            "learner": learner,
            "team": team_file.team.model_copy(update={"agents": tuple(agents), "protocol": protocol}),
            "plan": team_file.plan.model_copy(update={**unmatched, "stages": next_stage + more}),
        }
    )
    return loads(dump(changed), name="the team after the swap", stored=True)


def require_model(model: str, revision: str | None) -> None:
    """Raise UserError early for a folder that is not a complete model, or an id that the hub does not have."""
    require_source(_absolute(model), revision)


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    looks_like_path = model.startswith((".", "/", "~")) or path.is_dir()
    if looks_like_path and not path.is_dir():
        raise UserError(f"--with {model}: there is no such folder; give a folder, a hub id or tiny")
    return os.path.abspath(path) if looks_like_path else model


def _keep_base(team_file: TeamFile, agent: AgentConfig, models: Path) -> str:
    final = models / "tiny"
    if not final.exists():
        model, tokenizer = base_model(team_file, build_task(team_file), agent)
        with whole_folder(final) as temporary:
            save_pretrained(model, tokenizer, temporary)
    return os.path.abspath(final)
