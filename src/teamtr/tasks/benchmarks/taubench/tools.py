"""What a tool is, how a call of one is checked, and one step of a domain: (state, call) -> (result, new state).

A call can do no harm: an unknown tool, an argument that is missing, superfluous or of another type, and a request that
the tool turns down all give a result that begins with "Error:", and leave the state as it was.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from teamtr.chat.tool_calls import ToolCall
from teamtr.tasks.benchmarks.taubench.state import State
from teamtr.tasks.data.rows import shown

LARGEST = 10**12
"""Of the numbers in arguments."""
LONGEST_EXPRESSION = 1_000
_ARITHMETIC = frozenset("0123456789+-*/(). ")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ToolError(Exception):
    """A call that a tool turns down; the message is what the agent reads after "Error: "."""


class Outcome(NamedTuple):
    """What a call gave: the text that the agent reads, and the state after it."""

    text: str
    state: State


@dataclass(frozen=True)
class Kind:
    """What an argument must be, in the words of JSON schema."""

    type: str
    options: tuple[str, ...] = ()
    items: Kind | None = None
    fields: Mapping[str, Kind] = field(default_factory=dict)

    def schema(self) -> dict[str, Any]:
        """The JSON schema, without descriptions."""
        made: dict[str, Any] = {"type": self.type}
        if self.options:
            made["enum"] = list(self.options)
        if self.items is not None:
            made["items"] = self.items.schema()
        if self.fields:
            made |= object_schema(self.fields)
        return made

    def check(self, value: Any, name: str) -> None:
        """Raise ToolError when the value is of another kind."""
        if not _IS[self.type](value):
            raise ToolError(f"{name} must be of type {self.type}, found {shown(value)}")
        if self.options and value not in self.options:
            raise ToolError(f"{name} must be one of {', '.join(self.options)}, found {shown(value)}")
        if self.items is not None:
            for place, item in enumerate(value):
                self.items.check(item, f"{name}[{place}]")
        for field_name, kind in self.fields.items():  # others may stand beside them: agents repeat what they read
            if field_name not in value:
                raise ToolError(f"{name} has no {field_name}")
            kind.check(value[field_name], f"{field_name} of {name}")


def object_schema(fields: Mapping[str, Kind]) -> dict[str, Any]:
    properties = {name: kind.schema() for name, kind in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields)}


def check_arguments(kinds: Mapping[str, Kind], given: Mapping[str, Any]) -> None:
    """Raise ToolError unless exactly these are given, each of its kind."""
    for name, kind in kinds.items():
        if name not in given:
            raise ToolError(f"argument {name} is missing")
        kind.check(given[name], f"argument {name}")
    extra = next((name for name in given if name not in kinds), None)
    if extra is not None:
        raise ToolError(f"there is no argument {shown(extra)}; there are {', '.join(kinds) or 'none'}")


def _is_number(value: Any) -> bool:
    """NaN and what is beyond any amount are none: sums of them would overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


_IS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and _is_number(value),
    "number": _is_number,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}

TEXT = Kind("string")
WHOLE = Kind("integer")
NUMBER = Kind("number")


def choice(*options: str) -> Kind:
    return Kind("string", options=options)


def list_of(kind: Kind) -> Kind:
    return Kind("array", items=kind)


def record(**fields: Kind) -> Kind:
    return Kind("object", fields=fields)


@dataclass(frozen=True)
class Tool:
    """``act`` gets the state and the checked arguments by name. ``ends``: the dialogue is over after a call."""

    act: Callable[..., Outcome]
    parameters: Mapping[str, Kind]
    ends: bool = False


class Toolbox(dict[str, Tool]):
    """The tools of a domain by name; a function becomes one by ``@box.tool(argument=KIND, ...)``."""

    def tool(self, **parameters: Kind) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
        def register(act: Callable[..., Outcome]) -> Callable[..., Outcome]:
            self[act.__name__] = Tool(act, parameters)
            return act

        return register

    def step(self, state: State, call: ToolCall) -> Outcome:
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


def found_in(state: State, table: str, key: str, what: str) -> Any:
    """The record, to be read only; the agent is told where there is none."""
    found = state.find(table, key)
    if found is None:
        raise ToolError(f"{what} not found")
    return found


def shared_tools() -> Toolbox:
    """Those that every domain has."""
    return Toolbox(
        calculate=Tool(_calculate, {"expression": TEXT}),
        think=Tool(_think, {"thought": TEXT}),
        transfer_to_human_agents=Tool(_transfer, {"summary": TEXT}, ends=True),
    )


def _think(state: State, thought: str) -> Outcome:
    return Outcome("", state)


def _transfer(state: State, summary: str) -> Outcome:
    return Outcome("Transfer successful", state)


def _calculate(state: State, expression: str) -> Outcome:
    return Outcome(str(round(value_of(expression), 2)), state)


def value_of(expression: str) -> float:
    """The value of a sum, difference, product or quotient of numbers. Raises ToolError for anything else."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"an expression of more than {LONGEST_EXPRESSION} characters")
    if not _ARITHMETIC.issuperset(expression):
        raise ToolError("invalid characters in expression")
    try:
        value = float(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError("the expression cannot be read") from None
    except (ZeroDivisionError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ToolError("the expression has no value")
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise ToolError("an expression may contain numbers, +, -, *, / and parentheses")
