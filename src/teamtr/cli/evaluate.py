"""``teamtr eval``: evaluate a run, a team file or inference-time methods."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from teamtr.cli.common import CheckpointOption, JsonFlag, answer, app, checkpoint_of, emit, errors, read_team_file
from teamtr.cli.complete import agents_of_run, dotted_keys, method_names
from teamtr.cli.methods import told_methods, told_seeds, told_tasks

if TYPE_CHECKING:
    from teamtr.baselines import Method
    from teamtr.evaluation.evaluate import Scores
    from teamtr.reports import EvalReport, Interval, LabelScores
    from teamtr.session.build import Session
    from teamtr.session.comparison import Compared
    from teamtr.team import Team


PANEL: Any = {"rich_help_panel": "Settings of methods"}


@app.command("eval")
def evaluate(
    run: Annotated[str | None, typer.Argument(help="A run folder; none with --team.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="With --team: settings to change, such as `eval.samples=8`. With a run: another task instead of its "
            "own, such as `task.name=math500 task.test=math500.jsonl`, its `device`, or where its models are now.",
            autocompletion=dotted_keys,
        ),
    ] = None,
    team: Annotated[
        Path | None, typer.Option(help="Instead of a run: a team file, whose models are evaluated untrained.")
    ] = None,
    checkpoint: CheckpointOption = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Several tasks in one table, the option repeated: `own` (the run's), a name such as `gsm8k`, or a "
            "whole section such as `{name: math500, test: math500.jsonl}`."
        ),
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
    show: Annotated[
        int | None,
        typer.Option(
            min=0, help="Conversations that are shown, right and wrong in turn. [default: 2; with --method none]"
        ),
    ] = None,
    regrade: Annotated[bool, typer.Option("--regrade", help="Sample nothing; grade the stored replies again.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where replies are stored. [default: `evals` in the run, or `evals/NAME`]")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a team on held-out problems: avg@K, unbiased pass@K and pass^K, majority and consensus, with confidence
    intervals, and tables by subject or size.

    Replies are stored as they are sampled, so the same command resumes a killed evaluation, and `--regrade` grades them
    again without sampling. `--method` compares ways to prompt the same models by accuracy, tokens and seconds. `--task
    own --task gsm8k` evaluates on several tasks, in one table; `--show` sets how many conversations are shown.
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
        if team is not None and run is not None:  # there is no run, so the first argument is a setting too
            changes, run = [run, *changes], None
        if run is None and team is None:
            raise UserError("say what to evaluate: a run folder, or a team file with --team")
        if run is not None and Path(run).is_file():
            raise UserError(f"{run} is a file, not a run folder: for untrained models, give --team {run}")
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
        if task and changes:
            raise UserError(
                f"{changes[0]} and --task both choose a task: write all of them as --task, with their keys as "
                "--task '{name: data, path: FILE}'"
            )
        if task and method is not None:
            raise UserError("--task and --method give different tables: use one of them")
        if checkpoint is not None and team is not None:
            raise UserError("--checkpoint is of a run: a team file has untrained models")
        from teamtr.cli.samples import sample_record, told_samples
        from teamtr.cli.terminal import say

        ask = _Ask(
            asked,
            split=split,
            limit=limit,
            samples=samples,
            temperature=temperature,
            agent=agent,
            max_tokens=max_tokens,
            seeds=seeds,
            budget=budget_tokens,
            regrade=regrade,
            labelled=method is not None,
        )
        source = _Source(run, team, checkpoint_of(checkpoint))
        found = [ask.of(source.open(wanted), out, apart=bool(task)) for wanted in (_tasks(task) if task else [changes])]
    for each in found:
        if each.kept:
            say(f"{each.kept} of {each.replies} replies were already stored in {each.where}")
    record: dict[str, Any]
    if task:
        answer(told_tasks([(each.task, each.compared[0]) for each in found]), as_json)
        record = {"tasks": [{"task": each.task, **each.compared[0].as_record()} for each in found]}
    elif method is not None:
        answer(told_methods(found[0].compared), as_json)
        record = {"methods": [each.as_record() for each in found[0].compared], "budget_tokens": budget_tokens}
    elif seeds > 1:
        from teamtr.evaluation.metrics import figures_over_seeds

        reports = found[0].compared[0].reports
        figures = figures_over_seeds(reports)
        answer(told_seeds(reports, figures), as_json)
        record = {
            "over_seeds": {name: figure._asdict() for name, figure in figures.items()},
            "seeds": [report.as_record() for report in reports],
            "folders": found[0].folders,
        }
    else:
        [report] = found[0].compared[0].reports
        answer(_told(report), as_json)
        record = {**report.as_record(), "folder": found[0].folders[0]}
    shown: list[dict[str, Any]] = []
    count = show if show is not None else 0 if method else 2
    for each in found:
        for compared in each.compared:
            label = each.task if task else compared.method.name if method else ""
            looked_at = compared.runs[0].samples(count)
            shown += [{"of": label, **sample_record(sample)} for sample in looked_at]
            if looked_at:
                answer(told_samples(looked_at, label), as_json)
    if as_json:
        failures: Counter[str] = Counter()
        for each in found:
            failures.update(each.failures)
        spent = {"tokens": sum(each.tokens for each in found), "grader_failures": dict(failures)}
        emit({**record, "samples_shown": shown, "updates": found[0].updates, **spent})


def _tasks(given: list[str]) -> list[list[str]]:
    """The settings that select each task; an empty list for the run's own."""
    found = []
    for text in given:
        if text == "own":
            found.append(list[str]())
        else:
            section = text if text.lstrip().startswith("{") else f"{{name: {json.dumps(text)}}}"
            found.append([f"task={section}"])
    return found


@dataclass(frozen=True)
class _Opened:
    """A session and its team, the folder of its evaluations, and how far the team is trained."""

    session: Session
    team: Team
    evals: Path
    stage: int
    updates: int


@dataclass(frozen=True)
class _Source:
    """The models to evaluate: those of a run at a checkpoint, or those of a team file."""

    run: str | None
    team: Path | None
    checkpoint: int | Literal["best"] | None

    def open(self, changes: list[str]) -> _Opened:
        """Open with these settings: any for a team file; for a run, another task, device or location of its models."""
        if self.team is not None:
            settings = read_team_file(self.team, changes)
            from teamtr.session.build import build

            session = build(settings)
            return _Opened(session, session.current_team(), Path("evals") / settings.name, 0, 0)
        assert self.run is not None
        from teamtr.config import is_of_task
        from teamtr.session.resume import StoredRun

        stored, evals = StoredRun.read(Path(self.run), self.checkpoint), Path(self.run) / "evals"
        stored = stored.changed(changes)
        if any(map(is_of_task, changes)):
            evals /= _as_folder(stored.team_file.task.name)
        session, members = stored.build()
        if self.checkpoint is not None:
            from teamtr.cli.terminal import say

            begun = int(stored.commit.progress["stage"]) + (int(stored.commit.progress["done"]) > 0)
            say(f"checkpoint {stored.commit.number}, stage {begun}")  # counted as in the output of `teamtr train`
        return _Opened(session, members, evals, int(stored.commit.progress["stage"]), stored.commit.number)


@dataclass(frozen=True)
class _Found:
    """The results of evaluating one task."""

    task: str
    compared: tuple[Compared, ...]
    where: Path
    updates: int
    tokens: int
    failures: Mapping[str, int]

    @property
    def folders(self) -> list[str]:
        return [str(folder) for each in self.compared for folder in each.folders]

    @property
    def kept(self) -> int:
        return sum(run.kept for each in self.compared for run in each.runs)

    @property
    def replies(self) -> int:
        return sum(run.spent.answers for each in self.compared for run in each.runs)


class _Ask:
    """The settings of an evaluation that do not depend on the task."""

    def __init__(
        self,
        methods: Sequence[Method],
        *,
        seeds: int,
        budget: int | None,
        regrade: bool,
        labelled: bool,
        **settings: Any,
    ) -> None:
        self.methods, self.seeds, self.budget, self.regrade = methods, seeds, budget, regrade
        self.labelled, self.settings = labelled, settings

    def of(self, opened: _Opened, out: Path | None, *, apart: bool) -> _Found:
        """Evaluate an opened team. ``apart``: each task has its own folder in ``out``."""
        from teamtr.cli.terminal import say
        from teamtr.rollout import Ledger
        from teamtr.session.comparison import Comparison
        from teamtr.session.evaluations import Evaluation

        session, ledger = opened.session, Ledger()
        task = session.team_file.task.name
        where = opened.evals if out is None else out / _as_folder(task) if apart else out
        for warning in session.task.warnings:
            say(f"warning: {warning}")
        evaluation = partial(Evaluation.of, session, opened.team, where, stage=opened.stage, **self.settings)
        compared = Comparison(evaluation, self.methods, self.seeds, self.budget).run(
            regrade=self.regrade,
            ledger=ledger,
            progress=lambda each: partial(_say_progress, each.name if self.labelled else ""),
            tell=say,
        )
        for line in session.task.printed.take().splitlines():
            say(f"reward: {line}")
        folders = [folder for each in compared for folder in each.folders]
        tokens = sum(ledger.sampled_tokens.values())
        one = folders[0] if len(folders) == 1 else where
        session.engine.close()
        return _Found(task, compared, one, opened.updates, tokens, dict(session.task.failures))


def _as_folder(task: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in task)


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
    # Equal rewards outside [0, 1] whose range is not given: no interval would be meaningful.
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
