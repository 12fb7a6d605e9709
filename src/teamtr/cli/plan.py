"""``teamtr plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from teamtr.cli.common import JsonFlag, Overrides, answer, app, emit, errors, read_team_file


@app.command()
def plan(
    team_file: Annotated[Path, typer.Argument(help="The team file (YAML).")],
    overrides: Overrides = None,
    rehearse: Annotated[bool, typer.Option(help="Also run the longest step, and undo it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Estimate the memory that a team needs: weights, KV blocks, optimizer state, the largest step; and its sizes.

    `--rehearse` runs the longest possible step of every agent and compares the plan with the memory used. On a GPU,
    `teamtr train` does the same when it starts or resumes, and logs the peak of every stage next to the plan.

    It also prints what the run will spend on training (with `plan.match`, beside what the preset teamtr would), the
    trained parameters of every agent, and the LoRA rank at which a single agent would train as many as the team.
    """
    with errors():
        settings = read_team_file(team_file, overrides)
        from teamtr.cli.progress import table
        from teamtr.session.budget import budget_lines, parameter_lines, sizes_record
        from teamtr.session.build import build
        from teamtr.session.memory import GB, plan_memory
        from teamtr.session.memory import rehearse as try_it

        session = build(settings, taught=False)
        planned = plan_memory(session)
        tried = try_it(session) if rehearse else None
    rows = [(item.what, f"{item.gb:.3g}", item.why) for item in planned.items]
    rows.append(("in all", f"{planned.total / GB:.3g}", "" if planned.available is None else "of the GPU's memory:"))
    if planned.available is not None:
        rows.append(("available", f"{planned.available / GB:.3g}", "fits" if planned.fits else "DOES NOT FIT"))
    answer(table(("what", "GB", ""), rows), as_json)
    answer("\n".join([*budget_lines(session), *parameter_lines(session)]), as_json)
    if tried is not None:
        peak = "no figure on a CPU" if tried["peak_gb"] is None else f"peak {tried['peak_gb']:.3g} GB"
        sizes = ", ".join(f"{k} {v}" for k, v in tried["micro_batch"].items())
        answer(f"rehearsed: {peak}; messages at a time: {sizes}", as_json)
    if as_json:
        emit({**planned.as_record(), "rehearsed": tried, **sizes_record(session)})
