"""``teamtr reproduce``: recreates the paper's tables and figures."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teamtr.cli.common import JsonFlag, Overrides, answer, app, emit, errors, fail, interruptible
from teamtr.cli.tables import show_table, train_cells

if TYPE_CHECKING:
    from teamtr.reproduce import Estimate, Recipe, Setting


def recipe_names(incomplete: str) -> list[str]:
    from teamtr.reproduce import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


@app.command()
def reproduce(
    table: Annotated[
        str | None, typer.Argument(help="Which table or figure; see --list.", autocompletion=recipe_names)
    ] = None,
    changes: Overrides = None,
    scale: Annotated[
        str, typer.Option(help="`tiny`: minutes on two cores; `small`: one card and --model; `paper`: its protocol.")
    ] = "tiny",
    model: Annotated[str | None, typer.Option(help="A folder or hub id instead of the scale's model.")] = None,
    task: Annotated[str | None, typer.Option(help="A task instead of the scale's, such as `gsm8k`.")] = None,
    newcomer: Annotated[
        str | None, typer.Option(help="The model that replaces an agent, where one is replaced.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Default: 1 for tiny models, else 3.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default: reproduced/TABLE-SCALE.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only teams with these words in their name.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Train so many teams beside each other.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and train nothing.")] = False,
    finished: Annotated[
        bool, typer.Option("--finished", help="Train nothing: make the table of what is finished.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="List all tables and figures.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Reproduce one of the paper's tables or figures: train its teams, and show the paper's numbers next to ours.

    The same command resumes where it was stopped. A team that fails is reported and left out of the table. Settings may
    be changed as in `teamtr train`: `teamtr reproduce ablation plan.stages=10`.
    """
    from teamtr.reproduce import RECIPES, SCALES, Setting, find

    if show:
        listed = [
            {"name": r.name, "title": r.title, "paper": r.label, "teams": len(r.variants)} for r in RECIPES.values()
        ]
        answer(_listed(listed), as_json)
        if as_json:
            emit(listed)
        return
    if table is None:
        fail("which table? `teamtr reproduce --list` has their names", 2)
    if scale not in SCALES:
        fail(f"--scale is {', '.join(SCALES)}, not {scale!r}", 2)
    with errors(), interruptible():
        recipe = _chosen(find(table), only or ())
        setting = Setting(scale, model, task, seeds, tuple(changes or ()), newcomer)
        if dry_run:
            _tell_cost(recipe, setting, as_json)
            return
        folder = out or Path("reproduced") / f"{recipe.name}-{scale}"
        _make(recipe, setting, folder, 0 if finished else workers, as_json)


def _listed(recipes: list[dict[str, Any]]) -> str:
    from teamtr.cli.progress import table

    header = ("name", "what", "in the paper", "teams")
    return table(header, [(r["name"], r["title"], r["paper"], str(r["teams"])) for r in recipes])


def _chosen(recipe: Recipe, words: list[str] | tuple[()]) -> Recipe:
    """The recipe with only those teams whose names contain one of these words, and their lines."""
    from dataclasses import replace

    if not words:
        return recipe
    kept = tuple(v for v in recipe.variants if any(word.lower() in v.name.lower() for word in words))
    if not kept:
        fail(f"--only: no team has {words[0]!r} in its name; there are {', '.join(v.name for v in recipe.variants)}", 2)
    names = {variant.name for variant in kept}
    return replace(recipe, variants=kept, lines=tuple(line for line in recipe.lines if line.variant in names))


def _tell_cost(recipe: Recipe, setting: Setting, as_json: bool) -> None:
    from dataclasses import asdict

    from teamtr.reproduce import estimate

    found = estimate(recipe, setting)
    answer(_cost_text(recipe, setting.scale, found), as_json)
    if as_json:
        emit({"recipe": recipe.name, "scale": setting.scale, "seeds": len(setting.seed_numbers), **asdict(found)})


def _cost_text(recipe: Recipe, scale: str, found: Estimate) -> str:
    hours = "unknown: the model's name has no size" if found.hours is None else f"{found.hours:,.1f} at most"
    lines = [
        f"{recipe.title} ({recipe.label}): {len(recipe.variants)} teams",
        f"runs             {found.runs:,}",
        f"updates          {found.updates:,}",
        f"rollouts         {found.rollouts:,}, and {found.evaluated:,} to evaluate",
        f"sampled tokens   {found.tokens:,} at most",
        *([] if scale == "tiny" else [f"hours of an H200 {hours}"]),
    ]
    return "\n".join(lines)


def _make(recipe: Recipe, setting: Setting, out: Path, workers: int, as_json: bool) -> None:
    from teamtr.reproduce import cells_of, collect

    cells = cells_of(recipe, setting, out)
    failed = train_cells(cells, workers, out)
    show_table(collect(recipe, setting, cells, failed, out, _command(recipe, setting)), out, as_json)


def _command(recipe: Recipe, setting: Setting) -> str:
    words = ["teamtr", "reproduce", recipe.name, *setting.changes, "--scale", setting.scale]
    given = {"--model": setting.model, "--task": setting.task, "--newcomer": setting.newcomer, "--seeds": setting.seeds}
    for option, value in given.items():
        words += [] if value is None else [option, str(value)]
    return shlex.join(words)
