"""Every recipe by name."""

from __future__ import annotations

from teamtr.errors import UserError
from teamtr.reproduce.drawings import DRAWINGS
from teamtr.reproduce.recipe import Recipe
from teamtr.reproduce.tables import TABLES
from teamtr.settings.refusals import hint

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*TABLES, *DRAWINGS)}


def find(name: str) -> Recipe:
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}{hint(name, RECIPES, 'there are')}")
    return RECIPES[name]
