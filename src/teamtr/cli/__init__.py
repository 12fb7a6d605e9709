"""The commands, one module each. The only room that sees every other."""

import sys
from typing import Annotated

import typer

from teamtr.cli import demo, evaluate, figures, files, grade, lab, plan, report, swap, train  # noqa: F401 (importing a module registers its commands)
from teamtr.cli.common import app

__all__ = ["app", "main"]


@app.callback()
def _about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from teamtr.version import __version__

        sys.stdout.write(f"teamtr {__version__}\n")
        raise typer.Exit


def main() -> None:
    app(prog_name="teamtr")
