"""Overrides from the command line by dotted key: ``plan.stages=10``, ``team.agents.left.model=tiny``."""

from __future__ import annotations

from typing import Any

from teamtr.config.errors import Mistake
from teamtr.config.source import DEEPEST, Document, read
from teamtr.settings.refusals import KeyPath, dotted, show


def apply_override(document: Document, override: str) -> Mistake | None:
    """Set one dotted key in the document. Returns the mistake if the override is malformed or its path does not exist;
    keys and values are checked later, in validation."""
    written, equals, text = override.partition("=")
    keys = [key.strip() for key in written.split(".")]
    if not equals or not all(keys):
        return Mistake("must be KEY=VALUE with a dotted key, such as plan.stages=10", override=override)
    if len(keys) > DEEPEST:
        return Mistake(f"has a key of more than {DEEPEST} parts: no team file is so deep", override=override)
    if not text.strip():  # as an unset shell variable leaves it
        return Mistake("has no value: give one, or null for the default where a key may be unset", override=override)
    value = read(text)
    if value.mistakes:
        return Mistake(value.mistakes[0].message, override=override)

    here = document.data
    path: KeyPath = ()
    for key in keys:
        step = _step(here, key)
        if step is None:
            return Mistake(_no_step(dotted(path, document.data), here, key), override=override)
        path = (*path, step)
        last = len(path) == len(keys)
        if last or (isinstance(here, dict) and here.get(step) is None):
            here[step] = value.data if last else {}
            document.overwrite(path, override)
        here = here[step]
    return None


def _step(holder: Any, key: str) -> str | int | None:
    """The index of ``key`` in ``holder``: the key itself in a mapping; in a list, a number or the position of the agent
    with this name; None if there is none."""
    if isinstance(holder, dict):
        return key
    if not isinstance(holder, list):
        return None
    if key.isdecimal():
        return int(key) if len(key) < 10 and int(key) < len(holder) else None
    names = [item.get("name") if isinstance(item, dict) else None for item in holder]
    return names.index(key) if key in names else None


def _no_step(where: str, holder: Any, key: str) -> str:
    if not isinstance(holder, list):
        return f"{where} is {show(holder)} and has no keys below it"
    names = [str(item["name"]) for item in holder if isinstance(item, dict) and "name" in item]
    there = ", ".join(names) if names else f"{len(holder)}, counted from 0"
    return f"{where} has no item {show(key)}; it has {there}"
