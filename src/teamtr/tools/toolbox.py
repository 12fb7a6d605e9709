"""Tools that are pure functions of a state: (state, call) -> (result, new state).

A call can do no harm: an unknown tool, an argument that is missing, superfluous or of another type, and a request that
the tool turns down all give a result that begins with "Error:", and leave the state as it was.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from teamtr.calls import Schema, ToolCall
from teamtr.text import shown
from teamtr.tools.kinds import Kind, ToolError, check_arguments, object_schema, schema_of
from teamtr.types import Problem, ToolRequest

S = TypeVar("S")


class Outcome(NamedTuple, Generic[S]):
    """What a call gave: the text that the agent reads, and the state after it."""

    text: str
    state: S


@dataclass(frozen=True)
class Tool(Generic[S]):
    """``act`` gets the state and the checked arguments by name; its docstring says what it is good for. ``ends``: the
    dialogue is over after a call."""

    act: Callable[..., Outcome[S]]
    parameters: Mapping[str, Kind]
    ends: bool = False


class Toolbox(dict[str, Tool[S]], Generic[S]):
    """Tools by name; a function becomes one by ``@box.tool(argument=KIND, ...)``."""

    def tool(self, **parameters: Kind) -> Callable[[Callable[..., Outcome[S]]], Callable[..., Outcome[S]]]:
        def register(act: Callable[..., Outcome[S]]) -> Callable[..., Outcome[S]]:
            self[act.__name__] = Tool(act, parameters)
            return act

        return register

    def step(self, state: S, call: ToolCall) -> Outcome[S]:
        """What one call gives. Never raises, whatever the call says."""
        tool = self.get(call.name)
        if tool is None:
            return Outcome(f"Error: there is no tool {shown(call.name)}; there are {', '.join(self)}", state)
        try:
            check_arguments(tool.parameters, call.arguments)
            return tool.act(state, **copy.deepcopy(dict(call.arguments)))  # what a state keeps is its own
        except ToolError as error:
            return Outcome(f"Error: {error}", state)

    def ends(self, call: ToolCall) -> bool:
        """Whether the dialogue is over after this call: the user is somebody else's from then on."""
        return call.name in self and self[call.name].ends

    def schemas(self) -> tuple[Schema, ...]:
        """All of them, with their docstrings as descriptions."""
        return tuple(
            schema_of(name, inspect.getdoc(tool.act) or "", object_schema(tool.parameters))
            for name, tool in self.items()
        )


@dataclass(frozen=True)
class ToolboxTools(Generic[S]):
    """A toolbox as what the loop asks for. Each episode begins with ``start`` of its problem; the calls that were made
    before are made again, so that nothing is kept between messages."""

    box: Toolbox[S]
    start: Callable[[Problem], S]

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        return self.box.schemas()

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        return [self._of(request) for request in requests]

    def _of(self, request: ToolRequest) -> tuple[str, ...]:
        state, texts = self.start(request.problem), list[str]()
        for call in (*request.past, *request.calls):
            text, state = self.box.step(state, call)
            texts.append(text)
        return tuple(texts[len(request.past) :])
