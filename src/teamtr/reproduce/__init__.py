"""The paper's tables and figures, made by commands: what to train, what to read off it, and the paper's numbers beside.

``recipe`` says what a recipe is, ``tables`` and ``drawings`` hold them, ``scales`` the team that each of them trains;
``teams`` are what is trained (``teamtr.sweep`` does it), ``result`` makes the table of it.
"""

from teamtr.reproduce.catalogue import RECIPES, find
from teamtr.reproduce.cost import Estimate, estimate
from teamtr.reproduce.recipe import Line, Recipe, Variant
from teamtr.reproduce.result import Found, collect
from teamtr.reproduce.scales import SCALES, Setting
from teamtr.reproduce.teams import cells_of

__all__ = [
    "RECIPES",
    "SCALES",
    "Estimate",
    "Found",
    "Line",
    "Recipe",
    "Setting",
    "Variant",
    "cells_of",
    "collect",
    "estimate",
    "find",
]
