"""The team-file reference in Markdown, generated from the models. A test compares docs/team-file.md with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from teamtr.config.keys import SchemaKey, schema_keys, section_of
from teamtr.config.schema import TeamFile
from teamtr.presets import PRESETS, Plan
from teamtr.tasks.registry import broken_tasks, task_sections

HEAD = """\
# Team file reference

<!-- Made by `teamtr reference`; do not edit. -->

A team file is YAML 1.2: `1e-5` is a number, `no` is text. `name`, `task`, `team.agents` and a model are required; the
model may be the team's or each agent's own. All wrong keys and values are reported at once, each with file, line,
column and the nearest right one. Any key can be changed on the command line by its dotted name:
`teamtr train team.yaml plan.stages=10 team.agents.left.model=tiny`. `teamtr init` writes a file to start from, and
`teamtr check` checks it. A run folder holds the file with every default written out. `teamtr schema` prints all this as
a JSON schema for [editors](install.md#editors).
"""


def reference() -> str:
    """The reference as Markdown: every key with its type, default and meaning."""
    keys = schema_keys()
    parts = [HEAD, "## At the top\n", _table([key for key in keys if "." not in key.key])]
    for name in TeamFile.model_fields:
        own = [key for key in keys if key.key.startswith(f"{name}.")]
        if name == "task":
            parts += _tasks(own)
        elif own:
            parts += [f"## {name}\n", *_about(name), _table(own)]
        if name == "plan":
            parts += _presets()
    return "\n".join(parts)


PRESET_KEYS: dict[str, Callable[[Plan], Any]] = {
    "radius_nats_per_message": lambda plan: plan.radii.nats,
    "normalize": lambda plan: getattr(plan.advantage, "normalize", None),
    "a_clip": lambda plan: getattr(plan.advantage, "clip", None),
    "critic": lambda plan: plan.critic is not None,
    "gae_lambda": lambda plan: getattr(plan.critic, "gae_lambda", None),
    "value_clip": lambda plan: getattr(plan.critic, "value_clip", None),
    "clip": lambda plan: plan.objective.clip_low,
    "clip_high": lambda plan: plan.objective.clip_high,
    "ratio": lambda plan: plan.objective.ratio,
    "average_over": lambda plan: plan.objective.average_over,
    "reference_kl": lambda plan: plan.objective.reference_kl,
    "order": lambda plan: plan.order.kind,
    "resample_every": lambda plan: plan.resample.every,
    "reweight": lambda plan: plan.resample.reweight,
    "min_effective_share": lambda plan: plan.resample.min_effective_share,
    "sampling_cost": lambda plan: plan.resample.sampling_cost,
    "resample_partially": lambda plan: plan.resample.partial,
    "control_share": lambda plan: plan.resample.control,
    "reuse_across_stages": lambda plan: plan.resample.across_stages,
    "gate": lambda plan: plan.region.gate,
    "beta": lambda plan: plan.region.beta,
    "adapt_beta": lambda plan: plan.region.adapt_beta,
    "allocate": lambda plan: plan.radii.allocation,
    "adapt_radius": lambda plan: plan.radii.adapt,
    "overlong_filter": lambda plan: plan.overlong.filter,
    "overlong_cache": lambda plan: plan.overlong.cache,
    "dynamic_sampling": lambda plan: plan.dynamic_sampling.on,
    "credit": lambda plan: plan.credit,
}
"""The keys of ``plan`` that a preset sets, and how to read each from a plan."""


def preset_differences(name: str) -> dict[str, Any]:
    """The keys of ``plan`` that turn ``preset: teamtr`` into this preset."""
    first, other = PRESETS["teamtr"], PRESETS[name]
    return {key: value_in(other) for key, value_in in PRESET_KEYS.items() if value_in(other) != value_in(first)}


def _presets() -> list[str]:
    """The values of the first preset, and the differences of the others from it."""
    everything = {key: value_in(PRESETS["teamtr"]) for key, value_in in PRESET_KEYS.items()}
    values = {key: value for key, value in everything.items() if key not in ("gae_lambda", "value_clip")}  # no critic
    rows = ["| preset | what it says |", "|---|---|", f"| `teamtr` | {_said(values)} |"]
    for name in PRESETS:
        if name != "teamtr":
            differs = preset_differences(name)
            rows.append(f"| `{name}` | {f'as `teamtr`, but {_said(differs)}' if differs else 'as `teamtr`'} |")
    return ["### Presets\n", "\n".join(rows) + "\n"]


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}: {_yaml(value)}`" for key, value in values.items())


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ".inf" if value == math.inf else f"{value:g}" if isinstance(value, float) else str(value)


def _about(name: str) -> list[str]:
    section = section_of(name)
    return [f"{' '.join((section.__doc__ or '').split())}\n"] if section else []


def _tasks(keys: Sequence[SchemaKey]) -> list[str]:
    """The key that selects the task, then the keys of each task."""
    parts = ["## task\n", "The name chooses which other keys there are; [tasks](tasks.md) describes each.\n"]
    parts.append(_table([key for key in keys if not key.tasks]))
    parts += [f"Note: {note}.\n" for note in broken_tasks()]
    for section, names in task_sections().items():
        own = [key for key in keys if key.tasks == names]
        parts += [f"### {', '.join(f'`{name}`' for name in names)}\n"]
        about = (section.__doc__ or "").partition("\n\n")[0]
        parts += [f"{' '.join(about.split())}\n".replace("``", "`")]
        parts.append(_table(own) if own else "It has no other keys.\n")
    return parts


def _table(keys: Iterable[SchemaKey]) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{key.key}` | {_cell(key.type)} | {_default(key)} | {_cell(key.description)} |"
        for key in keys
    ]  # fmt: skip
    return "\n".join(rows) + "\n"


def _default(key: SchemaKey) -> str:
    if key.required:
        return "**required**"
    stated = key.default[:1] in '"[{-0123456789' or key.default in ("true", "false", "NaN", "Infinity")
    return f"`{key.default}`" if stated else key.default


def _cell(text: str) -> str:
    """Text without bars for a table cell: a bar would end the cell, and a code span would show its escape."""
    *others, last = text.split(" | ")
    plain = f"{', '.join(others)} or {last}" if others else last
    return plain.replace("|", "/").replace("<", "&lt;").replace("*", "\\*")
