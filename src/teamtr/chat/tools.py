"""Tool calls of several dialects become one canonical JSON before they enter a shared context (app:pnp-protocol).

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>    tagged (also <function_call>)
    ```tool_call ... ```   ```json ... ```                      fenced
    {"name": ..., "arguments": {...}}                           JSON, the whole message; a list or an envelope of them
    name(key="value")   [a(x=1), b()]                           function-call style, the whole message

A call that is declared as one and cannot be read is replaced by a note that says why. Text that nobody declared to be
a call and that does not read as one is left alone. Nothing is executed, and every text is read in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from teamtr.chat.tool_calls import (
    MOST_CALLS,
    Malformed,
    ToolCall,
    calls_in,
    looks_like_calls,
    read_json,
    read_signature,
)

_MARK = re.compile(r"<(/?)(tool_call|function_call)>|```([A-Za-z_]*)", re.IGNORECASE)
_DECLARED_FENCES = ("tool_call", "tool_calls", "function_call", "tool_code")


@dataclass(frozen=True)
class Rejection:
    """What was declared to be a call and is none, and why."""

    text: str
    reason: str

    def note(self) -> str:
        """What stands in the shared context in its place."""
        return f"[malformed tool call: {self.reason}]"


@dataclass(frozen=True)
class Normalised:
    """The text for the shared context, the calls in it, and what was rejected."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    rejected: tuple[Rejection, ...] = ()


@dataclass
class _Writer:
    tools: Collection[str] | None
    pieces: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)

    def declared(self, body: str, whole: str) -> None:
        """A part that says that it is a call."""
        try:
            self.put(calls_in(read_json(body.strip()), self.tools))
        except Malformed as error:
            self.reject(whole, str(error))

    def undeclared(self, body: str, whole: str) -> None:
        """A part that may be a call: it is left alone unless it reads as one."""
        try:
            value = read_json(body.strip())
        except Malformed:
            self.pieces.append(whole)
            return
        if looks_like_calls(value):
            self.declared(body, whole)
        else:
            self.pieces.append(whole)

    def put(self, calls: list[ToolCall]) -> None:
        if len(self.calls) + len(calls) > MOST_CALLS:
            raise Malformed(f"more than {MOST_CALLS} calls in one message")
        self.calls += calls
        self.pieces.append("\n".join(call.canonical() for call in calls))

    def reject(self, whole: str, reason: str) -> None:
        self.rejected.append(Rejection(whole, reason))
        self.pieces.append(self.rejected[-1].note())

    def done(self) -> Normalised:
        return Normalised("".join(self.pieces), tuple(self.calls), tuple(self.rejected))


def normalise_calls(text: str, tools: Collection[str] | None = None) -> Normalised:
    """Every call in the text in canonical form. ``tools`` are the names there are; None allows any."""
    writer = _Writer(tools)
    bare = text.strip()
    if bare[:1] in ("{", "["):
        writer.undeclared(bare, text)
        if writer.calls or writer.rejected:
            return writer.done()
        writer.pieces.clear()
    try:
        signature = read_signature(bare, tools)
    except Malformed as error:
        writer.reject(text, str(error))
        return writer.done()
    if signature is not None:
        writer.put(signature)
        return writer.done()
    _scan(text, writer)
    return writer.done()


def _scan(text: str, writer: _Writer) -> None:
    """Tagged and fenced calls, from mark to mark: every character is looked at by one part alone."""
    marks = list(_MARK.finditer(text))
    end = k = 0
    while k < len(marks):
        mark = marks[k]
        writer.pieces.append(text[end : mark.start()])
        fence = mark.group(3)
        if fence is not None:
            k, end = _fenced(text, marks, k, writer)
            continue
        follower = marks[k + 1] if k + 1 < len(marks) else None
        if mark.group(1):
            writer.reject(mark.group(), "a closing tag that nothing opened")
            end = mark.end()
        elif follower is not None and follower.group(1) and follower.group(2).lower() == mark.group(2).lower():
            end = follower.end()
            writer.declared(text[mark.end() : follower.start()], text[mark.start() : end])
            k += 1
        else:
            end = follower.start() if follower is not None else len(text)
            writer.reject(text[mark.start() : end], "the tag is not closed")
        k += 1
    writer.pieces.append(text[end:])


def _fenced(text: str, marks: list[re.Match[str]], k: int, writer: _Writer) -> tuple[int, int]:
    """One fence that opens at mark k; returns the next mark and where the text goes on."""
    opening = marks[k]
    language = opening.group(3).lower()
    if language not in ("", "json", *_DECLARED_FENCES):  # code of another language is code
        closing = next((j for j in range(k + 1, len(marks)) if marks[j].group(3) is not None), None)
        if closing is None:
            writer.pieces.append(opening.group())
            return k + 1, opening.end()
        writer.pieces.append(text[opening.start() : marks[closing].end()])
        return closing + 1, marks[closing].end()
    follower = marks[k + 1] if k + 1 < len(marks) else None
    if follower is None or follower.group(3) is None:
        if language in _DECLARED_FENCES:
            end = follower.start() if follower is not None else len(text)
            writer.reject(text[opening.start() : end], "the fence is not closed")
            return k + 1, end
        writer.pieces.append(opening.group())
        return k + 1, opening.end()
    body, whole = text[opening.end() : follower.start()], text[opening.start() : follower.end()]
    (writer.declared if language in _DECLARED_FENCES else writer.undeclared)(body, whole)
    return k + 2, follower.end()
