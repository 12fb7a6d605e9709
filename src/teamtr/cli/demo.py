"""``teamtr demo``: train a team of tiny models and show what it learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teamtr.cli.common import JsonFlag, Overrides, Stop, app, emit, errors, fail, interruptible
from teamtr.cli.complete import preset_names

if TYPE_CHECKING:
    from teamtr.cli.progress import TrainingScreen
    from teamtr.cli.works import Works
    from teamtr.session.demo import DemoResult, DemoRun, Watch

PLAYERS = 5
"""Default number of agents in ``roles``."""


@app.command()
def demo(
    overrides: Overrides = None,
    task: Annotated[
        str,
        typer.Option(help="`code`: say a code of which two agents see half each; `roles`: exactly one must volunteer."),
    ] = "code",
    agents: Annotated[
        int | None, typer.Option(min=2, max=26, help=f"How many agents play `roles`. [default: {PLAYERS}]")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Also train a second team with this preset.", autocompletion=preset_names),
    ] = None,
    radius: Annotated[float | None, typer.Option(help="Largest KL of one update, in nats per message.")] = None,
    stages: Annotated[int | None, typer.Option(help="Stages; in each, every agent is updated once.")] = None,
    seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to train.")] = 1,
    workers: Annotated[
        int, typer.Option(min=1, help="Train so many teams beside each other, each in a process with one thread.")
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="Keep the run folders here.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a team of tiny models on a game that they can only win together: one command, about a minute on a CPU.

    `teamtr demo` trains three models on code exchange: two see half of a code each, the third must say all of it.
    `teamtr demo --task roles --compare naive_sequential` compares fresh rollouts before every update with stale ones,
    and `--compare auto` with rollouts that are reused while they are informative (the default for code exchange).
    """
    from teamtr.cli.terminal import say
    from teamtr.presets import PRESETS
    from teamtr.session.demo import DemoRun, conversations, demo_file, demo_folder, summary

    if task not in ("code", "roles"):
        fail(f"--task is code or roles, not {task!r}", 2)
    if task == "code" and agents is not None:
        fail("--agents goes with --task roles: code exchange has three agents", 2)
    if compare is not None and compare not in PRESETS:
        fail(f"--compare: there is no preset {compare!r}; choose one of {', '.join(PRESETS)}", 2)
    players = agents or PLAYERS
    with errors() as works, interruptible() as stop, demo_folder(out) as folder:
        asked = demo_file(task, agents=players, seed=seed, changes=overrides or ())
        if asked.seed != seed:
            fail(f"seed={asked.seed}: the seeds of a demo are options, --seed {asked.seed} and --seeds", 2)
        own = asked.plan.preset
        presets = list(dict.fromkeys((own, compare or own)))
        results: dict[str, list[DemoResult]] = {preset: [] for preset in presets}
        runs = []
        for s in range(seed, seed + seeds):
            for preset in presets:
                team_file = demo_file(
                    task, agents=players, preset=preset, seed=s, radius=radius, stages=stages, changes=overrides or ()
                )
                runs.append(DemoRun(team_file, folder / f"{team_file.name}-{preset}-{s}"))
        trained = _trained_in_turn(runs, stop, works) if workers == 1 else _trained_beside(runs, workers)
        for result in sorted(trained, key=lambda result: result.seed):
            results[result.preset].append(result)
        shown = conversations(runs[0].folder) if task == "code" else []
        told = _write_report(runs[0].folder, (out or Path()) / "teamtr-demo.html")
    _show_demo(results, shown)
    say(told)
    if as_json:
        line = summary(results[own])
        if compare:
            line["compare"] = {"preset": compare, **summary(results[compare])}
        emit(line)


def _trained_in_turn(runs: Sequence[DemoRun], stop: Stop, works: Works) -> list[DemoResult]:
    """Train one run after another, with every update on the screen."""
    from teamtr.cli.progress import TrainingScreen
    from teamtr.session.demo import train_demo

    results = []
    for run in runs:
        plan, seed = run.team_file.plan.preset, run.team_file.seed
        label = f"[{plan}, seed {seed}]" if len(runs) > 1 else ""
        with TrainingScreen(label=label, works=works) as screen:
            results.append(train_demo(run.team_file, run.folder, _watched(screen, stop), stop))
        if stop():
            raise KeyboardInterrupt
    return results


def _watched(screen: TrainingScreen, stop: Stop) -> Watch:
    return lambda records: stop.during(screen.watch(records))


def _trained_beside(runs: Sequence[DemoRun], workers: int) -> list[DemoResult]:
    """Train in several processes, with a line for each finished run."""
    from teamtr.cli.terminal import say
    from teamtr.cli.words import percent
    from teamtr.session.demo import train_silently
    from teamtr.session.processes import beside

    results = []
    for _, result in beside(train_silently, runs, workers):
        results.append(result)
        name = f"[{result.preset}, seed {result.seed}]"
        change = f"success {percent(result.initial)} to {percent(result.final)}"
        say(f"{len(results):>3}/{len(runs)}  {name} {change}, {result.tokens:,} tokens, {result.seconds:.0f} s")
    return results


def _write_report(folder: Path, target: Path) -> str:
    """Write the report of this run. Returns a message with its path, or the reason why there is none: a demo never
    fails because of its report."""
    from teamtr.analysis.report import build_report, report_page

    try:
        target.write_text(report_page(build_report(folder)))
    except Exception as error:
        return f"\nno report was written ({error})"
    return f"\nreport: {target.resolve()}  (open it in a browser)"


def _show_demo(results: dict[str, list[DemoResult]], conversations: list[Any]) -> None:
    from teamtr.cli.progress import sparkline, table
    from teamtr.cli.terminal import say
    from teamtr.cli.words import percent

    header = ("plan", "seed", "before", "after", "success over the run", "updates", "kept", "outside", "regressing")
    rows = [
        (
            preset,
            str(r.seed),
            percent(r.initial),
            percent(r.final),
            sparkline(r.exact[:: max(1, len(r.exact) // 16)] if r.exact else r.curve),
            str(r.updates),
            str(r.accepted),
            str(r.out_of_region),
            "-" if r.regressing is None else str(r.regressing),
        )
        for preset, runs in results.items()
        for r in runs
    ]
    say(f"\n{table(header, rows)}")
    if conversations:
        say("\nthe same problems in the first and in the last stage")
    for answer, first, last in conversations:
        for when, episode in (("first", first), ("last ", last)):
            said = "   ".join(f"{t.agent}: {t.text!r}" for t in episode.turns)
            say(f"  {when}  code {answer}   {said}   {'✓' if episode.verdict.right else '✗'}")
