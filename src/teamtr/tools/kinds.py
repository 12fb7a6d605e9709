"""Types of tool arguments: their JSON schema, and the validation of the values in a call.

A failed check raises ``ToolError``, whose message goes to the calling agent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from teamtr.calls import Schema
from teamtr.text import shown

LARGEST = 10**12
"""The largest number allowed in arguments that enter sums."""


class ToolError(Exception):
    """A call that a tool rejects; the agent reads the message after "Error: "."""


@dataclass(frozen=True)
class Kind:
    """The type of an argument, in terms of JSON schema; ``any`` allows any value. ``nullable``: null is allowed too.
    Numbers are at most ``largest`` in absolute value."""

    type: str
    options: tuple[str, ...] = ()
    items: Kind | None = None
    fields: Mapping[str, Kind] = field(default_factory=dict)
    nullable: bool = False
    largest: float = math.inf

    def schema(self) -> dict[str, Any]:
        """The JSON schema, without descriptions."""
        if self.type == "any":
            return {}
        made: dict[str, Any] = {"type": [self.type, "null"] if self.nullable else self.type}
        if self.options:
            made["enum"] = list(self.options)
        if self.items is not None:
            made["items"] = self.items.schema()
        if self.fields:
            made |= object_schema(self.fields)
        return made

    def check(self, value: Any, name: str) -> None:
        """Raise ToolError if the value is not of this kind."""
        if value is None and self.nullable:
            return
        if not _IS[self.type](value):
            raise ToolError(f"{name} must be of type {self.type}, found {shown(value)}")
        if self.type in ("integer", "number") and not abs(value) <= self.largest:
            raise ToolError(f"{name} must be of type {self.type} and at most {self.largest:g}, found {shown(value)}")
        if self.options and value not in self.options:
            raise ToolError(f"{name} must be one of {', '.join(self.options)}, found {shown(value)}")
        if self.items is not None:
            for place, item in enumerate(value):
                self.items.check(item, f"{name}[{place}]")
        for field_name, kind in self.fields.items():  # more fields are allowed: agents repeat what they read
            if field_name not in value:
                raise ToolError(f"{name} has no {field_name}")
            kind.check(value[field_name], f"{field_name} of {name}")


def object_schema(fields: Mapping[str, Kind]) -> dict[str, Any]:
    properties = {name: kind.schema() for name, kind in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields)}


def check_arguments(kinds: Mapping[str, Kind], given: Mapping[str, Any], optional: Collection[str] = ()) -> None:
    """Raise ToolError unless exactly these arguments are given, each of its kind; ``optional`` ones may be missing."""
    for name, kind in kinds.items():
        if name not in given and name in optional:
            continue
        if name not in given:
            raise ToolError(f"argument {name} is missing")
        kind.check(given[name], f"argument {name}")
    extra = next((name for name in given if name not in kinds), None)
    if extra is not None:
        raise ToolError(f"there is no argument {shown(extra)}; there are {', '.join(kinds) or 'none'}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_IS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and _is_number(value),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "any": lambda value: True,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}

TEXT = Kind("string")
WHOLE = Kind("integer", largest=LARGEST)
NUMBER = Kind("number", largest=LARGEST)


def choice(*options: str) -> Kind:
    return Kind("string", options=options)


def list_of(kind: Kind) -> Kind:
    return Kind("array", items=kind)


def record(**fields: Kind) -> Kind:
    return Kind("object", fields=fields)


def schema_of(name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    """A tool in the form that chat templates take; ``parameters`` is the JSON schema of its arguments."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }
