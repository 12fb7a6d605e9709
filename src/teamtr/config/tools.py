"""The section ``tools``: what agents can call, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from teamtr.own_code import PREFIX
from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal, show
from teamtr.settings.section import Section, key
from teamtr.settings.values import Above0, Flag, NonEmpty, Positive, of_form

_OWN = r"python:.+\.py:[^\W\d]\w*"
OwnTool = Annotated[str, of_form(_OWN, "must be python:FILE.py:NAME (FILE relative to the team file)")]
ServerName = Annotated[str, of_form(r"[A-Za-z][A-Za-z0-9_-]*", "must be a letter, then letters, digits, - or _")]


class McpConfig(Section):
    """An MCP server that TeamTR starts and communicates with over standard input and output."""

    name: ServerName = Field(description="What errors call the server by.")
    command: NonEmpty = Field(description="The program that is the server, such as python or npx.")
    args: tuple[str, ...] = key((), "Its arguments; names of files are relative to the team file.")
    env: dict[str, str] = key({}, "Environment variables that it gets besides the usual few.")

    def anchored(self, anchor: Anchor) -> Self:
        """Make the paths of files among the arguments absolute."""
        return self.model_copy(update={"args": tuple(map(anchor.file, self.args))})


class ToolsConfig(Section):
    """Tools that agents can call besides those of the task; see docs/tools.md. Text or a list is shorthand for
    `use`."""

    use: tuple[OwnTool, ...] = key(
        (), "Your own tools: python:FILE.py:NAME, each a function or a list of functions, run in killable workers."
    )
    mcp: tuple[McpConfig, ...] = key((), "MCP servers whose tools agents can call (needs teamtr[mcp]).")
    steps: Positive = key(
        4, "Most messages of an agent in a row: after each that calls a tool it reads the result and speaks again."
    )
    tell: Flag = key(
        True, "Tell agents of their tools, by their chat template or in the system prompt; false: your prompts do."
    )
    seconds: Above0 = key(
        5.0, "Processor time that one call of your own tools may take, and a tenth of what it may take by the clock."
    )
    memory_mb: Positive = key(1024, "Address space of a worker that runs your own tools.")
    workers: Positive = key(1, "Processes that run your own tools.")
    max_characters: Positive = key(2000, "Most characters of all results to one message; what is longer is cut.")

    def anchored(self, anchor: Anchor) -> Self:
        """The section with absolute paths."""
        use = tuple(_anchored(each, anchor) for each in self.use)
        return self.model_copy(update={"use": use, "mcp": tuple(each.anchored(anchor) for each in self.mcp)})

    def _refusals(self) -> Iterator[Refusal]:
        fields = type(self).model_fields
        needs = {"seconds": self.use or self.mcp, "memory_mb": self.use, "workers": self.use}
        for name, used in needs.items():
            if not used and getattr(self, name) != fields[name].default:
                there = "there are none: give them in tools.use, or leave it out"
                yield Refusal(
                    ("tools", name), f"tools.{name} is about your own tools, and {there}", at_key=True, idle=True
                )
        for i, each in enumerate(self.use):
            if each in self.use[:i]:
                yield Refusal(("tools", "use", i), f"tools.use names {show(each)} twice")
        names = [server.name for server in self.mcp]
        for i, name in enumerate(names):
            if name in names[:i]:
                yield Refusal(("tools", "mcp", i, "name"), f"two servers of tools.mcp are called {show(name)}")


def _anchored(own: str, anchor: Anchor) -> str:
    file, _, attribute = own.removeprefix(PREFIX).rpartition(":")
    return f"{PREFIX}{anchor.path(file)}:{attribute}"


def _tools_section(value: Any) -> Any:
    """Expand text or a list to a section with ``use``."""
    if isinstance(value, str):
        return {"use": [value]}
    return {"use": value} if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class _OrShort:
    """Annotation: adds the short forms of the section to the JSON schema."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own = {"type": "string", "pattern": f"^(?:{_OWN})$"}
        return {"anyOf": [handler(schema), own, {"type": "array", "items": own}]}


AnyTools = Annotated[ToolsConfig, BeforeValidator(_tools_section), _OrShort()]
