"""``teamtr figures``: draws the paper's figures from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from teamtr.cli.common import JsonFlag, app, emit, errors, fail


@app.command()
def figures(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are drawn together.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    only: Annotated[list[str] | None, typer.Option(help="Only this figure; may be given several times.")] = None,
    form: Annotated[
        list[str] | None,
        typer.Option("--format", help="Besides SVG, also `pdf` or `png`; may be given several times."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw our versions of the paper's figures from logs: an SVG and a CSV for each, and one page with all of them.

    If a log lacks the data for a figure, the command names the setting that would log it and draws the other figures.
    The exit code is 1 if none could be drawn.
    """
    from teamtr.analysis.figures import FORMS, hang, read_runs
    from teamtr.cli.terminal import say

    known = [each for each in FORMS if each in (form or ())]
    for each in form or ():
        if each not in FORMS:
            fail(f"--format is {', '.join(FORMS)}, not {each!r}", 2)
    with errors():
        try:
            gallery = hang(read_runs(runs), out, only or (), known)
        except ImportError:
            fail("figures need matplotlib: pip install 'teamtr[plot]'", 2)
    for figure, _ in gallery.drawn:
        say(", ".join(f"{figure.name}: {out / figure.name}.{each}" for each in dict.fromkeys(("svg", *known))))
    for figure, why in gallery.lacking:
        say(f"{figure.name}: not drawn: {why}")
    say(f"figures: {out / 'index.html'}")
    if as_json:
        emit(
            {
                "folder": str(out),
                "drawn": [figure.name for figure, _ in gallery.drawn],
                "formats": list(dict.fromkeys(("svg", *known))),
                "lacking": {figure.name: {"what": why.what, "remedy": why.remedy} for figure, why in gallery.lacking},
            }
        )
    if not gallery.drawn:
        raise typer.Exit(1)
