"""The commands, one module each. This is the only package that may import every other."""

import atexit
import gc
import sys
from typing import Annotated

import typer

from teamtr.cli import (  # noqa: F401 (importing a module registers its commands)
    chat,
    demo,
    doctor,
    evaluate,
    export,
    figures,
    files,
    grade,
    lab,
    plan,
    report,
    reproduce,
    serve,
    swap,
    sweep,
    train,
)
from teamtr.cli.common import app
from teamtr.cli.terminal import write, write_traceback

__all__ = ["app", "main"]

COLLECT_FIRST, COLLECT_EVERY = 1_000_000, 20_000
"""Number of objects allocated and not freed at which garbage collection runs, the first time and afterwards; Python's
default is 700. The half million objects that importing torch and transformers creates live until the end; traversing
them took a tenth of the time of these imports."""


@app.callback()
def _about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from teamtr.version import __version__

        write(f"teamtr {__version__}", sys.stdout)
        raise typer.Exit


def main() -> None:
    """Run the command line. An unexpected exception ends with its traceback and exit code 1, as in any program, but
    without control codes that would affect the terminal."""
    if sys.platform == "win32":
        write(
            "error: teamtr runs on Linux and macOS, not on Windows: use the Windows Subsystem for Linux (WSL)",
            sys.stderr,
        )
        sys.exit(2)
    _collect_seldom()
    try:
        app(prog_name="teamtr")
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(130)
    except Exception:  # unexpected
        write_traceback()
        sys.exit(1)


def _collect_seldom() -> None:
    """Keep garbage collection from traversing what is imported: during the imports, and at exit, where it took a
    second."""

    def collect_often_from_now_on(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(collect_often_from_now_on)
        gc.set_threshold(COLLECT_EVERY)

    gc.callbacks.append(collect_often_from_now_on)
    gc.set_threshold(COLLECT_FIRST)
    atexit.register(gc.freeze)
