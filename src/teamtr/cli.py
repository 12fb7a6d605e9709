"""The commands. The only room that sees every other."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

EXIT_CODES = """Exit codes: 0 done; 1 the run failed; 2 wrong usage or team file; 3 refused (folder in use,
radius not visible, other run in the folder); 130 interrupted and saved."""

app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help=f"""Fine-tune teams of language models, one agent at a time, each update inside a KL trust region.

Start with `teamtr demo`, then `teamtr init my-team.yaml` and `teamtr train my-team.yaml`.

{EXIT_CODES}""",
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, as dotted keys: `plan.stages=10 team.agents.left.model=tiny`."),
]


def _fail(message: str, code: int) -> NoReturn:
    from teamtr.show import say

    say(f"error: {message}")
    raise typer.Exit(code)


@contextmanager
def _errors() -> Iterator[None]:
    """Known errors become one message and a documented exit code; the unknown keep their traceback."""
    from teamtr.errors import TeamTRError

    try:
        yield
    except TeamTRError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted; a run folder keeps every update that was committed", 130)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) finishes the update and saves; the second stops at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        sys.stderr.write("\nfinishing this update, then saving; once more to stop at once\n")

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _emit(payload: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(payload) + "\n")
    sys.stdout.flush()


@app.command()
def demo(
    task: Annotated[
        str, typer.Option(help="`code`: pass on a code in halves; `roles`: exactly one volunteers.")
    ] = "code",
    agents: Annotated[int, typer.Option(min=2, max=26, help="How many agents play `roles`.")] = 5,
    compare: Annotated[str | None, typer.Option(help="Train a second team with this preset, side by side.")] = None,
    radius: Annotated[float | None, typer.Option(help="KL allowed to one update, nats per message.")] = None,
    stages: Annotated[int | None, typer.Option(help="Stages; in each, every agent is updated once.")] = None,
    seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to train, one after the other.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Keep the run folders here.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a team of tiny models on a game that it can only win together: one command, a minute or two on a CPU.

    `teamtr demo` teaches three models to pass on a code of which two of them see half each.
    `teamtr demo --task roles --compare naive_sequential` shows what sampling anew after every update is worth.
    """
    from teamtr.demo import conversations, demo_file, demo_folder, summary, train_demo
    from teamtr.presets import PRESETS
    from teamtr.show import TrainingScreen

    if task not in ("code", "roles"):
        _fail(f"--task is code or roles, not {task!r}", 2)
    if compare is not None and compare not in PRESETS:
        _fail(f"--compare names no preset {compare!r}; there are {', '.join(PRESETS)}", 2)
    presets = ["teamtr", *([compare] if compare else [])]
    results: dict[str, list[Any]] = {preset: [] for preset in presets}
    shown: list[Any] = []
    with _errors(), _interruptible() as stop:
        for s in range(seed, seed + seeds):
            for preset in presets:
                team_file = demo_file(task, agents=agents, preset=preset, seed=s, radius=radius, stages=stages)
                label = f"[{preset}, seed {s}]" if len(presets) * seeds > 1 else ""
                with (
                    demo_folder(out / f"{team_file.name}-{preset}-{s}" if out else None) as folder,
                    TrainingScreen(label=label) as screen,
                ):
                    result = train_demo(team_file, folder, screen.watch, stop)
                    if stop():
                        raise KeyboardInterrupt
                    results[preset].append(result)
                    if task == "code" and not shown:
                        shown = conversations(folder)
    _show_demo(results, shown)
    if as_json:
        line = summary(results["teamtr"])
        if compare:
            line["compare"] = {"preset": compare, **summary(results[compare])}
        _emit(line)


def _show_demo(results: dict[str, list[Any]], conversations: list[Any]) -> None:
    from teamtr.show import percent, say, sparkline, table

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


@app.command()
def train(
    team_file: Annotated[Path, typer.Argument(help="The team file (YAML); `teamtr init` writes one.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; without it, `runs/NAME`.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a team, or go on with the run that is in the folder: the same command resumes.

    Ctrl-C once finishes the update and saves; twice stops at once. Every update is a checkpoint, so nothing but the
    update in progress is ever lost.
    """
    from teamtr import run as runs
    from teamtr.config import load_team_file
    from teamtr.show import TrainingScreen

    last: dict[str, Any] = {}
    with _errors(), _interruptible() as stop:
        settings = load_team_file(team_file, overrides or ())
        folder = out or Path("runs") / settings.name
        with TrainingScreen() as screen:
            for record in screen.watch(runs.train(settings, folder, stop=stop)):
                last[record["kind"]] = record
    if as_json:
        evaluation, update = last.get("eval"), last.get("update")
        _emit(
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


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: Annotated[str, typer.Option(help="Which problems.")] = "test",
    problems: Annotated[int | None, typer.Option(min=1, help="At most this many; else as in the team file.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes of each problem (K).")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; else as in the team file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate the latest checkpoint of a run on held-out problems: avg@K, unbiased pass@K, majority, consensus."""
    from teamtr import run as runs

    with _errors():
        workshop, team, commit = runs.open_run(run)
        report, ledger = runs.evaluate_team(
            workshop,
            team,
            stage=int(commit.progress["stage"]),
            split=split,
            problems=problems,
            samples=samples,
            temperature=temperature,
        )
    _show_eval(report)
    if as_json:
        _emit({**report.as_record(), "updates": commit.number, "tokens": sum(ledger.sampled_tokens.values())})


def _show_eval(report: Any) -> None:
    from teamtr.show import percent, say, table

    def row(name: str, value: float, interval: tuple[float, float] | None = None) -> tuple[str, str, str]:
        between = f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}" if interval else ""
        return name, f"{100 * value:.1f} %", between

    rows = [row(f"avg@{report.samples}", report.avg_at_k, report.avg_interval)]
    rows += [row(f"pass@{k}", value, report.pass_intervals[k]) for k, value in report.pass_at_k.items()]
    rows.append(row(f"majority@{report.samples}", report.majority_at_k, report.majority_interval))
    if report.consensus_on_correct is not None:
        rows.append(row("consensus on correct", report.consensus_on_correct))
    say(f"{report.problems} problems x {report.samples} samples")
    say(table(("measure", "value", f"{percent(report.confidence)} interval"), rows))
    say("verdicts: " + ", ".join(f"{kind} {count}" for kind, count in report.verdicts.items()))


@app.command()
def check(
    team_file: Annotated[Path, typer.Argument(help="The team file (YAML).")],
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Look at a team file before training: keys, models, chat templates, data, and whether the radius can be seen.

    The last is measured: after a negligible change of the weights, the KL that rounding alone produces must stay
    under a tenth of the radius. In bf16 it usually does not.
    """
    from teamtr.build import build
    from teamtr.config import load_team_file
    from teamtr.preflight import measure_floors, require_visible
    from teamtr.show import say

    with _errors():
        workshop = build(load_team_file(team_file, overrides or ()))
        floors = measure_floors(workshop)
        require_visible(workshop, floors)
    task = workshop.task
    lines = [
        f"{team_file}: fine",
        f"  problems: {len(task.problems('train'))} to train on, {len(task.problems('test'))} held out",
        *(f"  {floor}" for floor in floors),
        *(f"  warning: {warning}" for warning in getattr(task, "warnings", ())),
        *(f"  warning: the grader failed {n} times: {why}" for why, n in getattr(task, "failures", {}).items()),
    ]
    say("\n".join(lines))
    if as_json:
        _emit({"ok": True, "floors": [asdict(f) for f in floors], "warnings": list(getattr(task, "warnings", ()))})


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe's team file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the ready team files, or print one: `teamtr recipes roles > roles.yaml`."""
    from teamtr.config import recipe_text
    from teamtr.config import recipes as all_recipes

    with _errors():
        if name is not None:
            sys.stdout.write(recipe_text(name))
            return
        found = all_recipes()
    if as_json:
        _emit({"recipes": {key: recipe.summary for key, recipe in found.items()}})
        return
    for key, recipe in found.items():
        sys.stdout.write(f"{key:<18} {recipe.summary}\n")


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write the team file.")] = Path("team.yaml"),
    recipe: Annotated[str, typer.Option(help="Which recipe to start from; see `teamtr recipes`.")] = "code-exchange",
    force: Annotated[bool, typer.Option(help="Overwrite a file that is there.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a team file to start from. It never overwrites one unless told to."""
    from teamtr.config import recipe_text
    from teamtr.show import say

    with _errors():
        text = recipe_text(recipe)
        if path.exists() and not force:
            _fail(f"{path} exists; choose another name, or --force", 2)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    say(f"wrote {path}; next: teamtr check {path}, then teamtr train {path}")
    if as_json:
        _emit({"path": str(path), "recipe": recipe})


lab = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Exact experiments on teams small enough to solve: nothing is sampled, so what fails here is wrong.",
)
app.add_typer(lab, name="lab")

Figure = Annotated[Path | None, typer.Option("--figure", help="Where to draw the figure (PNG).")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]


def _finish_lab(
    record: dict[str, Any], draw: Callable[..., Any], report: Any, figure: Path | None, as_json: bool
) -> None:
    from teamtr.show import say

    if figure is not None:
        try:
            draw(report, figure)
        except ImportError:
            _fail("figures need matplotlib: pip install 'teamtr[plot]'", 2)
        say(f"figure: {figure}")
    if as_json:
        _emit(record)


@lab.command()
def verify(
    teams: Annotated[int, typer.Option(min=1, help="Random teams.")] = 10000,
    seed: Seed = 0,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Check every statement of the paper, and ours, on random teams solved exactly; exit code 1 on a violation."""
    from teamtr.lab import figures
    from teamtr.lab import verify as labs
    from teamtr.show import say, table

    with _errors():
        report = labs.verify(teams=teams, seed=seed)
    record = report.as_json()
    rows = [
        (name, str(c["tested"]), str(c["violations"]), _figure(c["median_ratio"]), _figure(c["p99_ratio"]))
        for name, c in record["checks"].items()
    ]
    say(table(("statement", "tested", "violations", "median bound/true", "99th percentile"), rows))
    violations = sum(c["violations"] for c in record["checks"].values())
    say(f"{teams} teams, {len(rows)} statements, {violations} violations")
    _finish_lab(record, figures.draw_verify, report, figure, as_json)
    if violations:
        raise typer.Exit(1)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _exponent(fit: dict[str, float] | None) -> str:
    return "zero" if fit is None else f"{fit['exponent']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]"


@lab.command()
def roles(
    seeds: Annotated[int, typer.Option(min=2, help="Teams of each size.")] = 8,
    stages: Annotated[int, typer.Option(min=10, help="Stages of each run.")] = 40,
    radius: Annotated[float, typer.Option(help="KL that every update fills, nats per message.")] = 0.01,
    largest: Annotated[int, typer.Option(min=2, help="Team sizes run from 2 to this.")] = 12,
    seed: Seed = 0,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Exactly one of n must volunteer, blind: exact updates from fresh and from stale occupancies."""
    from teamtr.lab import figures
    from teamtr.lab import roles as labs
    from teamtr.show import say, table

    with _errors():
        report = labs.roles(ns=range(2, largest + 1), seeds=seeds, stages=stages, radius=radius, seed=seed)
    rows = labs.table(report, sizes=report.n)
    say(table(list(rows[0]), [[_figure(value) for value in row.values()] for row in rows]))
    _finish_lab(report.as_record(), figures.draw_roles, report, figure, as_json)


@lab.command()
def scaling(seed: Seed = 0, figure: Figure = None, as_json: JsonFlag = False) -> None:
    """How stale gaps and drift grow with the number of agents, in several families of games, with fitted exponents."""
    from teamtr.lab import figures
    from teamtr.lab import scaling as labs
    from teamtr.show import say, table

    with _errors():
        report = labs.scaling(seed=seed)
    record = report.as_record()
    header = ("family", "rule", "order", "gap ~ n^", "as claimed", "drift ~ n^", "as claimed")
    rows = [
        (
            f["family"],
            f["rule"],
            f["order"],
            _exponent(f["tail"]["gap"]),
            str(f["verdicts"]["gap"]),
            _exponent(f["tail"]["drift"]),
            str(f["verdicts"]["drift"]),
        )
        for f in record["families"]
    ]
    say(f"{table(header, rows)}\n\n{record['note']}")
    _finish_lab(record, figures.draw_scaling, report, figure, as_json)


@lab.command()
def tightness(
    teams: Annotated[int, typer.Option(min=10, help="Random teams of each kind.")] = 2000,
    seed: Seed = 0,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """How often a certificate is positive for a step that truly improves: the paper's, and ours."""
    from teamtr.lab import figures
    from teamtr.lab import tightness as labs
    from teamtr.show import percent, say, table

    with _errors():
        report = labs.tightness(teams=teams, seed=seed)
    record = report.as_record()
    kinds = list(record["rows"][0]["certified"])
    rows = [
        (
            str(r["turns"]),
            r["direction"],
            str(r["improving"]),
            *(percent(r["certified"][k]) for k in kinds),
            str(sum(r["violated"].values())),
        )
        for r in record["rows"]
    ]
    say("share of truly improving steps whose certified lower bound is positive")
    say(table(("turns", "direction", "improving", *kinds, "violations"), rows))
    _finish_lab(record, figures.draw_tightness, report, figure, as_json)


@app.callback()
def _about(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        from teamtr import __version__

        sys.stdout.write(f"teamtr {__version__}\n")
        raise typer.Exit


def main() -> None:
    app()


if __name__ == "__main__":
    main()
