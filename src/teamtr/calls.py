"""Tool calls as data: a name, JSON arguments, and the canonical text form used in the shared context."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOOL = "tool"
"""The author of every tool result. No agent and no author in an environment can have this name."""

Schema = Mapping[str, Any]
"""A tool in the form that chat templates take: {"type": "function", "function": {"name", "description",
"parameters"}}."""

_MARKUP = re.compile(r"<(?=\||/?(?:think|tool_call|function_call))", re.IGNORECASE)


@dataclass(frozen=True)
class ToolCall:
    """A tool call: a name and JSON arguments."""

    name: str
    arguments: Mapping[str, Any]

    def canonical(self) -> str:
        """The form of a call in the shared context: one line of JSON with sorted keys and without markup."""
        text = json.dumps({"name": self.name, "arguments": _sorted(self.arguments)}, ensure_ascii=False)
        return _MARKUP.sub(lambda _: "\\u003c", text)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def allowed(schemas: Sequence[Schema], names: Collection[str] | None) -> tuple[Schema, ...]:
    """The tools with these names; None: all."""
    return tuple(schema for schema in schemas if names is None or name_of(schema) in names)


def name_of(schema: Schema) -> str:
    """The tool's name."""
    return str(schema["function"]["name"])
