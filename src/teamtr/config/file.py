"""Reads a ``TeamFile`` from a file or text, and writes it as text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from teamtr.config.errors import ConfigError, Mistake, Place
from teamtr.config.overrides import apply_override
from teamtr.config.schema import TeamFile
from teamtr.config.source import LONGEST, read, write
from teamtr.config.validate import validate
from teamtr.settings.refusals import show


def load_team_file(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TeamFile:
    """Read a team file. Paths in it are relative to its folder; in the result they are absolute.

    Raises ConfigError with all mistakes in the file and in the overrides.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(4 * LONGEST + 1)  # UTF-8 uses at most 4 bytes per character
    except IsADirectoryError:
        from teamtr.store import remedy_for

        inside = Path(path) / "team.yaml"
        remedy = f"give {inside}" if inside.is_file() else remedy_for(Path(path))
        raise ConfigError(name, "", [Mistake(f"is a folder, not a team file: {remedy}")]) from None
    except OSError as error:
        raise ConfigError(name, "", [Mistake(f"cannot be read: {error.strerror}")]) from None
    if len(raw) > 4 * LONGEST:
        raise ConfigError(name, "", [Mistake(f"longer than {LONGEST} characters: no team file is")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = Place.after(raw[: error.start].decode("utf-8"))
        shown = raw.decode("utf-8", errors="replace")
        raise ConfigError(name, shown, [Mistake("not UTF-8 text; save the file as UTF-8", place)]) from None
    return loads(text, name, overrides).anchored(Path(path).parent)


def loads(text: str, name: str = "<string>", overrides: Sequence[str] = (), *, stored: bool = False) -> TeamFile:
    """Read a team file from text; errors refer to it as ``name``. Paths are returned unchanged.

    ``stored``: it is what ``dump`` wrote of a run, perhaps by an earlier version. Keys that have no effect are then not
    refused, since nobody can take them out of a run.
    """
    document = read(text)
    if document.data is None:
        if document.mistakes:
            raise ConfigError(name, text, document.mistakes)
        document.data = {}
    if not isinstance(document.data, dict):
        mistake = document.mistake(f"a team file is a mapping of keys to values, got {show(document.data)}", ())
        raise ConfigError(name, text, [mistake])
    unread = {mistake.place for mistake in document.mistakes}
    applied = [apply_override(document, override) for override in overrides]
    team_file, found = validate(document, stored=stored)
    mistakes = [*document.mistakes, *filter(None, applied), *(each for each in found if each.place not in unread)]
    if team_file is None or mistakes:
        raise ConfigError(name, text, sorted(mistakes, key=lambda mistake: _turn(mistake, overrides)))
    return team_file


def from_data(data: Mapping[str, Any], name: str, changes: Mapping[str, Any] | None = None) -> TeamFile:
    """Read a team file from plain data; ``changes`` are values by dotted key. Errors quote the data as YAML."""
    return loads(write(dict(data)), name, [f"{key}={json.dumps(value)}" for key, value in (changes or {}).items()])


def _turn(mistake: Mistake, overrides: Sequence[str]) -> tuple[int, ...]:
    """Sort key of a mistake: first the file by line, then the overrides in their order."""
    place = mistake.place or Place(0, 0)
    return ([None, *overrides].index(mistake.override), place.line, place.column)


def dump(team_file: TeamFile) -> str:
    """The resolved team file as YAML that loads back to an equal object; every default is written out."""
    return write(_plain(team_file))


def changed(team_file: TeamFile, changes: Sequence[str], name: str) -> TeamFile:
    """The team file of a run with these changes. Paths in the changes are relative to the current directory."""
    return loads(dump(team_file), name, changes, stored=True).anchored(Path.cwd())


def changed_for_evaluation(team_file: TeamFile, changes: Sequence[str], name: str) -> TeamFile:
    """The team file of a run with another task (``task.name=math500``), device or location of its models. Paths in the
    changes are relative to the current directory. Raises ConfigError for any other change."""
    data = _plain(team_file)
    for change in changes:
        if is_of_task(change):
            data["task"] = {}
        elif not re.match(r"(device|team\.([^=]+\.)?(model|revision))=", change):
            mistake = Mistake(
                f"{change}: a run is evaluated as it was trained; only its task, its device (device=) and where its "
                "models are (team.model=) may be other"
            )
            raise ConfigError(name, "", [mistake])
    of_task = [change for change in changes if is_of_task(change)]
    if of_task and not any(change.startswith(("task.name=", "task=")) for change in of_task):
        kept = "nothing of the run's own task is kept"
        raise ConfigError(name, "", [Mistake(f"{of_task[0]}: another task needs task.name=NAME and its keys; {kept}")])
    return loads(write(data), name, changes, stored=True).anchored(Path.cwd())


def is_of_task(change: str) -> bool:
    """Whether a change (KEY=VALUE) concerns the task."""
    return change.startswith(("task.", "task="))


def _plain(team_file: TeamFile) -> dict[str, Any]:
    data = team_file.model_dump(exclude_none=True)
    data["team"]["template_kwargs"] = team_file.team.template_kwargs  # the only mapping in which null is a value
    for agent, config in zip(data["team"]["agents"], team_file.team.agents, strict=True):
        if config.source == (team_file.team.model, team_file.team.revision):  # follows the team's model
            agent.pop("model")
            agent.pop("revision", None)
    return data
