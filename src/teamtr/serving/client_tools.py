"""Tools that a client brings with its request: agents call them, and the client runs them.

The answering agent gets their schemas through its codec. As soon as one of its messages calls one of them, the team's
turn ends, and the calls are returned to the client in place of that message. A team may also have tools of its own,
which the server runs and which take precedence: if one message calls both, the team's tools are run, and each call of a
client's tool gets an error that asks for a separate message.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from teamtr.calls import Schema, ToolCall, name_of
from teamtr.chat.thinking import without_thinking
from teamtr.chat.tools import normalise_calls, read_calls
from teamtr.ports import Codec, Tools
from teamtr.serving.request import OfferedTool
from teamtr.team import Team, ToolTurns
from teamtr.team.router import Router
from teamtr.types import Ids, Problem, ToolRequest, Turn

ALONE = "Error: call {name} in a message that calls no tools of the team"


@dataclass(frozen=True)
class HandedCall:
    """A call that is returned to the client to run; ``arguments`` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @classmethod
    def of(cls, call: ToolCall) -> HandedCall:
        return cls(call.name, json.dumps(call.arguments, ensure_ascii=False))

    @property
    def body(self) -> dict[str, Any]:
        """The call in the API's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ClientTools:
    """The tools that the client offers to ``agent``; ``own`` names the team's tools that this agent can also call."""

    agent: str
    schemas: tuple[Schema, ...]
    own: frozenset[str] = frozenset()

    @classmethod
    def of(cls, agent: str, offered: Sequence[OfferedTool], own: frozenset[str] = frozenset()) -> ClientTools:
        return cls(agent, tuple(map(_schema, offered)), own)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(map(name_of, self.schemas))

    def calls_in(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a message that the client is to run; none if the message also calls a tool of the team."""
        found = [each for each in read_calls(text, self.names | self.own) if isinstance(each, ToolCall)]
        return () if any(call.name in self.own for call in found) else tuple(found)

    def content(self, text: str) -> str:
        """The text beside the calls of a message, including leading reasoning that is shared and calls that could not
        be parsed. If reasoning follows other text, only what precedes the first reasoning or call."""
        said = without_thinking(text)
        beside = normalise_calls(said, self.names | self.own).beside.rstrip()
        bare = text.rstrip()
        if said.rstrip() and bare.endswith(said.rstrip()):
            return (bare[: len(bare) - len(said.rstrip())] + beside).rstrip()
        told: list[str] = []
        Held(self.names | self.own, told.append).take(text)
        return "".join(told)

    def told_by(self, codec: Codec) -> Codec:
        """The agent's codec, extended with the schemas of these tools."""
        return _Telling(codec, self)

    def until_called(self, router: Router) -> ToolTurns:
        """The team's router, except that the team's turn ends as soon as a client's tool is called."""
        if isinstance(router, ToolTurns):
            return _UntilCalled(router.inner, router.steps, router.agents, self)
        return _UntilCalled(router, 1, (), self)

    def beside(self, tools: Tools) -> Tools:
        """The team's own tools together with these."""
        return _BesideOwn(tools, self)

    def among(self, team: Team, own: Sequence[str]) -> Team:
        """The team, in which only ``self.agent`` can call these tools; ``own`` lists all tools of the team."""
        return Team(
            tuple(
                replace(agent, tools=(*allowed, *(sorted(self.names) if agent.name == self.agent else ())))
                for agent in team
                for allowed in [tuple(own) if agent.tools is None else agent.tools]
            )
        )


def _schema(tool: OfferedTool) -> Schema:
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    told = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": told}


@dataclass(frozen=True)
class _Telling:
    codec: Codec
    client: ClientTools

    def encode(self, messages: Sequence[dict[str, str]], tools: Sequence[Schema] = ()) -> Ids:
        own = [tool for tool in tools if name_of(tool) not in self.client.names]
        return self.codec.encode(messages, [*own, *self.client.schemas])

    def encode_message(self, text: str) -> Ids:
        return self.codec.encode_message(text)

    def decode(self, token_ids: Ids) -> str:
        return self.codec.decode(token_ids)


@dataclass(frozen=True)
class _UntilCalled(ToolTurns):
    client: ClientTools

    def next(self, turns: Sequence[Turn]) -> tuple[int, str] | None:
        if turns and turns[-1].agent == self.client.agent and self.client.calls_in(turns[-1].text):
            return None
        return super().next(turns)


@dataclass(frozen=True)
class _BesideOwn:
    own: Tools
    client: ClientTools

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        return [*self.own.schemas(problem), *self.client.schemas]

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        """Results of the team's tools, and an error for each call of a client's tool. For a message that calls only the
        client's tools these errors are never read, since the team's turn is over."""
        mixed = [any(self._is_own(call) for call in request.calls) for request in requests]
        asked = [
            replace(
                request,
                past=tuple(filter(self._is_own, request.past)),
                calls=tuple(filter(self._is_own, request.calls)),
            )
            for request, own in zip(requests, mixed, strict=True)
            if own
        ]
        answered = iter(self.own.results(asked) if asked else ())
        replies = [iter(next(answered)) if own else iter(()) for own in mixed]
        return [
            tuple(next(reply) if self._is_own(call) else ALONE.format(name=call.name) for call in request.calls)
            for request, reply in zip(requests, replies, strict=True)
        ]

    def _is_own(self, call: ToolCall) -> bool:
        return call.name not in self.client.names


# -- while a message is being sampled ------------------------------------------------------------------------------

_TAGS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>", "```")
_REASONING = ("<think>", "</think>", "<thinking>", "</thinking>")
_MAY_CALL = re.compile(rf"{'|'.join(_TAGS)}|<think(?:ing)?>|\{{", re.IGNORECASE)
_THOUGHT = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_BEGINNINGS = sorted({mark[:size] for mark in (*_TAGS, *_REASONING) for size in range(1, len(mark))}, key=len)
_UNFINISHED = re.compile(rf"(?:{'|'.join(map(re.escape, reversed(_BEGINNINGS)))})\Z", re.IGNORECASE)
_SKIPPED = re.compile(r"(?:\s++|#[^\n]*+\n|\\\n)*+")
"""Blanks, comments and line continuations before a call, which ``teamtr.literal`` skips."""
_SKIPPED_NEXT = ("", "\\", "#")
"""First characters of text that may turn out to be skipped as well."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


class Held:
    """Streams the text of a message as far as it cannot be part of a call (``chat.tools`` lists the forms). From where
    a call may begin, text is held back until the end of the message."""

    def __init__(self, names: frozenset[str], tell: Callable[[str], None]) -> None:
        self._names = names
        self._tell = tell
        self._text = ""
        self._start = 0
        """Where the text after the reasoning begins; a call may be all of this text."""
        self._words = 0
        """Where its first word may begin."""
        self._sent = self._looked = 0
        self._call_at: int | None = None
        self._is_shut = False

    def take(self, piece: str) -> None:
        """Add a piece of the message."""
        self._text += piece
        if self._is_shut:
            return
        upto = self._certain()
        if upto > self._sent:
            self._tell(self._text[self._sent : upto])
            self._sent = upto

    def end(self, content: str) -> None:
        """End the message; ``content`` is all of its text that the client is to get."""
        if not content.startswith(self._text[: self._sent]):
            raise ValueError("a part of a call was told as text: ask without stream")
        if content[self._sent :]:
            self._tell(content[self._sent :])
        self._is_shut = True

    def _certain(self) -> int:
        """Up to where the text cannot be part of a call, whatever follows."""
        text = self._text
        while True:
            begin = max(self._start, self._sent)
            fresh = max(begin, self._looked - len(_BEGINNINGS[-1]))  # the rest was searched before
            thought = _THOUGHT.search(text, fresh)
            if self._call_at is None:
                self._call_at = self._call(fresh)
            if thought is None or (self._call_at is not None and self._call_at < thought.start()):
                break
            self._start = self._words = thought.end()
            self._call_at = None
        self._looked = len(text)
        if self._sent <= self._start and (waits := self._may_be_a_call()) is not None:
            self._is_shut = waits
            return self._start
        if self._call_at is not None:
            self._is_shut = True
            return begin + len(text[begin : self._call_at].rstrip())
        unfinished = _UNFINISHED.search(text, max(begin, len(text) - len(_BEGINNINGS[-1])))
        end = len(text) if unfinished is None else unfinished.start()
        return begin + len(text[begin:end].rstrip())

    def _call(self, begin: int) -> int | None:
        """Where a call may begin, or reasoning that follows other text; None if nowhere."""
        text = self._text
        for found in _MAY_CALL.finditer(text, begin):
            mark, at = found.group().lower(), found.start()
            if mark == "{":
                is_call = self._opens_a_line(at)
            elif mark.startswith("<think"):
                is_call = self._sent > 0 or bool(text[:at].strip())  # not at the very beginning
            else:
                is_call = True
            if is_call:
                return at
        return None

    def _opens_a_line(self, at: int) -> bool:
        text = self._text
        while at > 0 and text[at - 1] != "\n" and text[at - 1].isspace():
            at -= 1
        return at == 0 or text[at - 1] == "\n"

    def _may_be_a_call(self) -> bool | None:
        """Whether the message must be held to its end because it may be one call as a whole. None: it is no such call.
        False: not known yet."""
        text = self._text
        self._words = _end(_SKIPPED, text, self._words)
        first = text[self._words : self._words + 1]
        if first in ("{", "["):
            return True
        name = _WORD.match(text, self._words)
        if name is None:
            return False if first in _SKIPPED_NEXT and self._is_unfinished(self._words) else None
        after = _end(_SKIPPED, text, name.end())
        if name.group() in self._names and text[after : after + 1] in (*_SKIPPED_NEXT, "("):
            return True if text[after : after + 1] == "(" else False if self._is_unfinished(after) else None
        return False if name.end() == len(text) and self._begins_a_name(name.group()) else None

    def _is_unfinished(self, at: int) -> bool:
        """Whether the skipped text may continue in what has not arrived yet."""
        return self._text[at:] in ("", "\\") or self._text.startswith("#", at)

    def _begins_a_name(self, word: str) -> bool:
        return any(name.startswith(word) for name in self._names)


def _end(pattern: re.Pattern[str], text: str, begin: int) -> int:
    found = pattern.match(text, begin)
    return begin if found is None else found.end()
