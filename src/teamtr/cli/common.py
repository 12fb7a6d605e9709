"""Code shared by the commands: the application, options, errors with exit codes, JSON output."""

from __future__ import annotations

import logging
import math
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import typer

from teamtr.cli.complete import dotted_keys
from teamtr.cli.late import LateApp
from teamtr.cli.terminal import json_line, write

if TYPE_CHECKING:
    from teamtr.cli.works import Works
    from teamtr.config import TeamFile
    from teamtr.session.build import Session
    from teamtr.team import Team

EXIT_CODES = """Exit codes: 0 done; 1 the run failed; 2 wrong usage or team file; 3 refused (folder in use,
KL noise floor too high for the radius, another run in the folder); 130 interrupted and saved."""

app = LateApp(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help=f"""Fine-tune teams of language models, one agent at a time, each update inside a KL trust region.

Start with `teamtr demo`, then `teamtr init my-team.yaml` and `teamtr train my-team.yaml`.

{EXIT_CODES}""",
)

Item = TypeVar("Item")

_wants_json = False


def _remember(wants_json: bool) -> bool:
    """Store the flag for ``fail``, which may be called anywhere."""
    global _wants_json
    _wants_json = wants_json
    return wants_json


JsonFlag = Annotated[
    bool, typer.Option("--json", callback=_remember, help="Print one JSON object as the last line of stdout.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings to change, as dotted keys: `plan.stages=10 team.agents.left.model=tiny`.",
        autocompletion=dotted_keys,
    ),
]


CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="Of a run: the checkpoint after so many updates, or `best` by held-out success. [default: the latest]",
    ),
]


def fail(message: str, code: int) -> NoReturn:
    """Print an error and exit; with ``--json``, the last line of stdout contains it too."""
    from teamtr.cli.terminal import say

    say(f"error: {message}")
    if _wants_json:
        emit({"error": message, "exit_code": code})
    raise typer.Exit(code)


@contextmanager
def _telling_warnings() -> Iterator[None]:
    """Print each ``UserWarning`` once, as one line without its place in the code; other warnings as Python does."""
    from teamtr.cli.terminal import say

    told: set[str] = set()
    with warnings.catch_warnings():

        def tell(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, UserWarning):
                say(warnings.formatwarning(message, category, *place[:2]).rstrip("\n"))
            elif str(message) not in told:
                say(f"warning: {message}")
            told.add(str(message))

        warnings.showwarning = tell
        yield


@contextmanager
def errors() -> Iterator[Works]:
    """Turn known errors into one message and a documented exit code; other exceptions keep their traceback. Progress,
    warnings and log messages of the library are printed to stderr."""
    from teamtr.cli.works import Works
    from teamtr.errors import TeamTRError
    from teamtr.progress import listening

    library, teller = logging.getLogger("teamtr"), _Teller()
    before = library.level
    library.addHandler(teller)
    library.setLevel(logging.INFO)
    try:
        with _telling_warnings(), Works() as works, listening(works):
            yield works
    except TeamTRError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted; what was saved is intact: run the same command again to resume", 130)
    except BaseException as error:  # Rust libraries panic with an exception that is not an Exception
        if not _is_out_of_memory(error):
            raise
        fail(
            "there is not enough memory; what was saved is intact. `teamtr plan` shows what a team needs: a smaller "
            "learner.micro_batch, shorter messages or fewer episodes need less",
            1,
        )
    finally:
        library.removeHandler(teller)
        library.setLevel(before)


def _is_out_of_memory(error: BaseException) -> bool:
    """Also recognizes the messages of torch, oneDNN and tokenizers, without importing them."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError) and type(error).__name__ != "PanicException":
        return False
    texts = ("allocate memory", "not enough memory", "out of memory", "create a primitive", "thread pool has not been")
    return any(text in str(error) for text in texts)


class _Teller(logging.Handler):
    """Prints log messages to the stderr of that moment: a live screen replaces it for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        from teamtr.cli.terminal import say

        say(record.getMessage())


class Stop:
    """Whether a stop was requested. While updates run, the first request finishes the update in progress and the second
    stops at once. Before the first update (models load, the tiny base is warmed up) there is nothing to finish, and the
    first request stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._updating = False

    def __call__(self) -> bool:
        return self.asked

    def ask(self, number: int, frame: Any) -> None:
        """Signal handler that requests a stop."""
        if self.asked or not self._updating:
            raise KeyboardInterrupt
        self.asked = True
        write("\nfinishing this update, then saving; press again to stop at once", sys.stderr)

    def during(self, records: Iterable[Item]) -> Iterator[Item]:
        """Yield the records of a run; updates run from the first record to the end."""
        try:
            for record in records:
                self._updating = True
                yield record
        finally:
            self._updating = False


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Handle Ctrl-C and SIGTERM as stop requests; see ``Stop``."""
    stop = Stop()
    before = {s: signal.signal(s, stop.ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def checkpoint_of(text: str | None) -> int | Literal["best"] | None:
    """The checkpoint that ``--checkpoint`` names; None is the latest."""
    from teamtr.errors import UserError

    if text is None or text == "best":
        return None if text is None else "best"
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"--checkpoint is a number of updates or best, not {text!r}")
    return int(text)


def read_team_file(file: Path, overrides: list[str] | None) -> TeamFile:
    """Read the settings of a command. Call this before imports that need torch, so that mistakes are reported at
    once."""
    from teamtr.config import load_team_file

    return load_team_file(file, overrides or ())


def holds_run(folder: Path) -> bool:
    """Whether this folder holds a run with a checkpoint."""
    from teamtr.store import RunFolder

    return bool(RunFolder(folder).checkpoints.numbers())


def read_run(folder: Path, overrides: list[str] | None) -> TeamFile:
    """The settings of the run in the folder, with these changes. Call this early, like ``read_team_file``."""
    from teamtr.config import changed, loads_stored
    from teamtr.store import RunFolder

    run = RunFolder.read(folder)
    stored = loads_stored(run.team_text(), str(run.team_file), run.path)
    return changed(stored, overrides, str(run.team_file)) if overrides else stored


@dataclass(frozen=True)
class OpenedTeam:
    """A team that can be sampled from, and its name."""

    session: Session
    team: Team
    label: str


def open_team(path: Path, overrides: list[str] | None) -> OpenedTeam:
    """Open the latest checkpoint of a run folder, or the models of a team file."""
    from teamtr.errors import UserError

    if path.is_dir():
        if overrides:
            raise UserError(f"{overrides[0]}: settings go with a team file; a run speaks as it was trained")
        from teamtr.session.resume import StoredRun

        session, team = StoredRun.read(path).build()
        return OpenedTeam(session, team, path.absolute().name)
    settings = read_team_file(path, overrides)
    from teamtr.session.build import build

    session = build(settings)
    return OpenedTeam(session, session.current_team(), settings.name)


def answer(text: str, as_json: bool) -> None:
    """Print a command's result in readable form: on stdout, or on stderr if stdout is for the ``--json`` record."""
    write(text, sys.stderr if as_json else sys.stdout)


def emit(payload: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print one line of JSON on stdout. Values that JSON does not have (nan, infinity) become null."""
    write(json_line(_plain(payload)), sys.stdout)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
