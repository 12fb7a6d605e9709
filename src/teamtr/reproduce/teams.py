"""The teams that a recipe trains, one per variant and seed, and their run folders."""

from __future__ import annotations

from pathlib import Path

from teamtr.reproduce.recipe import Recipe, Variant
from teamtr.reproduce.scales import Setting
from teamtr.swap import Request
from teamtr.sweep.cells import Cell, Swapped
from teamtr.text import slug

TEAM, NEWCOMER = "team before the swap", "newcomer"


def cells_of(recipe: Recipe, setting: Setting, out: Path) -> list[Cell]:
    """All seeds of the first variant, then of the next; before them, the teams in which an agent is replaced."""
    return [
        *_teams_before_swaps(recipe, setting, out),
        *(_cell(recipe, setting, variant, seed, out) for variant in recipe.variants for seed in setting.seed_numbers),
    ]


def _teams_before_swaps(recipe: Recipe, setting: Setting, out: Path) -> list[Cell]:
    if all(variant.replacement is None for variant in recipe.variants):
        return []
    found = []
    for seed in setting.seed_numbers:
        team = setting.team_file(recipe, Variant("team"), seed)
        found.append(Cell(TEAM, seed, out / "runs" / f"team-seed{seed}", team))
        if (newcomer := setting.newcomer_file(recipe, seed)) is not None:
            found.append(Cell(NEWCOMER, seed, out / "runs" / f"newcomer-seed{seed}", newcomer))
    return found


def _cell(recipe: Recipe, setting: Setting, variant: Variant, seed: int, out: Path) -> Cell:
    given, runs = variant.replacement, out / "runs"
    folder = runs / f"{slug(variant.name)}-seed{seed}"
    if given is None:
        return Cell(variant.name, seed, folder, setting.team_file(recipe, variant, seed), method=variant.method)
    newcomer = setting.newcomer or runs / f"newcomer-seed{seed}"
    tiny = {"probes": 64, "max_steps": 200, "eval_samples": 16} if setting.scale == "tiny" else {}
    request = Request(
        setting.replaced,
        str(newcomer),
        given.mode,
        stages=setting.stages_after,
        think=given.think,
        tools=given.tools,
        system=given.system,
        **tiny,  # type: ignore[arg-type]
    )
    return Cell(variant.name, seed, folder, swapped=Swapped(runs / f"team-seed{seed}", newcomer, request))
