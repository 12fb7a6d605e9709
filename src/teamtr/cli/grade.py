"""``teamtr grade``: grade stored replies without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from teamtr.cli.common import JsonFlag, answer, app, emit, errors
from teamtr.errors import UserError


def task_options(name: str, settings: Sequence[str]) -> dict[str, Any]:
    """The task arguments that these settings give; they are checked as in a team file."""
    from teamtr.config import loads
    from teamtr.settings.refusals import hint
    from teamtr.tasks import TaskContext
    from teamtr.tasks.config import BenchmarkConfig
    from teamtr.tasks.registry import section_class

    keys = [setting.partition("=")[0].strip() for setting in settings]
    for key in keys:
        if not key.startswith("task.") or key in ("task.name", "task.path", "task.train", "task.test", "task.held_out"):
            raise UserError(f"{key}: settings are the task's, such as task.answer=gold; the data is given with --data")
    section = section_class(name)
    if not settings or section is None:
        return {}
    for path in keys:
        if (key := path.split(".")[1]) not in section.model_fields:
            raise UserError(f"task {name} has no option {key!r}{hint(key, sorted(section.model_fields), 'it has')}")
    here = ", path: '-'" if issubclass(section, BenchmarkConfig) else ""
    text = f"name: grade\ntask: {{name: {json.dumps(name)}{here}}}\nteam: {{model: tiny, agents: [{{name: team}}]}}\n"
    made = loads(text, "the settings", settings).task.arguments(TaskContext(0, ("team",)))
    return {key: made[key] for path in keys if (key := path.split(".")[1]) in made}


@app.command()
def grade(
    task: Annotated[
        str, typer.Argument(help="The task whose grader to use: `data`, `math500`, `zebralogic`, `gym:chain_sum`, ...")
    ],
    responses: Annotated[Path, typer.Option(help="The replies: rows with `response` and `id`, or a problem's fields.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of the task, as in a team file: `task.answer=gold`.", show_default=False),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Where to write the rows with `verdict`, `reward` and `extracted`.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="File, folder or hub id with the problems that `id` refers to; repeatable."),
    ] = None,
    grader: Annotated[
        str | None,
        typer.Option(
            help="For data: exact, number, regex, python:FILE:FUNCTION; for mathematics: default, deepscaler, dapo, "
            "last_number; gsm8k: official."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Grade stored replies as a benchmark does, without any model.

    A row that cannot be read, or that names no problem, is an error with its line number, and nothing is written. A
    reply without an answer is `unparsed`. If problems have several replies, pass@k and pass^k are computed over the
    problems with k or more. Your own data is graded as `data`, with the settings of a team file. Dialogues of tau-bench
    are read in that benchmark's format (`task_id` and `traj`), with its folder as `--data`.
    """
    from teamtr.cli.terminal import say
    from teamtr.evaluation.metrics import of_trials
    from teamtr.tasks.data.replies import grade_file

    with errors():
        options = task_options(task, [*(settings or []), *([] if grader is None else [f"task.grader={grader}"])])
        graded = grade_file(task, responses, out, data=data or (), options=options)
    for warning in (*graded.warnings, *(f"the grader failed {n} times: {why}" for why, n in graded.failures.items())):
        say(f"warning: {warning}")
    for line in graded.printed.splitlines():
        say(f"reward: {line}")
    verdicts = ", ".join(f"{kind} {count}" for kind, count in graded.verdicts.items())
    told = f"{100 * graded.accuracy:.1f} % right, mean reward {graded.mean_reward:.3f}"
    answer(f"{graded.rows} replies: {verdicts}; {told}", as_json)
    passed = {k: value for k, value in of_trials(graded.trials.values()).items() if k > 1}
    for k, value in passed.items():
        of = f"{value.problems} of {len(graded.trials)} problems, those with {k} replies or more"
        answer(f"pass@{k} {100 * value.pass_at_k:.1f} %, pass^{k} {100 * value.pass_hat_k:.1f} % ({of})", as_json)
    if as_json:
        emit(
            {
                "task": task,
                "rows": graded.rows,
                "accuracy": graded.accuracy,
                "mean_reward": graded.mean_reward,
                "verdicts": dict(graded.verdicts),
                "problems": len(graded.trials),
                "passed": {str(k): asdict(value) for k, value in passed.items()},
                "out": str(out),
            }
        )
