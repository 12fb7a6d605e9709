"""``teamtr eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from teamtr.cli.common import JsonFlag, app, emit, errors


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

    with errors():
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
        emit({**report.as_record(), "updates": commit.number, "tokens": sum(ledger.sampled_tokens.values())})


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
