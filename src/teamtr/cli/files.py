"""Team files before training: ``teamtr check``, ``recipes``, ``init``, ``schema``, ``reference``."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from teamtr.cli.common import JsonFlag, Overrides, answer, app, emit, errors, fail, read_team_file
from teamtr.cli.complete import recipe_names
from teamtr.cli.terminal import write
from teamtr.errors import UserError


@app.command()
def check(
    team_file: Annotated[Path, typer.Argument(help="The team file (YAML).")],
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a team file before training: keys, models, templates, data, grader, the KL noise floor, and a few sampled
    episodes.

    Known right and wrong answers are passed to the task's own grader. The noise floor is the KL that rounding alone
    produces after a negligible change of the weights; it must be under a tenth of the radius. In bf16 it usually is
    not. The episodes show what would keep the team from learning, and give an estimate of the whole run's time.
    """
    with errors():
        settings = read_team_file(team_file, overrides)
        from teamtr.cli.words import estimate_line, health_line
        from teamtr.session.budget import budget_lines
        from teamtr.session.build import build
        from teamtr.session.checks import callable_tools, doubts, require_visible, self_test, untaught_share
        from teamtr.session.estimate import estimate, timed_floors
        from teamtr.session.memory import before_servers
        from teamtr.session.trial import try_out
        from teamtr.session.warmup import examples_of
        from teamtr.text import counted
        from teamtr.trackers import missing
        from teamtr.training.advice import advise
        from teamtr.training.health import health_of

        session = build(settings)
        served = before_servers(session)
        examples = examples_of(session)
        told = [*self_test(session), *doubts(session), *filter(None, map(missing, session.team_file.trackers))]
        trial = try_out(session)
        floors, scoring = timed_floors(session, trial)
        require_visible(session, floors)
        health, whole_run = health_of(trial.batch, session.team.limits), estimate(session, trial, scoring)
        advice = [each.text for each in advise(health, untaught=untaught_share(session, trial))]
    task, held_out = session.task, 0
    with suppress(UserError):  # a task may have no held-out problems
        held_out = len(task.problems("test"))
    warnings, printed = [*task.warnings, *told], task.printed.take()
    samplers = {name: session.engine.info(name).sampling for name in session.team.names}
    seeds = settings.seeds
    what = "the whole run" if seeds == 1 else f"each of the {seeds} runs that seeds: {seeds} asks for"
    lines = [
        f"{team_file}: fine",
        f"  problems: {len(task.problems('train'))} to train on, {held_out} held out",
        *(f"  {line}" for line in budget_lines(session)),
        *(f"  {name} is warmed up on {counted(len(batch), 'example')}" for name, batch in examples.items()),
        *(f"  {name} calls {', '.join(tools)}" for name, tools in callable_tools(session).items()),
        *(f"  {floor}" for floor in floors),
        *(f"  {name}: sampling is {path}" for name, path in samplers.items()),
        f"  sampled {len(trial.batch.episodes)} episodes: {health_line(health)}",
        *(f"    {name}: {health_line(health, name)}" for name in health.agents),
        f"  {what}, by these episodes: {estimate_line(whole_run)}",
        *(f"  {item.what}, {item.gb:.3g} GB: {item.why}" for item in (served.servers if served else ())),
        *(f"  warning: {warning}" for warning in warnings),
        *(f"  warning: the grader failed {n} times: {why}" for why, n in task.failures.items()),
        *(f"  reward: {line}" for line in printed.splitlines()),
        *(f"  advice: {text}" for text in advice),
    ]
    answer("\n".join(lines), as_json)
    if as_json:
        emit(
            {
                "ok": True,
                "floors": [asdict(f) for f in floors],
                "warnings": warnings,
                "health": asdict(health),
                "advice": advice,
                "printed": printed,
                "estimate": asdict(whole_run),
            }
        )


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this recipe's team file.", autocompletion=recipe_names)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the built-in team files, or print one: `teamtr recipes roles > roles.yaml`."""
    from teamtr.config import recipe_text
    from teamtr.config import recipes as all_recipes

    with errors():
        if name is not None:
            text = recipe_text(name)
            if as_json:
                emit({"name": name, "team_file": text})
            else:
                write(text.removesuffix("\n"), sys.stdout)
            return
        found = all_recipes()
    if as_json:
        emit({"recipes": {key: recipe.summary for key, recipe in found.items()}})
        return
    for key, recipe in found.items():
        write(f"{key:<18} {recipe.summary}", sys.stdout)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write the team file.")] = Path("team.yaml"),
    recipe: Annotated[
        str, typer.Option(help="Which recipe to start from; see `teamtr recipes`.", autocompletion=recipe_names)
    ] = "code-exchange",
    force: Annotated[bool, typer.Option(help="Overwrite existing files.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a team file to start from, and next to it the JSON schema for editors.

    It overwrites an existing team file only with `--force`.
    """
    from teamtr.cli.terminal import say
    from teamtr.config import recipe_text
    from teamtr.config.json_schema import FIRST_LINE, SCHEMA_NAME, is_ours, json_schema_text

    schema = path.parent / SCHEMA_NAME
    with errors():
        text = recipe_text(recipe)
        if path.exists() and not force:
            fail(f"{path} exists; choose another name, or use --force", 2)
        if schema.exists() and not is_ours(schema) and not force:
            fail(f"{schema} exists and was not made by teamtr; choose another folder, or use --force", 2)
        path.parent.mkdir(parents=True, exist_ok=True)
        schema.write_text(json_schema_text(), encoding="utf-8")
        path.write_text(FIRST_LINE + text, encoding="utf-8")
    say(f"wrote {path}; next: teamtr check {path}, then teamtr train {path}")
    if as_json:
        emit({"path": str(path), "recipe": recipe, "schema": str(schema)})


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option(help="File to write. [default: stdout]")] = None,
) -> None:
    """Print the JSON schema of a team file, for editors; `teamtr init` writes it next to the team file."""
    from teamtr.cli.terminal import say
    from teamtr.config import json_schema_text
    from teamtr.tasks.registry import broken_tasks

    with errors():
        text = json_schema_text()
        for note in broken_tasks():
            say(f"warning: {note}")
        if out is None:
            write(text.removesuffix("\n"), sys.stdout)
        else:
            out.write_text(text, encoding="utf-8")


@app.command()
def reference(
    out: Annotated[Path | None, typer.Option(help="File to write. [default: stdout]")] = None,
) -> None:
    """Print every key of a team file with its type, default and meaning, as Markdown."""
    from teamtr.config import reference as text

    with errors():
        if out is None:
            write(text().removesuffix("\n"), sys.stdout)
        else:
            out.write_text(text(), encoding="utf-8")
