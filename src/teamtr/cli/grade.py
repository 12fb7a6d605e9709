"""``teamtr grade``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from teamtr.cli.common import JsonFlag, answer, app, emit, errors


@app.command()
def grade(
    task: Annotated[
        str, typer.Argument(help="The task whose grader to use: `math500`, `zebralogic`, `gym:chain_sum`, ...")
    ],
    responses: Annotated[Path, typer.Option(help="The replies: rows with `response` and `id`, or a problem's fields.")],
    out: Annotated[Path, typer.Option(help="Where to write the rows with `verdict`, `reward` and `extracted`.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="File or hub id with the problems that `id` refers to (tau-bench: a folder); repeatable."),
    ] = None,
    grader: Annotated[
        str | None, typer.Option(help="For mathematics: default, deepscaler, dapo, last_number; gsm8k: official.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Grade stored replies as a benchmark does, without any model.

    A row that cannot be read, or that names no problem, is an error with its line number, and nothing is written. A
    reply that states no answer is `unparsed`. Where problems have several replies, pass@k and pass^k are told over
    those with k or more. Dialogues of tau-bench are read as that benchmark stores them (`task_id` and `traj`), with its
    folder as `--data`.
    """
    from teamtr.cli.terminal import say
    from teamtr.evaluation.metrics import of_trials
    from teamtr.tasks.data.replies import grade_file

    with errors():
        graded = grade_file(task, responses, out, data=data or (), grader=grader)
    for warning in graded.warnings:
        say(f"warning: {warning}")
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
