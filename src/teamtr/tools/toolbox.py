"""Tools that are pure functions of a state: (state, call) -> (result, new state).

A bad call is harmless: an unknown tool, a missing, extra or mistyped argument, and a request that the tool rejects all
give a result that begins with "Error:", and leave the state unchanged.
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
    """The result of a call: the text that the agent reads, and the new state."""

    text: str
    state: S


@dataclass(frozen=True)
class Tool(Generic[S]):
    """``act`` gets the state and the validated arguments by name; its docstring is the tool's description. ``ends``: a
    call of it ends the dialogue."""

    act: Callable[..., Outcome[S]]
    parameters: Mapping[str, Kind]
    ends: bool = False


class Toolbox(dict[str, Tool[S]], Generic[S]):
    """Tools by name; ``@box.tool(argument=KIND, ...)`` adds a function."""

    def tool(self, **parameters: Kind) -> Callable[[Callable[..., Outcome[S]]], Callable[..., Outcome[S]]]:
        def register(act: Callable[..., Outcome[S]]) -> Callable[..., Outcome[S]]:
            self[act.__name__] = Tool(act, parameters)
            return act

        return register

    def step(self, state: S, call: ToolCall) -> Outcome[S]:
        """The outcome of one call. Never raises, whatever the call contains."""
        tool = self.get(call.name)
        if tool is None:
            return Outcome(f"Error: there is no tool {shown(call.name)}; there are {', '.join(self)}", state)
        try:
            check_arguments(tool.parameters, call.arguments)
            return tool.act(state, **copy.deepcopy(dict(call.arguments)))  # a state may store them
        except ToolError as error:
            return Outcome(f"Error: {error}", state)

    def ends(self, call: ToolCall) -> bool:
        """Whether the dialogue is over after this call, because the user is handed over to somebody else."""
        return call.name in self and self[call.name].ends

    def schemas(self) -> tuple[Schema, ...]:
        """The schemas of all tools, with their docstrings as descriptions."""
        return tuple(
            schema_of(name, inspect.getdoc(tool.act) or "", object_schema(tool.parameters))
            for name, tool in self.items()
        )


@dataclass(frozen=True)
class ToolboxTools(Generic[S]):
    """A toolbox behind the port ``Tools``. Each episode begins with ``start(problem)``. Earlier calls are replayed for
    every message, so that no state is kept in between."""

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
