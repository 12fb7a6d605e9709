"""``teamtr doctor``: report what this machine offers, and what is degraded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from teamtr.cli.common import JsonFlag, answer, app, emit, errors


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="Where runs would be written.")] = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Report what this machine offers (versions, devices, kernels, sandbox, disk), and what is degraded and why.

    It changes nothing and needs no team file. Add its output to bug reports. The exit code is 0 even if something is
    degraded: training works, but slower, with less protection, or without an extra.
    """
    from dataclasses import asdict

    with errors():
        from teamtr.session.doctor import examine

        findings = examine(folder)
    from teamtr.cli.progress import table

    degraded = [finding for finding in findings if finding.degraded is not None]
    rows = [(f.area, f.what, f.found, "" if f.degraded is None else "degraded") for f in findings]
    lines = [table(("area", "what", "found", ""), rows), ""]
    lines += [f"degraded: {f.what}: {f.degraded}" for f in degraded] or ["nothing is degraded here"]
    answer("\n".join(lines), as_json)
    if as_json:
        emit({"findings": [asdict(f) for f in findings], "degraded": [asdict(f) for f in degraded]})
