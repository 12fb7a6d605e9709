"""Exports agents of a run as folders for transformers, PEFT or vLLM, each with a model card.

A whole model is exported as a Hugging Face folder, an adapter as a PEFT folder (or merged into its base). Whole models
have the precision of the file that they came from. No training state is exported: no optimizer, no critic, no
controller state (beta, step scale, radius).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from teamtr.config import AgentConfig, TeamFile
from teamtr.errors import UserError
from teamtr.records import updates_before
from teamtr.session.cards import model_card, team_card
from teamtr.session.exported import Exported
from teamtr.session.models import (
    OBJECT,
    Loader,
    base_model,
    copy_checkpoint,
    load_pretrained,
    quieten,
    save_pretrained,
)
from teamtr.session.resume import StoredRun
from teamtr.session.task import build_task
from teamtr.store.atomic import whole_folder
from teamtr.tasks import Task

OURS = ("optimizer.safetensors", "critic.safetensors", "state.json", "manifest.json")
"""Files of a checkpoint that are not part of the model."""
BASE = "base"
"""Folder for the base of exported adapters if it is not available elsewhere."""

Form = Literal["trained", "adapter", "merged", "gguf"]
"""``trained``: as it was trained; ``adapter``: as an adapter, refused for whole models; ``merged``: as a whole model,
with adapters merged into their base; ``gguf``: the same in half precision, for llama.cpp's converter."""

Base = Callable[[AgentConfig], tuple[Any, Any]]
"""Loads the (model, tokenizer) to which an agent's adapter belongs."""


def export(
    run: Path | str,
    out: Path | str,
    *,
    agent: str | None = None,
    form: Form = "trained",
    task: Task | None = None,
    load: Loader | None = None,
    checkpoint: int | Literal["best"] | None = None,
) -> list[Exported]:
    """Write one agent of the run's last commit, or of the given ``checkpoint``, to ``out``; or write every agent to a
    folder of its name in ``out``, with a card of the team.

    ``out`` must not exist or be empty; it is written completely or not at all. A run of ``TeamTrainer`` needs its
    ``task`` and the function that loads its models.
    """
    stored = StoredRun.read(run, checkpoint)
    source, team_file, commit = stored.folder, stored.team_file, stored.commit
    chosen = [agent_of(team_file, agent)] if agent is not None else list(team_file.team.agents)
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder; export into a new one")
    quieten()
    records = [r for r in source.log.read() if updates_before(r) <= commit.number]  # the run may be training meanwhile
    written = []

    def load_base(config: AgentConfig) -> tuple[Any, Any]:
        return base_model(team_file, build_task(team_file) if task is None else task, config, load)

    with whole_folder(target) as temporary:
        bases = _Bases(temporary, target, team_file.team.names, load_base)
        for config in chosen:
            inside = Path() if agent is not None else Path(config.name)
            folder = temporary / inside
            folder.mkdir(exist_ok=True)
            saved = source.checkpoints.folder_of(commit, config.name)
            each = _export_agent(config, saved, folder, target / inside, form, bases)
            written.append(replace(each, precision=_precision_of(folder)))
            card = model_card(team_file, config, records, written[-1])
            (folder / "README.md").write_text(card, encoding="utf-8")
        if agent is None:
            (temporary / "README.md").write_text(team_card(team_file, records, written, target), encoding="utf-8")
    return written


def agent_of(team_file: TeamFile, name: str) -> AgentConfig:
    """The agent of this name. Raises a UserError that lists the agents if there is none."""
    for config in team_file.team.agents:
        if config.name == name:
            return config
    raise UserError(f"no agent {name!r} in this run; it has {', '.join(team_file.team.names)}")


@dataclass
class _Bases:
    """The base models of adapters. A base that is not available elsewhere is written next to the adapters, once."""

    temporary: Path
    final: Path
    taken: tuple[str, ...]
    load: Base
    written: dict[str, str] = field(default_factory=dict)

    def place_of(self, config: AgentConfig) -> str:
        """Where the base of this agent's adapter is found."""
        if config.model != "tiny" and not config.model.startswith(OBJECT):
            return config.model
        if config.model not in self.written:
            names = (f"{BASE}{k or ''}" for k in itertools.count())
            name = next(n for n in names if n not in self.taken and not (self.temporary / n).exists())
            save_pretrained(*self.load(config), self.temporary / name)
            self.written[config.model] = str((self.final / name).absolute())
        return self.written[config.model]


def _export_agent(config: AgentConfig, stored: Path, folder: Path, final: Path, form: Form, bases: _Bases) -> Exported:
    """Fill ``folder``, which is later renamed to ``final``."""
    if config.model == "tabular":
        raise UserError(f"agent {config.name!r} is a table, not a transformer; there is no other form to export it in")
    if config.train == "full":
        if form == "adapter":
            raise UserError(
                f"agent {config.name!r} is a whole model, and no adapter can be taken out of it: leave out --adapter"
            )
        if form == "gguf":
            save_pretrained(*_halved(*load_pretrained(str(stored))), folder)
            return Exported(config.name, final, "gguf")
        copy_checkpoint(stored, folder, OURS)
        return Exported(config.name, final, "model")
    if form in ("merged", "gguf"):
        from peft import PeftModel

        model, tokenizer = bases.load(config)
        merged = PeftModel.from_pretrained(model, stored).merge_and_unload(), tokenizer
        if form == "gguf":
            save_pretrained(*_halved(*merged), folder)
            return Exported(config.name, final, "gguf", *config.source)
        save_pretrained(*merged, folder)
        return Exported(config.name, final, "merged", *config.source)
    copy_checkpoint(stored, folder, OURS)
    base = bases.place_of(config)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"], settings["revision"] = base, config.revision
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return Exported(config.name, final, "adapter", base, config.revision, int(settings["r"]))


def _precision_of(folder: Path) -> str:
    """The precision in config.json; float32 for adapters, which have none."""
    config = folder / "config.json"
    return str(json.loads(config.read_text()).get("dtype", "float32")) if config.exists() else "float32"


def _halved(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The model in bf16, which has float32's range, so that nothing becomes infinite."""
    import torch

    return model.to(torch.bfloat16), tokenizer
