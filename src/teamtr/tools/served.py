"""The worker side of user-defined tools: builds their schemas from the functions, and runs the calls.

A worker of the grading pool loads ``functions``. Nothing heavy is imported, so a worker's memory is the functions' own.

A tool is described by the function's name, docstring and annotated parameters; a ``schema`` attribute (the JSON schema
of its arguments) replaces the latter. Two keyword parameters are filled in and hidden from the agent: ``problem`` (a
mapping with id, prompt and columns) and ``past`` (the calls made earlier in the episode, each with name and arguments).
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from teamtr.calls import Schema
from teamtr.errors import UserError
from teamtr.own_code import own_attribute
from teamtr.tools.kinds import Kind, ToolError, check_arguments, schema_of

GIVEN = ("problem", "past")
"""Parameters that are filled in, and hidden from agents."""
MOST_CHARACTERS = 1 << 22
"""Maximum length of a result that a worker sends; ``tools.max_characters`` limits what agents are shown."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_PLAIN: Mapping[Any, Kind] = {
    str: Kind("string"),
    int: Kind("integer"),
    float: Kind("number"),
    bool: Kind("boolean"),
    list: Kind("array"),
    dict: Kind("object"),
}


@dataclass(frozen=True)
class Function:
    """A function and the types of its arguments; ``kinds`` is None if its own ``schema`` attribute defines them."""

    call: Callable[..., Any]
    kinds: Mapping[str, Kind] | None
    optional: tuple[str, ...]
    given: tuple[str, ...]
    schema: Schema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    def result(self, arguments: Mapping[str, Any], known: Mapping[str, Any]) -> str:
        """The text that the agent reads. Anything that the function raises becomes an error text."""
        try:
            if self.kinds is not None:
                check_arguments(self.kinds, arguments, self.optional)
            elif told := next((name for name in self.given if name in arguments), None):
                raise ToolError(f"there is no argument {told}")
            return as_text(self.call(**arguments, **{name: known[name] for name in self.given}))
        except ToolError as error:
            return f"Error: {error}"
        except BaseException as error:  # also SystemExit
            return f"Error: {type(error).__name__}: {error}"


def functions(sources: Sequence[str]) -> Callable[[list[dict[str, Any]]], Iterator[Any]]:
    """A handler for the tools that ``python:FILE:NAME`` sources name, each a function or a list of functions. An item
    asks either to ``describe`` all tools or to call one."""
    tools: dict[str, Function] = {}
    for source in sources:
        for function in _functions_of(source):
            if function.name in tools:
                raise UserError(f"{source}: two tools are called {function.name!r}: rename one of them")
            tools[function.name] = function

    def answers(items: list[dict[str, Any]]) -> Iterator[Any]:
        for item in items:
            if "describe" in item:
                yield [{"schema": tool.schema, "given": tool.given} for tool in tools.values()]
            else:
                yield tools[item["tool"]].result(item["arguments"], item)[:MOST_CHARACTERS]

    return answers


def _functions_of(source: str) -> list[Function]:
    sys.path.insert(0, source.removeprefix("python:").rpartition("/")[0])  # as for any script
    found, _ = own_attribute(source, "tool")
    listed = list(found) if isinstance(found, list | tuple) else [found]
    if not listed:
        raise UserError(f"{source}: an empty list: name a function, or a list of functions")
    return [function_of(source, each) for each in listed]


def function_of(source: str, call: Any) -> Function:
    """A function as a tool; raises UserError if it cannot be one."""
    name = getattr(call, "__name__", "")
    if not callable(call) or not NAME.fullmatch(name):
        raise UserError(f"{source}: a tool is a function with a name, found {type(call).__name__} {name!r}")
    signature, hints = inspect.signature(call), _hints(call)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise UserError(f"{source}: {name} takes {parameter.name} by its place; tools are called by name")
    given = tuple(each for each in GIVEN if each in signature.parameters)
    own = {
        each: parameter
        for each, parameter in signature.parameters.items()
        if each not in given and parameter.kind is not parameter.VAR_KEYWORD
    }
    about, told = _documented(inspect.getdoc(call) or "")
    if isinstance(schema := getattr(call, "schema", None), dict):
        return Function(call, None, (), given, schema_of(name, about, schema))
    kinds = {each: kind_of(hints.get(each, Any)) for each in own}
    optional = tuple(each for each, parameter in own.items() if parameter.default is not parameter.empty)
    properties = {each: kind.schema() | told.get(each, {}) for each, kind in kinds.items()}
    needed = [each for each in own if each not in optional]
    parameters = {"type": "object", "properties": properties, "required": needed}
    return Function(call, kinds, optional, given, schema_of(name, about, parameters))


def _hints(call: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(call)
    except Exception:  # an annotation that is not a type: the argument may be anything
        return {}


def kind_of(annotation: Any) -> Kind:
    """The type of an annotated argument; ``any`` if JSON schema has no equivalent."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is typing.Annotated:
        return kind_of(parts[0])
    if origin is typing.Literal and all(isinstance(part, str) for part in parts):
        return Kind("string", options=parts)
    if origin in (typing.Union, types.UnionType):
        others = [part for part in parts if part is not type(None)]
        return replace(kind_of(others[0]), nullable=True) if len(others) == 1 else Kind("any")
    if origin in (list, Sequence, tuple):
        inner = kind_of(parts[0]) if parts and parts[0] is not Any else None
        return Kind("array", items=None if inner is None or inner.type == "any" else inner)
    return Kind("object") if origin in (dict, Mapping) else Kind("any")


def _documented(text: str) -> tuple[str, dict[str, dict[str, str]]]:
    """A docstring's first paragraph, and the descriptions under its ``Args:``."""
    about = " ".join(text.partition("\n\n")[0].split())
    _, listed, rest = text.partition("Args:\n")
    found = re.findall(r"^\s+(\w+)(?: \([^)]*\))?: (.+)$", rest.partition("\n\n")[0], re.MULTILINE) if listed else []
    return about, {name: {"description": said} for name, said in found}


def as_text(value: Any) -> str:
    """A string unchanged; anything else as JSON, with ``str`` of values that JSON cannot represent."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
