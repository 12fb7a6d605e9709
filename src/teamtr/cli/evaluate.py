"""``teamtr eval``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teamtr.cli.common import JsonFlag, answer, app, emit, errors, read_team_file
from teamtr.cli.complete import agents_of_run, dotted_keys, method_names
from teamtr.cli.methods import told_methods, told_seeds

if TYPE_CHECKING:
    from teamtr.evaluation.evaluate import Scores
    from teamtr.reports import EvalReport, Interval, LabelScores
    from teamtr.session.build import Session
    from teamtr.team import Team


PANEL: Any = {"rich_help_panel": "Settings of methods"}


@app.command("eval")
def evaluate(
    run: Annotated[
        str | None, typer.Argument(help="A run folder, whose latest checkpoint is evaluated; none with --team.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="With --team: settings to change, such as `eval.samples=8`. With a run: another task instead of its "
            "own, such as `task.name=math500 task.test=math500.jsonl`.",
            autocompletion=dotted_keys,
        ),
    ] = None,
    team: Annotated[
        Path | None, typer.Option(help="Instead of a run: a team file, whose models are evaluated untrained.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which problems: test or train.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Evaluate only the first problems, this many.")] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes per problem. [default: the team file's, else the paper's K]"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy. [default: the team file's]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Evaluate with this many seeds: mean and deviation over them.")] = 1,
    method: Annotated[
        str | None,
        typer.Option(
            help="Inference-time methods, separated by commas, instead of the team as written (`team`): "
            "`team,self_consistency,debate`. Later ones are compared with the first.",
            autocompletion=method_names,
        ),
    ] = None,
    budget_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With --method: each draws as many tries as take about these tokens per answer."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="With --method: the agent that plays every role. [default: the one that answers, or all in turn]",
            autocompletion=agents_of_run,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --method: most tokens of a message. [default: the agent's]")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Of debate, judged_debate, role_play.", **PANEL)] = None,
    debaters: Annotated[int | None, typer.Option(min=1, help="Of debate, judged_debate: speakers.", **PANEL)] = None,
    judge: Annotated[str | None, typer.Option(help="Of judged_debate: the agent that judges.", **PANEL)] = None,
    roles: Annotated[str | None, typer.Option(help="Of role_play: names, separated by commas.", **PANEL)] = None,
    votes: Annotated[int | None, typer.Option(min=1, help="Of self_consistency: answers that vote.", **PANEL)] = None,
    weighted: Annotated[
        bool | None, typer.Option("--weighted", help="Of self_consistency: weight votes by likelihood.", **PANEL)
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Of best_of_n: answers to choose from.", **PANEL)
    ] = None,
    verifier: Annotated[str | None, typer.Option(help="Of best_of_n: the agent that rates them.", **PANEL)] = None,
    breadth: Annotated[
        int | None, typer.Option(min=1, help="Of tree_of_thoughts: continuations of every path.", **PANEL)
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Of tree_of_thoughts: steps.", **PANEL)] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="Of tree_of_thoughts: paths that are kept.", **PANEL)] = None,
    regrade: Annotated[bool, typer.Option("--regrade", help="Sample nothing; grade the stored replies again.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where replies are stored. [default: `evals` in the run, or `evals/NAME`]")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a team on held-out problems: avg@K, unbiased pass@K and pass^K, majority and consensus, with
    confidence intervals, and tables by subject or size.

    Replies are stored as they come, so the same command resumes a killed evaluation, and `--regrade` grades them again
    without sampling. `--method` compares ways to ask the same models: accuracy, tokens and seconds side by side.
    """
    chosen = {
        "rounds": rounds,
        "debaters": debaters,
        "judge": judge,
        "roles": None if roles is None else tuple(role.strip() for role in roles.split(",")),
        "votes": votes,
        "weighted": weighted,
        "candidates": candidates,
        "verifier": verifier,
        "breadth": breadth,
        "depth": depth,
        "beam": beam,
    }
    settings = {name: value for name, value in chosen.items() if value is not None}
    with errors():
        from teamtr.errors import UserError

        changes = changes or []
        if team is not None and run is not None:  # there is no run, so that the first word is a setting too
            changes, run = [run, *changes], None
        if run is None and team is None:
            raise UserError("say what to evaluate: a run folder, or a team file with --team")
        for change in changes:
            if "=" not in change:
                what = "a team file with --team or a run folder, not both" if team else "one run folder"
                raise UserError(f"{change!r} is no setting (KEY=VALUE): give {what}")
        for_methods = {"--budget-tokens": budget_tokens, "--agent": agent, "--max-tokens": max_tokens}
        given = [name for name, value in for_methods.items() if value is not None]
        given += [f"--{name}" for name in settings]
        if given and method is None:
            raise UserError(f"{given[0]} goes with --method: say which, such as --method self_consistency")
        from teamtr.baselines import make_methods

        asked = make_methods([name.strip() for name in (method or "team").split(",")], settings)
        session, members, evals, stage, updates = _opened(run, team, changes)
        from teamtr.cli.terminal import say
        from teamtr.evaluation.metrics import figures_over_seeds
        from teamtr.rollout import Ledger
        from teamtr.session.comparison import Comparison
        from teamtr.session.evaluations import Evaluation

        for warning in session.task.warnings:
            say(f"warning: {warning}")
        ledger = Ledger()
        evaluation = partial(
            Evaluation.of,
            session,
            members,
            out or evals,
            stage=stage,
            split=split,
            limit=limit,
            samples=samples,
            temperature=temperature,
            agent=agent,
            max_tokens=max_tokens,
        )
        compared = Comparison(evaluation, asked, seeds, budget_tokens).run(
            regrade=regrade,
            ledger=ledger,
            progress=lambda each: partial(_say_progress, each.name if method else ""),
            tell=say,
        )
    for line in session.task.printed.take().splitlines():
        say(f"reward: {line}")
    runs = [run for each in compared for run in each.runs]
    folders = [str(folder) for each in compared for folder in each.folders]
    if kept := sum(run.kept for run in runs):
        replies = sum(run.spent.answers for run in runs)
        where = folders[0] if len(folders) == 1 else out or evals
        say(f"{kept} of {replies} replies were already stored in {where}")
    record: dict[str, Any]
    spent = {"tokens": sum(ledger.sampled_tokens.values()), "grader_failures": dict(session.task.failures)}
    if method is not None:
        answer(told_methods(compared), as_json)
        record = {"methods": [each.as_record() for each in compared], "budget_tokens": budget_tokens}
    elif seeds > 1:
        figures = figures_over_seeds(compared[0].reports)
        answer(told_seeds(compared[0].reports, figures), as_json)
        record = {
            "over_seeds": {name: figure._asdict() for name, figure in figures.items()},
            "seeds": [report.as_record() for report in compared[0].reports],
            "folders": folders,
        }
    else:
        [report] = compared[0].reports
        answer(_told(report), as_json)
        record = {**report.as_record(), "folder": folders[0]}
    if as_json:
        emit({**record, "updates": updates, **spent})


def _opened(run: str | None, team: Path | None, changes: list[str]) -> tuple[Session, Team, Path, int, int]:
    """What plays, who plays it, where its evaluations are kept, and how far it is trained: stages, updates."""
    if team is not None:
        settings = read_team_file(team, changes)
        from teamtr.session.build import build

        session = build(settings)
        return session, session.current_team(), Path("evals") / settings.name, 0, 0
    assert run is not None
    from teamtr.session.resume import StoredRun

    stored, evals = StoredRun.read(Path(run)), Path(run) / "evals"
    if changes:
        stored = stored.on_another_task(changes)
        evals /= "".join(c if c.isalnum() else "-" for c in stored.team_file.task.name)
    session, members = stored.build()
    return session, members, evals, int(stored.commit.progress["stage"]), stored.commit.number


def _say_progress(method: str, done: int, of: int, scores: Scores) -> None:
    from teamtr.cli.terminal import say
    from teamtr.cli.words import percent

    verdicts = [verdict.right for row in scores.verdicts_PK for verdict in row]
    right = percent(sum(verdicts) / len(verdicts))
    label = f"{method}: " if method else ""
    say(f"{label}{done}/{of} problems; of the last {len(scores.verdicts_PK)}: {right} right")


def _told(report: EvalReport) -> str:
    from teamtr.cli.progress import table
    from teamtr.cli.words import percent

    def row(name: str, value: float, interval: Interval | None = None) -> tuple[str, str, str]:
        between = f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}" if interval else ""
        return name, f"{100 * value:.1f} %", between

    rows = [row(f"avg@{report.samples}", report.avg_at_k, report.avg_interval)]
    rows += [row(f"pass@{k}", value, report.pass_intervals[k]) for k, value in report.pass_at_k.items()]
    rows += [row(f"pass^{k}", value, report.pass_hat_intervals[k]) for k, value in report.pass_hat_k.items() if k > 1]
    rows.append(row(f"majority@{report.samples}", report.majority_at_k, report.majority_interval))
    if report.consensus_on_correct is not None:
        rows.append(row("consensus on correct", report.consensus_on_correct))
    rows += [row(name.replace("_", " "), *figure) for name, figure in report.measures.items()]
    low, high = report.reward_interval
    # Equal rewards outside of [0, 1], whose range nobody told: there is no interval that would say anything.
    rows.append(("mean reward", f"{report.mean_reward:.3f}", f"{low:.3f} to {high:.3f}" if low < high else ""))
    return "\n".join(
        [
            f"{report.problems} problems x {report.samples} samples",
            table(("measure", "value", f"{percent(report.confidence)} interval"), rows),
            *("\n" + table(*_breakdown(name, report.samples, parts)) for name, parts in report.tables.items()),
            "verdicts: " + ", ".join(f"{kind} {count}" for kind, count in report.verdicts.items()),
        ]
    )


def _breakdown(
    name: str, samples: int, parts: Mapping[str, LabelScores]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = (name, "problems", f"avg@{samples}", "interval", f"pass@{samples}")
    rows: list[tuple[str, ...]] = []
    for value, part in parts.items():
        low, high = part.avg_interval
        right, found = f"{100 * part.avg_at_k:.1f} %", f"{100 * part.pass_at_k:.1f} %"
        rows.append((value, str(part.problems), right, f"{100 * low:.1f} to {100 * high:.1f}", found))
    return header, rows
