"""Wrappers around tools: a limit on the length of results, and several sources of tools as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from teamtr.calls import Schema, ToolCall, name_of
from teamtr.errors import UserError
from teamtr.ports import Tools
from teamtr.types import Problem, ToolRequest


@dataclass(frozen=True)
class Limited:
    """Tools whose results to one message have at most ``max_characters`` in total; longer ones are cut, with a note."""

    tools: Tools
    max_characters: int

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        return self.tools.schemas(problem)

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        return [self._cut(texts) for texts in self.tools.results(requests)]

    def _cut(self, texts: Sequence[str]) -> tuple[str, ...]:
        left, shown = self.max_characters, list[str]()
        for text in texts:
            shown.append(text if len(text) <= left else f"{text[:left]}{cut_note(left)}")
            left -= min(left, len(text))
        return tuple(shown)


def cut_note(characters: int) -> str:
    """The note at the end of a text that was cut."""
    return f" [cut after {characters} characters]"


@dataclass(frozen=True)
class Together:
    """Several sources of tools as one. A call goes to the source that has its name, with the earlier calls to it."""

    parts: tuple[Tools, ...]

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        found = [schema for part in self.parts for schema in part.schemas(problem)]
        names = [name_of(schema) for schema in found]
        if twice := next((name for k, name in enumerate(names) if name in names[:k]), None):
            raise UserError(f"two tools are called {twice!r}: rename one of them, or leave one out of tools")
        return found

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        found: list[dict[int, str]] = [{} for _ in requests]
        for part in self.parts:
            asked: list[tuple[int, list[int], ToolRequest]] = []
            for r, request in enumerate(requests):
                names = {name_of(schema) for schema in part.schemas(request.problem)}
                places = [k for k, call in enumerate(request.calls) if call.name in names]
                if places:
                    own = replace(
                        request, past=_named(request.past, names), calls=tuple(request.calls[k] for k in places)
                    )
                    asked.append((r, places, own))
            replied = part.results([request for _, _, request in asked]) if asked else []
            for (r, places, _), texts in zip(asked, replied, strict=True):
                found[r].update(zip(places, texts, strict=True))
        return [tuple(texts[k] for k in sorted(texts)) for texts in found]


def _named(calls: Sequence[ToolCall], names: set[str]) -> tuple[ToolCall, ...]:
    return tuple(call for call in calls if call.name in names)
