"""``teamtr train``: train a team, or resume a run."""

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
from teamtr.cli.sweep import Workers, run_sweep


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
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Train with so many seeds. [default: the team file's seeds]")
    ] = None,
    workers: Workers = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on though data, code or models are not those the run began with."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a team, or resume the run in the folder: the same command does both.

    To resume a run elsewhere, use `teamtr train RUN team.model=PATH task.path=PATH device=cpu`, with paths relative to
    the current directory. Data, code and models must have the same hashes.

    Ctrl-C once finishes the update and saves; twice stops at once. Every update is a checkpoint, so at most the update
    in progress is lost.

    With `--seeds 3`, or `seeds: 3` in the team file, three runs are trained, in parallel where there is room, and one
    table shows the mean of their success, its deviation and its interval.
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
        from teamtr.cli.words import percent
        from teamtr.errors import UserError
        from teamtr.records import accepted
        from teamtr.session import train as runs
        from teamtr.store import RunFolder
        from teamtr.text import counted

        folder = out or (team_file.parent if inside_a_run else Path("runs") / settings.name)
        if (count := seeds or settings.seeds) > 1:
            _train_seeds(team_file, overrides or [], count, workers, folder, accept_changes, as_json)
            return
        if workers is not None:
            raise UserError("--workers is for several runs: give --seeds, or use `teamtr sweep`")
        settings = settings.model_copy(update={"seeds": 1})
        with TrainingScreen(works=works) as screen:
            records = runs.train(settings, folder, stop=stop, accept_changes=accept_changes)
            for record in stop.during(screen.watch(records)):
                last[record["kind"]] = record
                outcomes.update([record["outcome"]] if record["kind"] == "update" else [])
    ended = last.get("finished")
    if ended is not None and ended["stopped_early"]:
        say(
            f"stopped early after stage {ended['stage']}: {counted(settings.eval.patience or 0, 'evaluation')} in a "
            "row without a better held-out success; raise eval.patience to continue"
        )
    elif "resume" in last and "update" not in last and ended is not None:
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
        # Not "the same reward": with plan.credit own, difference or crossed, the team's rewards may differ.
        say(
            f"{silent} of {outcomes.total()} updates had no signal: in every group, all episodes were worth the same "
            "to the agent"
        )
    if ended is not None and (best := ended["best"]) is not None and best["updates"] != ended["updates"]:
        say(
            f"best held-out success: {percent(best['success'])} at checkpoint {best['updates']} (stage "
            f"{best['stage']}), which is kept: teamtr eval {shlex.quote(str(folder))} --checkpoint best"
        )
    say(f"run folder: {folder}; next: teamtr report {shlex.quote(str(folder))}")
    if as_json:
        evaluation, update = last.get("eval"), last.get("update")
        emit(
            {
                "folder": str(folder),
                "status": "stopped" if "stopped" in last else "finished",
                "updates": (ended or last["stopped"])["updates"],
                "stopped_early": ended is not None and ended["stopped_early"],
                "best": ended and ended["best"],
                "success": evaluation and evaluation["avg_at_k"],
                "tokens": update and update["sampled_tokens_total"],
            }
        )
    if "stopped" in last:
        raise typer.Exit(130)


def _train_seeds(
    file: Path, changes: list[str], seeds: int, workers: int | None, out: Path, accept_changes: bool, as_json: bool
) -> None:
    """Train each seed in its own folder in ``out``, and make one table."""
    from teamtr.errors import UserError
    from teamtr.sweep.sweep import Sweep
    from teamtr.sweep.variants import Variant

    if accept_changes:
        raise UserError(
            f"--accept-changes is for one run: `teamtr train {shlex.quote(str(out / 'seedN'))} --accept-changes` with "
            "the number of its seed, then this command without it"
        )
    command = shlex.join(["teamtr", "train", str(file), *changes, "--seeds", str(seeds)])
    made = Sweep((Variant(read_team_file(file, changes)),), seeds, out, command)
    run_sweep(made, workers, finished=False, as_json=as_json)
