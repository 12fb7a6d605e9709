"""What the tau-bench domains share: tools to calculate, think and transfer the user, and the lookup of records."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from teamtr.tasks.benchmarks.taubench.state import State
from teamtr.tools.kinds import TEXT, ToolError
from teamtr.tools.toolbox import Outcome, Tool, Toolbox

LONGEST_EXPRESSION = 1_000
_ARITHMETIC = frozenset("0123456789+-*/(). ")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def found_in(state: State, table: str, key: str, what: str) -> Any:
    """The record, which must not be modified. Raises ToolError if there is none."""
    found = state.find(table, key)
    if found is None:
        raise ToolError(f"{what} not found")
    return found


def shared_tools() -> Toolbox[State]:
    """The tools that every domain has."""
    return Toolbox(
        calculate=Tool(_calculate, {"expression": TEXT}),
        think=Tool(_think, {"thought": TEXT}),
        transfer_to_human_agents=Tool(_transfer, {"summary": TEXT}, ends=True),
    )


def _think(state: State, thought: str) -> Outcome[State]:
    return Outcome("", state)


def _transfer(state: State, summary: str) -> Outcome[State]:
    return Outcome("Transfer successful", state)


def _calculate(state: State, expression: str) -> Outcome[State]:
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
