"""Validates plain data with the models, and translates pydantic's errors into mistakes with places."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from teamtr.config.errors import Mistake
from teamtr.config.keys import schema_keys
from teamtr.config.schema import TeamFile
from teamtr.config.source import Document
from teamtr.settings.refusals import KeyPath, Refusal, at, dotted, hint, nearest, show
from teamtr.tasks.registry import task_names

ITEM = "*"
"""Placeholder in a key for any item of a list."""
MOST_GUESSES = 3
"""Maximum number of unknown keys for which a similar key is searched; each search takes milliseconds."""


def validate(document: Document, *, stored: bool = False) -> tuple[TeamFile | None, list[Mistake]]:
    """The team file, or all mistakes in it. ``stored``: it is a run's own, which may hold keys without effect.

    Checks between fields run only on valid fields, so one bad number would hide them. Therefore invalid parts are
    removed and the rest is validated again. Of this second pass, only checks between fields count, and only those that
    do not depend on anything invalid.
    """
    team_file, told, between = _look(document.data)
    unsound = {_outside_list(refusal.path) for refusal in told}
    if unsound:
        _, _, between = _look(_without(unsound, document.data))
    unsound |= {refusal.meant for refusal in told if refusal.meant}
    for refusal in dict.fromkeys(between):  # the task's section is validated twice
        if unsound.isdisjoint(refusal.rests_on) and not (stored and refusal.idle):
            told.append(refusal)
            unsound.add(_outside_list(refusal.path))
    mistakes = [document.mistake(refusal.message, refusal.path, at_key=refusal.at_key) for refusal in told]
    return None if told else team_file, mistakes


def _look(data: Any) -> tuple[TeamFile | None, list[Refusal], list[Refusal]]:
    """The team file, the mistakes in single fields, and the mistakes between valid fields."""
    between: list[Refusal] = []
    try:
        return TeamFile.model_validate(data, context=between), [], between
    except ValidationError as error:
        errors = error.errors(include_url=False)
        guessed = {id(each) for each in [each for each in errors if each["type"] == "extra_forbidden"][:MOST_GUESSES]}
        found = [refusal for each in errors if (refusal := _refusal(each, data, guess=id(each) in guessed))]
    # A misspelled required key is one mistake, not an unknown key and a missing one.
    meant = {refusal.meant for refusal in found}
    return None, [r for r in found if r.path not in meant or r.path[-1] in at(data, r.path[:-1])], between


def _without(paths: Iterable[KeyPath], data: Any) -> Any:
    rest = copy.deepcopy(data)
    for path in paths:
        holder = at(rest, path[:-1])
        if path and isinstance(holder, dict):
            holder.pop(path[-1], None)
    rest.setdefault("name", "unnamed")  # no check depends on the run's name
    return rest


def _outside_list(path: KeyPath) -> KeyPath:
    """The path of the list that contains an item; any other path unchanged."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    return path


def _refusal(error: Mapping[str, Any], data: Any, *, guess: bool) -> Refusal | None:
    """Translate one of pydantic's errors; ``guess`` also suggests a similar key for an unknown one."""
    kind, context = error["type"], error.get("ctx", {})
    path = _locate(error["loc"], data)
    if kind in ("unknown_task", "broken_task"):  # reported at the task, but its name is wrong
        path = (*path, "name")
    key, value = dotted(path, data), at(data, path)
    match kind:
        case "extra_forbidden":
            return _unknown_key(path, data, guess)
        case "missing" | "task_without_name" if isinstance(value, dict):
            name = error["loc"][-1] if kind == "missing" else "name"
            return Refusal((*path, name), f'missing key "{name}" in {key}')
        case "unknown_task" | "literal_error":
            options = re.findall("'([^']*)'", context["expected"]) if kind == "literal_error" else task_names()
            return Refusal(path, f"{key} must be one of {', '.join(options)}, got {show(value)}{hint(value, options)}")
        case "too_short" if len(value) >= context["min_length"]:
            return None  # pydantic counts valid items only, and reports each invalid one as well
        case "broken_task":
            return Refusal(path, context["why"])
        case "value_error":
            return Refusal(path, f"{key} {context['error']}")
        case _:
            must = _MUST[kind].format(**context) if kind in _MUST else f"is wrong: {error['msg']}"
            return Refusal(path, f"{key} {must}, got {show(value)}{_remedy(kind, value)}")


def _locate(loc: Sequence[str | int], data: Any) -> KeyPath:
    """Convert pydantic's location to a path in the data, as far as it exists.

    The location also names the branch of a union (text or list), which is not a key of the file.
    """
    path: KeyPath = ()
    for step in loc:
        is_key = isinstance(data, dict) and step in data
        is_item = isinstance(data, list) and isinstance(step, int) and step < len(data)
        if is_key or is_item:
            path, data = (*path, step), data[step]
    return path


def _unknown_key(path: KeyPath, data: Any, guess: bool) -> Refusal:
    *around, key = (ITEM if isinstance(step, int) else str(step) for step in path)
    message = f'unknown key "{key}" in {dotted(path[:-1], data)}'
    if not guess:
        return Refusal(path, message, at_key=True)
    prefix = "".join(f"{step}." for step in around)
    # A correct key in the wrong section is suggested before a similar key in the right one.
    task = at(data, ("task", "name"))
    known = [each for each in schema_keys() if each.exists_for(task)]
    elsewhere = sorted({each.key for each in known if each.key.rpartition(".")[2] == key})
    if 0 < len(elsewhere) <= 3:
        message += f"; did you mean {' or '.join(map(show, elsewhere))}?"
        return Refusal(path, message, at_key=True)
    keys = [re.sub(r"\b(NAME|NUMBER)\b", ITEM, each.key) for each in known]
    below = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    valid = tuple(dict.fromkeys(key_below.partition(".")[0] for key_below in below))
    near = nearest(key, valid)
    message += hint(key, valid, "valid keys")
    return Refusal(path, message, at_key=True, meant=(*path[:-1], near) if near else None)


_MUST = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be text of Unicode characters",
    "text_or_list": "must be text or a list of text",
    "number_or_lists": "must be a whole number, or a list with the order of every round",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "task_without_name": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "missing": "must have more items",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "too_short": "must have at least {min_length} item",
    "too_long": "must have at most {max_length} items",
}


def _remedy(kind: str, value: Any) -> str:
    """A hint on notation where YAML 1.2 may be surprising."""
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return f" (text in YAML 1.2; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'})"
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""
