"""What the commands share: the application, flags, errors with exit codes, one JSON line."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

EXIT_CODES = """Exit codes: 0 done; 1 the run failed; 2 wrong usage or team file; 3 refused (folder in use,
radius not visible, other run in the folder); 130 interrupted and saved."""

app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help=f"""Fine-tune teams of language models, one agent at a time, each update inside a KL trust region.

Start with `teamtr demo`, then `teamtr init my-team.yaml` and `teamtr train my-team.yaml`.

{EXIT_CODES}""",
)

_wants_json = False


def _remember(wants_json: bool) -> bool:
    """So that ``fail`` knows, wherever it is called from."""
    global _wants_json
    _wants_json = wants_json
    return wants_json


JsonFlag = Annotated[
    bool, typer.Option("--json", callback=_remember, help="Print one JSON object as the last line of stdout.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, as dotted keys: `plan.stages=10 team.agents.left.model=tiny`."),
]


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong and stop; with ``--json`` the last line of stdout says it too."""
    from teamtr.show import say

    say(f"error: {message}")
    if _wants_json:
        emit({"error": message, "exit_code": code})
    raise typer.Exit(code)


@contextmanager
def errors() -> Iterator[None]:
    """Known errors become one message and a documented exit code; the unknown keep their traceback."""
    from teamtr.errors import TeamTRError

    try:
        yield
    except TeamTRError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted; a run folder keeps every update that was committed", 130)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) finishes the update and saves; the second stops at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        sys.stderr.write("\nfinishing this update, then saving; once more to stop at once\n")

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def emit(payload: dict[str, Any]) -> None:
    """One line of JSON on stdout; what JSON has no word for (nan, infinity) is null."""
    sys.stdout.write(json.dumps(_plain(payload), allow_nan=False) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
