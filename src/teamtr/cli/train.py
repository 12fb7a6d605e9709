"""``teamtr train``."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from teamtr.cli.common import (
    JsonFlag,
    Overrides,
    app,
    emit,
    errors,
    holds_run,
    interruptible,
    read_run,
    read_team_file,
)


@app.command()
def train(
    team_file: Annotated[
        Path, typer.Argument(help="The team file (YAML; `teamtr init` writes one), or a run folder to resume.")
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder. [default: the folder of the team file if it holds a run, else `runs/NAME`]"),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on though data, code or models are not those the run began with."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a team, or resume the run in the folder: the same command does both.

    A run goes on elsewhere with `teamtr train RUN team.model=PATH task.path=PATH device=cpu`, paths relative to the
    present folder: data, code and models must be the same by their hashes.

    Ctrl-C once finishes the update and saves; twice stops at once. Every update is a checkpoint, so at most the update
    in progress is lost.
    """
    last: dict[str, Any] = {}
    outcomes: Counter[str] = Counter()
    with errors() as works, interruptible() as stop:
        if team_file.is_dir() and (team_file / "team.yaml").is_file():
            team_file = team_file / "team.yaml"
        inside_a_run = holds_run(team_file.parent)
        is_stored = inside_a_run and team_file.name == "team.yaml"
        settings = read_run(team_file.parent, overrides) if is_stored else read_team_file(team_file, overrides)
        from teamtr.cli.progress import TrainingScreen
        from teamtr.cli.terminal import say
        from teamtr.records import accepted
        from teamtr.session import train as runs
        from teamtr.store import RunFolder
        from teamtr.text import counted

        folder = out or (team_file.parent if inside_a_run else Path("runs") / settings.name)
        with TrainingScreen(works=works) as screen:
            records = runs.train(settings, folder, stop=stop, accept_changes=accept_changes)
            for record in stop.during(screen.watch(records)):
                last[record["kind"]] = record
                outcomes.update([record["outcome"]] if record["kind"] == "update" else [])
    if "resume" in last and "update" not in last and "finished" in last:
        say(f"this run has finished all {settings.sized_plan().stages} stages; raise plan.stages to continue")
    if set(outcomes) == {"skipped_no_signal"}:
        with errors():
            earlier = sum(accepted(r) for r in RunFolder.read(folder).log.read() if r["kind"] == "update")
        kept = f" since the run was resumed (it kept {counted(earlier, 'update')} before)" if earlier else ""
        say(
            f"nothing was learned{kept}: in every group, all episodes got the same reward. Easier problems, larger "
            "groups or a reward with partial credit give a signal; `teamtr report` shows what the agents said"
        )
    elif silent := outcomes["skipped_no_signal"]:
        say(f"{silent} of {outcomes.total()} updates had no signal: in every group, all episodes got the same reward")
    say(f"run folder: {folder}; next: teamtr report {shlex.quote(str(folder))}")
    if as_json:
        evaluation, update = last.get("eval"), last.get("update")
        emit(
            {
                "folder": str(folder),
                "status": "stopped" if "stopped" in last else "finished",
                "updates": (last.get("finished") or last["stopped"])["updates"],
                "success": evaluation and evaluation["avg_at_k"],
                "tokens": update and update["sampled_tokens_total"],
            }
        )
    if "stopped" in last:
        raise typer.Exit(130)
