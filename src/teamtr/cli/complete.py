"""Shell completion, with names that are known without importing torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def recipe_names(incomplete: str) -> list[tuple[str, str]]:
    """Recipes with their summaries."""
    from teamtr.config import recipes

    return [(name, recipe.summary) for name, recipe in recipes().items() if name.startswith(incomplete)]


def preset_names(incomplete: str) -> list[str]:
    from teamtr.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def method_names(incomplete: str) -> list[str]:
    """Inference-time methods; after a comma, the next one."""
    from teamtr.baselines import method_names

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in method_names() if name.startswith(last)]


def agents_of_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """The agents of the run folder in the command; none if it cannot be read."""
    # While an option's value is missing, the arguments before it are not yet assigned to parameters.
    run = ctx.params.get("run") or next(iter(ctx.args), None)
    agents = _agents(Path(run) / "team.yaml") if run else []
    return [name for name in agents if name.startswith(incomplete)]


def dotted_keys(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Keys of a team file with their descriptions; those of an agent with the names in the file."""
    from teamtr.config import schema_keys

    file = ctx.params.get("team_file")
    agents = _agents(Path(file)) if file else []
    found: dict[str, str] = {}
    for key in schema_keys():
        for agent in agents if ".NAME." in key.key else [""]:
            found.setdefault(f"{key.key.replace('NAME', agent)}=", key.description)
    return [(key, meaning) for key, meaning in found.items() if key.startswith(incomplete)]


def _agents(team_file: Path) -> list[str]:
    """The names of the agents in this file, as far as it has any: an unfinished file is not an error here."""
    from teamtr.config.source import read

    try:
        data: Any = read(team_file.read_text(encoding="utf-8")).data
        names = [agent["name"] for agent in data["team"]["agents"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    # Only valid names: the file may contain anything, and the completion is inserted into a shell command.
    return [name for name in names if isinstance(name, str) and name.replace("-", "_").isidentifier()]
