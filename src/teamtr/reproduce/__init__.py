"""The paper's tables and figures by command: what to train, what to measure, and the paper's numbers for comparison.

``recipe`` defines what a recipe is, ``tables`` and ``drawings`` hold the recipes, and ``scales`` the teams that they
train. ``teams`` lists the runs, which ``teamtr.sweep`` trains; ``result`` makes the table.
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
