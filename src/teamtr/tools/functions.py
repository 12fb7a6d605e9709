"""User-defined Python functions as tools, run in the killable workers of the grading pool.

A function that hangs, dies, takes too much memory or raises gives an error as its result, and has no other effect. It
must keep no state between calls: any worker may serve a call, and a killed worker is replaced by a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from teamtr.calls import Schema, ToolCall
from teamtr.errors import UserError
from teamtr.grading import GraderError, Result, WorkerPool
from teamtr.types import Problem, ToolRequest

MIB = 1 << 20
SERVED = "teamtr.tools.served"


class FunctionTools:
    """The functions that ``sources`` name.

    Args:
        sources: ``python:FILE:NAME``, each a function or a list of functions.
        seconds: processor time for one call; the wall-clock limit is ten times that.
        memory_mb: address space of a worker, in MiB.
        workers: number of processes.
    """

    def __init__(self, sources: Sequence[str], *, seconds: float, memory_mb: int, workers: int = 1) -> None:
        self._setup = {"sources": list(sources)}
        self._seconds = seconds
        self._pool = WorkerPool(workers, seconds, memory_bytes=memory_mb * MIB, preload=[SERVED])
        try:
            (described,) = self._pool.submit(f"{SERVED}:functions", [{"describe": True}], self._setup)
        except GraderError as error:
            raise UserError(f"tools: {', '.join(sources)} cannot be used: {error}") from None
        if described.kind != "ok":
            raise UserError(f"tools: {', '.join(sources)} cannot be used: {described.message}")
        self._schemas: tuple[Schema, ...] = tuple(each["schema"] for each in described.value)
        self._given: Mapping[str, Sequence[str]] = {
            each["schema"]["function"]["name"]: each["given"] for each in described.value
        }

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        return self._schemas

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        items = [self._item(request, place, call) for request in requests for place, call in enumerate(request.calls)]
        replied = iter(self._pool.submit(f"{SERVED}:functions", items, self._setup) if items else ())
        return [tuple(self._text(call, next(replied)) for call in request.calls) for request in requests]

    def close(self) -> None:
        self._pool.close()

    def _item(self, request: ToolRequest, place: int, call: ToolCall) -> dict[str, Any]:
        problem = request.problem
        known: dict[str, Any] = {
            "problem": lambda: {"id": problem.id, "prompt": problem.prompt, "columns": dict(problem.columns)},
            "past": lambda: [
                {"name": one.name, "arguments": dict(one.arguments)} for one in (*request.past, *request.calls[:place])
            ],
        }
        wanted = {name: known[name]() for name in self._given[call.name]}
        return {"tool": call.name, "arguments": dict(call.arguments), **wanted}

    def _text(self, call: ToolCall, result: Result) -> str:
        if result.kind == "ok":
            return str(result.value)
        if result.kind == "timeout":
            return f"Error: {call.name} took too long: {result.message}"
        return f"Error: {call.name} failed: {result.message}"
