"""Recipes: the team files that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from teamtr.config.errors import ConfigError, Mistake
from teamtr.settings.refusals import hint, show

_FOLDER = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Recipe:
    """A team file that comes with the package; ``summary`` is its first comment line."""

    name: str
    path: str
    summary: str


def recipes() -> dict[str, Recipe]:
    """The recipes by name."""
    found = {}
    for file in sorted(_FOLDER.glob("*.yaml")):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        found[file.stem] = Recipe(file.stem, str(file), first.removeprefix("#").strip())
    return found


def recipe_text(name: str) -> str:
    """The text of a recipe. Raises ConfigError with the nearest name if there is no recipe of this name."""
    known = recipes()
    if name not in known:
        raise ConfigError("recipes", "", [Mistake(f"no recipe {show(name)}{hint(name, known, 'there are')}")])
    return Path(known[name].path).read_text(encoding="utf-8")
