"""A tool call as data: a name, JSON arguments, and the one form in which it stands in a shared context."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOOL = "tool"
"""The author of every result of a tool: no agent and nobody in an environment can have this name."""

Schema = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""

_MARKUP = re.compile(r"<(?=\||/?(?:think|tool_call|function_call))", re.IGNORECASE)


@dataclass(frozen=True)
class ToolCall:
    """A call as data: a name and JSON arguments."""

    name: str
    arguments: Mapping[str, Any]

    def canonical(self) -> str:
        """The one form in which a call stands in a shared context: one line of JSON, keys sorted, no markup inside."""
        text = json.dumps({"name": self.name, "arguments": _sorted(self.arguments)}, ensure_ascii=False)
        return _MARKUP.sub(lambda _: "\\u003c", text)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def allowed(schemas: Sequence[Schema], names: Collection[str] | None) -> tuple[Schema, ...]:
    """Those of these names; None for all."""
    return tuple(schema for schema in schemas if names is None or name_of(schema) in names)


def name_of(schema: Schema) -> str:
    """What the tool is called by."""
    return str(schema["function"]["name"])
