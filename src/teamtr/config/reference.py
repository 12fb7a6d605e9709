"""The team-file reference in Markdown, made from the models: docs/team-file.md is this text, and a test says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from teamtr.config.keys import SchemaKey, schema_keys, section_of
from teamtr.config.schema import TASKS, TeamFile
from teamtr.presets import PRESETS

HEAD = """\
# Team file reference

<!-- Made by `teamtr reference`; do not edit. -->

A team file is YAML 1.2: `1e-5` is a number, `no` is text. `name`, `task`, `team.agents` and a model, the team's or each
agent's own, must be given. A wrong
key or value is reported with file, line, column and the nearest right one, all mistakes at once. Any key can be changed
on the command line by its dotted name: `teamtr train team.yaml plan.stages=10 team.agents.left.model=tiny`.
`teamtr init` writes a file to start from, `teamtr check` looks at it, and a run folder holds the file with every
default written out.
"""


def reference() -> str:
    """Every key with its type, default and meaning."""
    keys = schema_keys()
    parts = [HEAD, "## At the top\n", _table([key for key in keys if "." not in key.key])]
    for name in TeamFile.model_fields:
        own = [key for key in keys if key.key.startswith(f"{name}.")]
        if name == "task":
            parts += _tasks(own)
        elif own:
            parts += [f"## {name}\n", *_about(name), _table(own)]
        if name == "plan":
            parts.append(f"The presets are {', '.join(f'`{preset}`' for preset in PRESETS)}.\n")
    return "\n".join(parts)


def _about(name: str) -> list[str]:
    section = section_of(name)
    return [f"{' '.join((section.__doc__ or '').split())}\n"] if section else []


def _tasks(keys: Sequence[SchemaKey]) -> list[str]:
    """The key that chooses the task, then the keys of each."""
    parts = ["## task\n", "The name chooses which other keys there are; [tasks](tasks.md) describes each.\n"]
    parts.append(_table([key for key in keys if not key.tasks]))
    for task in TASKS:
        own = [key for key in keys if task in key.tasks]
        names = ", ".join(f"`{name}`" for name in task.names())
        parts += [f"### {names}\n", f"{' '.join((task.__doc__ or '').split())}\n".replace("``", "`")]
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
    """No bar in a cell: Markdown would end it there, and a code span would show the escape."""
    *others, last = text.split(" | ")
    plain = f"{', '.join(others)} or {last}" if others else last
    return plain.replace("|", "/").replace("<", "&lt;").replace("*", "\\*")
