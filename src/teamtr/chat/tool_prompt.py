"""Describes tools as text in the system prompt, for chat templates without tool support."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from teamtr.calls import Schema

HEADER = 'Tools, called by a message such as NAME(key="value"):'


def with_tools_told(messages: Sequence[dict[str, str]], tools: Sequence[Schema]) -> list[dict[str, str]]:
    """The chat with the tools described at the end of its system prompt."""
    told = tools_as_text(tools)
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": f"{system}\n{told}" if system else told}, *rest]


def tools_as_text(tools: Sequence[Schema]) -> str:
    """A header, and a line for each tool with its arguments and description."""
    return "\n".join([HEADER, *map(_line, tools)])


def _line(tool: Schema) -> str:
    function = tool["function"]
    parameters = function.get("parameters", {})
    needed = parameters.get("required", ())
    taken = [
        f"{name}{'' if name in needed else '?'}: {_kind(schema)}"
        for name, schema in parameters.get("properties", {}).items()
    ]
    line = f"{function['name']}({', '.join(taken)})"
    description = " ".join(str(function.get("description", "")).split())
    return f"{line} - {description}" if description else line


def _kind(schema: Mapping[str, Any]) -> str:
    """The type if the schema says nothing else, otherwise the schema."""
    plain = {key: value for key, value in schema.items() if key not in ("title", "default")}
    return str(plain["type"]) if plain.keys() == {"type"} else json.dumps(plain, ensure_ascii=False)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The value with ``change`` applied to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): each_text(item, change) for key, item in value.items()}
    return [each_text(item, change) for item in value] if isinstance(value, list | tuple) else value
