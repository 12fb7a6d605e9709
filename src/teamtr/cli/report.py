"""Commands to inspect runs: ``teamtr report``, ``view``, ``compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from teamtr.cli.common import JsonFlag, app, emit, errors, fail
from teamtr.cli.terminal import json_line, write

FORMATS = ("html", "md", "json")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    form: Annotated[str, typer.Option("--format", help="`html`, `md` or `json`.")] = "html",
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: `RUN/report.html`, or stdout for md and json]")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what training did: one self-contained HTML file with plots and conversations.

    It answers five questions: does the team improve, is each update inside its trust region, would stale rollouts have
    misjudged it, what do the agents say to each other, and what did it cost. It also works while a run is training.
    """
    from teamtr.analysis.report import build_report, plain, report_page, report_text
    from teamtr.cli.terminal import say
    from teamtr.store import write_atomic

    if form not in FORMATS:
        fail(f"--format is {', '.join(FORMATS)}, not {form!r}", 2)
    with errors():
        built = build_report(run)
        if form == "html":
            text = report_page(built)
        elif form == "md":
            text = report_text(built.data)
        else:
            text = json_line(plain(built.data)) + "\n"
        target = out or (run / "report.html" if form == "html" else None)
        if target is not None:
            write_atomic(target, text.encode())
    if target is None:
        write(text.removesuffix("\n"), sys.stdout)
        return
    for note in built.data["notes"]:
        say(f"note: {note}")
    say(f"report: {target}")
    if as_json:
        emit({"path": str(target), "bytes": len(text.encode()), "notes": built.data["notes"]})


@app.command()
def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of runs. [default: `runs`]")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 0,
    allow_remote: Annotated[bool, typer.Option(help="Allow a --host that other machines can reach.")] = False,
) -> None:
    """Watch runs in a browser while they train. Prints a link that contains a secret token; Ctrl-C stops the server.

    The server only reads, takes no lock, and loads batches on demand. By default only this machine can reach it, and
    only with the link.
    """
    from teamtr.analysis.report.serve import Library, LiveServer
    from teamtr.cli.terminal import say

    folders = runs or [Path("runs")]
    with errors():
        for folder in folders:
            if runs and not folder.is_dir():
                fail(f"there is no folder {folder}: check the path", 2)
        with LiveServer(Library(folders), host=host, port=port, allow_remote=allow_remote) as server:
            write(server.link, sys.stdout)
            say("open the link above; Ctrl-C to stop")
            server.serve_forever()
            say("closed")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the others are compared with the first.")],
    form: Annotated[str, typer.Option("--format", help="Output format: `text` or `md`.")] = "text",
    out: Annotated[Path | None, typer.Option(help="Write the comparison as one HTML file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare runs by sampled tokens: final success with a paired interval, and the settings that differ."""
    from teamtr.analysis.report import compare_page, compare_runs, comparison_tables, comparison_text, plain
    from teamtr.cli.progress import table
    from teamtr.cli.terminal import say
    from teamtr.store import write_atomic

    if form not in ("text", "md"):
        fail(f"--format is text or md, not {form!r}", 2)
    with errors():
        comparison = compare_runs(runs)
        if out is not None:
            write_atomic(out, compare_page(comparison).encode())
    if as_json:
        emit(plain(comparison))
    elif form == "md":
        write(comparison_text(comparison).removesuffix("\n"), sys.stdout)
    else:
        tables = [table(*each) for each in comparison_tables(comparison)]
        write("\n\n".join([*tables, *(f"note: {note}" for note in comparison["notes"])]), sys.stdout)
    if out is not None:
        say(f"comparison: {out}")
