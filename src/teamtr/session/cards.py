"""Model cards of exported agents and teams."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from teamtr.config import AgentConfig, TeamFile
from teamtr.reports import was_kept
from teamtr.session.exported import Exported, vllm_lines
from teamtr.session.models import OBJECT
from teamtr.text import share

Record = Mapping[str, Any]


def model_card(team_file: TeamFile, config: AgentConfig, records: Sequence[Record], exported: Exported) -> str:
    """An agent's card as a README with the hub's header: base, task, team, radius and figures from the log."""
    lines = [
        *_header(config, exported),
        f"# {config.name} of {team_file.name}",
        "",
        f"One agent of a team that was trained with TeamTR: `{config.name}` {_speaks(team_file)}.",
        "",
        "| | |",
        "|---|---|",
        f"| base | {_base(config)} ({'all weights trained' if config.train == 'full' else 'LoRA'}) |",
        f"| form of this folder | {_FORMS[exported.form]}, weights in {exported.precision} |",
        *_about(team_file),
        *_warmup(config.name, records),
        *_figures(config.name, records),
        "",
        "## Loading",
        "",
        "```python",
        *_loading(exported),
        "```",
        "",
        "The agent expects the team's chat protocol"
        + (f" and this system prompt: {config.system_prompt!r}." if config.system_prompt else " and no system prompt."),
        "",
        *(_CONVERTING if exported.form == "gguf" else ()),
        *_limits(team_file, records),
    ]
    return "\n".join(lines)


_FORMS = {
    "model": "Hugging Face model",
    "adapter": "PEFT adapter",
    "merged": "Hugging Face model, the adapter merged into its base",
    "gguf": "Hugging Face model for llama.cpp to convert",
}
_CONVERTING = (
    "## llama.cpp",
    "",
    "```",
    "python convert_hf_to_gguf.py THIS_FOLDER --outfile model.gguf --outtype bf16",
    "```",
    "",
)


def team_card(team_file: TeamFile, records: Sequence[Record], exported: Sequence[Exported], folder: Path) -> str:
    """The card of a team in one folder: its agents, plan and figures, and how to serve it."""
    lines = [
        *("---", "tags: [teamtr]", "---", ""),
        f"# {team_file.name}",
        "",
        f"A team of language models that was trained together with TeamTR; it {_speaks(team_file)}.",
        "",
        "| agent | folder | form | base | updates kept |",
        "|---|---|---|---|---|",
        *(_row(config, each, records) for config, each in zip(team_file.team.agents, exported, strict=True)),
        "",
        "| | |",
        "|---|---|",
        *_about(team_file),
        *_successes(records, "the run began"),
        "",
        "## Serving",
        "",
        "Each agent under its own name, from this folder, with vLLM:",
        "",
        "```",
        *vllm_lines(exported, folder),
        "```",
        "",
        "The team as one model, routed as it was trained: `teamtr serve RUN`, with the run that it was exported from.",
        "",
        *_limits(team_file, records),
    ]
    return "\n".join(lines)


def _row(config: AgentConfig, exported: Exported, records: Sequence[Record]) -> str:
    own = [r for r in records if r["kind"] == "update" and r["agent"] == config.name]
    kept = sum(was_kept(r["outcome"]) for r in own)
    base = _base(config)
    return f"| {config.name} | `{exported.folder.name}` | {_FORMS[exported.form]} | {base} | {kept} of {len(own)} |"


def _base(config: AgentConfig) -> str:
    if config.model == "tiny":
        return "the built-in tiny model"
    if config.model.startswith(OBJECT):
        return f"a model of a Python program, {config.model}"
    return config.model if config.revision is None else f"{config.model}, revision {config.revision}"


def _about(team_file: TeamFile) -> list[str]:
    plan = team_file.plan.plan()
    unit = "token" if plan.radii.per_token else "message"
    return [
        f"| task | {team_file.python.get('task', team_file.task.name)} |",
        f"| team | {', '.join(f'{a.name} ({a.model}, {a.train})' for a in team_file.team.agents)} |",
        f"| plan | {team_file.plan.preset}, seed {team_file.seed} |",
        f"| radius | {plan.radii.nats:g} nats per {unit} |",
    ]


def _warmup(agent: str, records: Sequence[Record]) -> list[str]:
    found = [r["warmup"][agent] for r in records if r["kind"] == "start" and agent in (r.get("warmup") or {})]
    return [f"| warm-up | {each['tokens']:,} tokens of examples from {each['source']} |" for each in found]


def _limits(team_file: TeamFile, records: Sequence[Record]) -> list[str]:
    """What the figures do not cover."""
    task = team_file.python.get("task", team_file.task.name)
    measured = any(r["kind"] == "eval" for r in records)
    return [
        "## Limits",
        "",
        f"- Trained to earn the reward of one task, {task}, and "
        + ("measured on held-out problems of it alone." if measured else "never measured on held-out problems."),
        "- An agent alone, outside of its team, was not measured; nor was the team in another order of speakers, at "
        "another temperature, or with other lengths of messages.",
        "- The radius bounds how far one update moves an agent's messages on the problems of training. It says nothing "
        "about what is said on other prompts, and nothing about safety: whatever the base says can still be said.",
        "",
    ]


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
    """Rows of the card: this agent's updates and the team's success according to the log, since this agent joined.

    A log continues across swaps. Records before a swap are about the model that was replaced; records before a reset
    are about the whole previous team.
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
    return [*rows, *_successes(since, began)]


def _successes(records: Sequence[Record], began: str) -> list[str]:
    evals = [r for r in records if r["kind"] == "eval"]
    return [
        f"| held-out success of the team, {when} since {began} | "
        f"{share(record['avg_at_k'], record['avg_interval'])}, {record['problems']} problems x "
        f"{record['samples']}, after {record['updates']} updates |"
        for when, record in ((("first", evals[0]), ("last", evals[-1])) if evals else ())
    ]


def _beginning(agent: str, records: Sequence[Record]) -> tuple[int, str]:
    """The index from which the log is about this agent's weights, and what happened there."""
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
    assert exported.base is not None
    base, here = exported.base, exported.folder.absolute()
    for folder, called in ((here, "THIS_FOLDER"), (here.parent, "THIS_FOLDER/..")):
        if Path(base).is_absolute() and Path(base).is_relative_to(folder):  # it was written next to the adapters
            base = f"{called}/{Path(base).relative_to(folder)}"
    revision = "" if exported.revision is None else f', revision="{exported.revision}"'
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base}"{revision})',
        'model = PeftModel.from_pretrained(base, "THIS_FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
    ]
