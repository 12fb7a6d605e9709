"""The JSON schema of a team file (draft 2020-12), for editors: completion, help at a key, and mistakes while typing.

It says what single values may be. What only several keys together can have wrong is left to ``teamtr check``. Tasks of
other packages are in it as far as they are installed when it is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema

from teamtr.bounded_json import NotJson, read_json
from teamtr.config.schema import TeamFile
from teamtr.settings.section import Section
from teamtr.tasks.registry import task_sections

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MADE_BY = "Made by `teamtr schema`; do not edit."
SCHEMA_NAME = "team.schema.json"
FIRST_LINE = f"# yaml-language-server: $schema=./{SCHEMA_NAME}\n"
"""What a team file begins with so that editors find the schema beside it."""


def json_schema() -> dict[str, Any]:
    """The schema as plain data."""
    sections = task_sections()
    roots: tuple[type[Section], ...] = (TeamFile, *sections)
    modes: list[tuple[type[Section], JsonSchemaMode]] = [(root, "validation") for root in roots]
    places, whole = models_json_schema(modes, schema_generator=_Generator)
    definitions = whole["$defs"]
    file = definitions.pop(_name(places[TeamFile, "validation"]))
    task = file["properties"]["task"]
    del definitions[_name(task)]  # the base of all sections; the name chooses one of them
    rules = []
    for section, names in sections.items():
        keys = definitions[_name(places[section, "validation"])]["properties"]
        chosen = _chosen_by(names, keys["name"])
        keys["name"] = True  # the rule has looked at it
        condition = {"properties": {"name": chosen}, "required": ["name"]}
        rules.append({"if": condition, "then": places[section, "validation"]})
    file["properties"]["task"] = {
        "description": task["description"],
        "type": "object",
        "properties": {
            "name": {
                "description": "Which task; it decides what other keys there are.",
                "type": "string",
                "anyOf": [rule["if"]["properties"]["name"] for rule in rules],
            }
        },
        "required": ["name"],
        "allOf": rules,
    }
    for part in (file, *definitions.values()):
        _tidy(part)
    head = {"$schema": DIALECT, "$comment": MADE_BY, "title": "TeamTR team file"}
    return {**head, **file, "$defs": definitions}


def json_schema_text() -> str:
    """The schema as the text of a file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def is_ours(file: Path) -> bool:
    """Whether this file is a schema that was made here, of whatever version."""
    try:
        made = read_json(file.read_bytes())
    except (OSError, NotJson):
        return False
    return isinstance(made, dict) and made.get("$comment") == MADE_BY


class _Generator(GenerateJsonSchema):
    """Without a title for every key, which would only repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _chosen_by(names: Sequence[str], stated: Mapping[str, Any]) -> dict[str, Any]:
    """What chooses a section: its names or, for one like ``gym:NAME``, the form that the section states."""
    exact = [name for name in names if not name.partition(":")[2].isupper()]
    if len(exact) == len(names):
        return {"enum": exact}
    prefixes = "|".join(re.escape(name.partition(":")[0]) for name in names if name not in exact)
    form = {"pattern": stated.get("pattern", f"^(?:{prefixes}):")}
    return {"anyOf": [{"enum": exact}, form]} if exact else form


def _name(place: Mapping[str, Any]) -> str:
    return str(place["$ref"]).rpartition("/")[2]


def _tidy(section: dict[str, Any]) -> None:
    """The docstring as one line; no default where it is nothing, or a section, whose keys have their own."""
    section.pop("title", None)
    if "description" in section:
        section["description"] = " ".join(section["description"].partition("\n\n")[0].split()).replace("``", "`")
    for key in section.get("properties", {}).values():
        sections = [key, *key.get("anyOf", ())] if isinstance(key, dict) else []
        if sections and "default" in key and (key["default"] is None or any("$ref" in each for each in sections)):
            del key["default"]
