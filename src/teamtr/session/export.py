"""An agent of a run as a folder that plain transformers or PEFT loads, with a model card.

A whole model leaves as a Hugging Face folder, an adapter as a PEFT folder (or merged into its base). Nothing of the
training leaves with it: no optimizer, no critic, no steering state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr.config import AgentConfig, TeamFile
from teamtr.errors import UserError
from teamtr.records import updates_before
from teamtr.reports import was_kept
from teamtr.session.models import OBJECT, Loader, base_model, quieten, save_pretrained
from teamtr.session.resume import StoredRun
from teamtr.session.task import build_task
from teamtr.store.atomic import whole_folder
from teamtr.tasks import Task
from teamtr.text import share

OURS = ("optimizer.safetensors", "critic.safetensors", "state.json", "manifest.json")
"""What a checkpoint holds besides the model."""
BASE = "base"
"""Where the base of an exported adapter lies when it is nowhere else to be had."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Exported:
    """What was written: ``form`` is "model", "adapter" or "merged"; ``base`` is what an adapter stands on, and
    ``revision`` which one of that hub id."""

    agent: str
    folder: Path
    form: str
    base: str | None = None
    revision: str | None = None


Base = Callable[[AgentConfig], tuple[Any, Any]]
"""Loads (model, tokenizer) that an agent's adapter stands on."""


def export(
    run: Path | str,
    out: Path | str,
    *,
    agent: str | None = None,
    merge: bool = False,
    task: Task | None = None,
    load: Loader | None = None,
) -> list[Exported]:
    """Write one agent of the run's last commit to ``out``, or every agent to a folder of its name below ``out``.

    ``out`` must not exist or be empty; it appears whole or not at all. ``merge`` adds an adapter into its base. A run
    of ``TeamTrainer`` needs its ``task`` and whoever loads its models again.
    """
    stored = StoredRun.read(run)
    source, team_file, commit = stored.folder, stored.team_file, stored.commit
    chosen = [agent_of(team_file, agent)] if agent is not None else list(team_file.team.agents)
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder; export into a new one")
    quieten()
    records = [r for r in source.log.read() if updates_before(r) <= commit.number]  # a run may go on meanwhile
    written = []

    def base(config: AgentConfig) -> tuple[Any, Any]:
        return base_model(team_file, build_task(team_file) if task is None else task, config, load)

    with whole_folder(target) as temporary:
        for config in chosen:
            inside = Path() if agent is not None else Path(config.name)
            folder = temporary / inside
            folder.mkdir(exist_ok=True)
            written.append(
                _export_agent(
                    config, source.checkpoints.folder_of(commit, config.name), folder, target / inside, merge, base
                )
            )
            card = model_card(team_file, config, records, written[-1])
            (folder / "README.md").write_text(card)
    return written


def agent_of(team_file: TeamFile, name: str) -> AgentConfig:
    """The agent of this name, or a UserError that says who there is."""
    for config in team_file.team.agents:
        if config.name == name:
            return config
    raise UserError(f"no agent {name!r} in this run; it has {', '.join(team_file.team.names)}")


def _export_agent(config: AgentConfig, stored: Path, folder: Path, final: Path, merge: bool, base_of: Base) -> Exported:
    """Fill ``folder``, which will be called ``final``."""
    if config.model == "tabular":
        raise UserError(f"agent {config.name!r} is a table, not a transformer; there is no other form to export it in")
    if config.train == "full":
        if merge:
            raise UserError(f"agent {config.name!r} is a whole model already; --merge is for adapters")
        _copy(stored, folder)
        return Exported(config.name, final, "model")
    if merge:
        from peft import PeftModel

        model, tokenizer = base_of(config)
        save_pretrained(PeftModel.from_pretrained(model, stored).merge_and_unload(), tokenizer, folder)
        return Exported(config.name, final, "merged", *config.source)
    _copy(stored, folder)
    base = config.model
    if config.model == "tiny" or config.model.startswith(OBJECT):
        model, tokenizer = base_of(config)
        save_pretrained(model, tokenizer, folder / BASE)
        base = str((final / BASE).absolute())
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"], settings["revision"] = base, config.revision
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return Exported(config.name, final, "adapter", base, config.revision)


def _copy(stored: Path, folder: Path) -> None:
    for file in stored.iterdir():
        if file.name not in OURS:
            shutil.copy2(file, folder / file.name)


# -- the model card -------------------------------------------------------------------------------------------


def model_card(team_file: TeamFile, config: AgentConfig, records: Sequence[Record], exported: Exported) -> str:
    """Base, task, team, radius and figures from the log, as a README with the hub's header."""
    plan = team_file.plan.plan()
    unit = "token" if plan.radii.per_token else "message"
    title = f"{config.name} of {team_file.name}"
    base = "the built-in tiny model" if config.model == "tiny" else config.model
    if config.revision is not None:
        base += f", revision {config.revision}"
    if config.model.startswith(OBJECT):
        base = f"a model of a Python program, {config.model}"
    lines = [
        *_header(config, exported),
        f"# {title}",
        "",
        f"One agent of a team that was trained with TeamTR: `{config.name}` {_speaks(team_file)}.",
        "",
        "| | |",
        "|---|---|",
        f"| base | {base} ({'all weights trained' if config.train == 'full' else 'LoRA'}) |",
        f"| form of this folder | {_FORMS[exported.form]} |",
        f"| task | {team_file.python.get('task', team_file.task.name)} |",
        f"| team | {', '.join(f'{a.name} ({a.model}, {a.train})' for a in team_file.team.agents)} |",
        f"| plan | {team_file.plan.preset}, seed {team_file.seed} |",
        f"| radius | {plan.radii.nats:g} nats per {unit} |",
        *_figures(config.name, records),
        "",
        "## Loading",
        "",
        "```python",
        *_loading(exported),
        "```",
        "",
        "The agent expects the team's chat protocol"
        + (f" and this system prompt: {config.system_prompt!r}." if config.system_prompt else " and no system prompt.")
        + " Alone, outside of its team, it was never measured.",
        "",
    ]
    return "\n".join(lines)


_FORMS = {
    "model": "Hugging Face model",
    "adapter": "PEFT adapter",
    "merged": "Hugging Face model, the adapter merged into its base",
}


def _speaks(team_file: TeamFile) -> str:
    team = team_file.team
    if own := team_file.python.get("router"):
        return f"speaks when {own} says"
    names = [f"`{name}`" for name in team.speaking_order]
    if team.router.kind == "schedule":
        return f"speaks in the order {' → '.join(names)}"
    return f"speaks among {', '.join(names)}, and what was said decides who is next"


def _header(config: AgentConfig, exported: Exported) -> list[str]:
    library = "peft" if exported.form == "adapter" else "transformers"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation", "tags: [teamtr]"]
    own = config.model == "tiny" or config.model.startswith(OBJECT)
    on_hub = not own and not Path(config.model).is_absolute()
    return [*lines, *([f"base_model: {json.dumps(config.model)}"] if on_hub else []), "---", ""]


def _figures(agent: str, records: Sequence[Record]) -> list[str]:
    """Rows of the card: what the log says of this agent's updates and of the team's success, since this agent is in it.

    A log goes on over a swap. What stands before it was done by and to the model that was replaced; before a reset, by
    and to the whole team of then.
    """
    place, began = _beginning(agent, records)
    since = records[place:]
    own = [r for r in since if r["kind"] == "update" and r["agent"] == agent]
    kept = [r for r in own if was_kept(r["outcome"])]
    rows = [f"| updates of this agent, since {began} | {len(kept)} kept of {len(own)} |"]
    if kept:
        rows.append(f"| KL of the kept updates | mean {sum(r['kl_full'] for r in kept) / len(kept):.2g} nats |")
    swaps = [r for r in records if r["kind"] == "swap" and r["agent"] == agent]
    rows += [_swapped(r) for r in swaps[-1:]]
    evals = [r for r in since if r["kind"] == "eval"]
    for when, record in (("first", evals[0]), ("last", evals[-1])) if evals else ():
        rows.append(
            f"| held-out success of the team, {when} since {began} | "
            f"{share(record['avg_at_k'], record['avg_interval'])}, {record['problems']} problems x "
            f"{record['samples']}, after {record['updates']} updates |"
        )
    return rows


def _beginning(agent: str, records: Sequence[Record]) -> tuple[int, str]:
    """From which record on the log is about this agent's weights, and what happened there."""
    for place, record in reversed(list(enumerate(records))):
        if record["kind"] == "swap" and record["agent"] == agent:
            return place + 1, f"it joined after {_stages(record)}"
        if record["kind"] == "swap" and record["mode"] == "reset":
            return place + 1, f"the team began anew after {_stages(record)}"
    return 0, "the run began"


def _stages(record: Record) -> str:
    return "1 stage" if record["stage"] == 1 else f"{record['stage']} stages"


def _swapped(record: Record) -> str:
    success, intervals = record["success"], record["intervals"]
    installed = "after" if "after" in success else "at_swap"
    before, now = (share(success[when], intervals[when]) for when in ("before", installed))
    return (
        f"| swapped in | after {record['updates']} updates of the team, {record['mode']}; not certified; held-out "
        f"success of the team {before} before, {now} as installed |"
    )


def _loading(exported: Exported) -> list[str]:
    if exported.form != "adapter":
        return [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
        ]
    own_base = exported.base is not None and Path(exported.base).name == BASE and Path(exported.base).is_absolute()
    base = f"THIS_FOLDER/{BASE}" if own_base else exported.base
    revision = "" if exported.revision is None else f', revision="{exported.revision}"'
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base}"{revision})',
        'model = PeftModel.from_pretrained(base, "THIS_FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
    ]
