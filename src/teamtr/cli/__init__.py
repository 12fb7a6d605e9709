"""The commands, one module each. The only room that sees every other."""

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
"""Objects made and not freed after which cycles are looked for, the first time and from then on; Python's own number is
700. What torch and transformers make when they are imported, half a million, lives to the end: looking through it took
a tenth of their time."""


@app.callback()
def _about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from teamtr.version import __version__

        write(f"teamtr {__version__}", sys.stdout)
        raise typer.Exit


def main() -> None:
    """What nobody foresaw ends with its traceback and exit code 1, as in any program, but for what it would do to a
    terminal."""
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
    except Exception:  # nobody foresaw it
        write_traceback()
        sys.exit(1)


def _collect_seldom() -> None:
    """No search for cycles in what is imported: not while it is made, and not when Python ends, which took a second."""

    def collect_often_from_now_on(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(collect_often_from_now_on)
        gc.set_threshold(COLLECT_EVERY)

    gc.callbacks.append(collect_often_from_now_on)
    gc.set_threshold(COLLECT_FIRST)
    atexit.register(gc.freeze)
