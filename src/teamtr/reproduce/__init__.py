"""The paper's tables and figures, made by commands: what to train, what to read off it, and the paper's numbers beside.

``recipe`` says what a recipe is, ``tables`` and ``drawings`` hold them, ``scales`` the team that each of them trains;
``cells`` does the training, ``result`` makes the table of it.
"""

from teamtr.reproduce.catalogue import RECIPES, find
from teamtr.reproduce.cells import Cell, Failed, make_cells
from teamtr.reproduce.cost import Estimate, estimate
from teamtr.reproduce.recipe import Line, Recipe, Variant
from teamtr.reproduce.result import Found, collect, write
from teamtr.reproduce.scales import SCALES, Setting

__all__ = [
    "RECIPES",
    "SCALES",
    "Cell",
    "Estimate",
    "Failed",
    "Found",
    "Line",
    "Recipe",
    "Setting",
    "Variant",
    "collect",
    "estimate",
    "find",
    "make_cells",
    "write",
]
