"""Rewrites tool calls of several dialects into one canonical JSON for the shared context (app:pnp-protocol).

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>    tagged (also <function_call>)
    ```tool_call ... ```   ```json ... ```                      fenced
    {"name": ..., "arguments": {...}}                           JSON, the whole message; a list or an envelope of them;
                                                                one call on a line of its own
    name(key="value")   [a(x=1), b()]                           function-call style, the whole message

A declared call that cannot be parsed is replaced by a note with the reason. Text that is not declared to be a call and
does not parse as one is left alone. Nothing is executed here, and every text is parsed in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from teamtr.calls import ToolCall
from teamtr.chat.thinking import without_thinking
from teamtr.chat.tool_calls import (
    MOST_CALLS,
    Malformed,
    calls_in,
    looks_like_calls,
    read_json,
    read_signature,
)

_MARK = re.compile(r"<(/?)(tool_call|function_call)>|```([A-Za-z_]*)", re.IGNORECASE)
_NOTE = re.compile(r"\[malformed tool call: ([^\]\n]*)\]")
_DECLARED_FENCES = ("tool_call", "tool_calls", "function_call", "tool_code")


@dataclass(frozen=True)
class Rejection:
    """Text that is declared to be a call but is not a valid one, and the reason."""

    text: str
    reason: str

    def note(self) -> str:
        """The text that replaces it in the shared context."""
        return f"[malformed tool call: {self.reason}]"


@dataclass(frozen=True)
class Normalised:
    """The text for the shared context, and the calls and rejections in it, in order. ``beside`` is the original text
    around the calls, verbatim, including what was rejected."""

    text: str
    found: tuple[ToolCall | Rejection, ...] = ()
    beside: str = field(default="", compare=False)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(each for each in self.found if isinstance(each, ToolCall))

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        return tuple(each for each in self.found if isinstance(each, Rejection))


@dataclass
class _Writer:
    """Assembles the normalized text. ``notes``: whether the note of an earlier rejection counts as a rejection."""

    tools: Collection[str] | None
    notes: bool = False
    pieces: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    found: list[ToolCall | Rejection] = field(default_factory=list)
    calls: int = 0

    def write(self, text: str, written: str | None = None) -> None:
        """Append text to share, and the original text for ``beside``; None: the same."""
        self.pieces.append(text)
        self.beside.append(text if written is None else written)

    def plain(self, text: str) -> None:
        """Handle a part outside of all marks, in which a call must be a line of its own."""
        for k, line in enumerate(text.split("\n")):
            if k:
                self.write("\n")
            body = line.strip()
            if body.startswith("{") and _is_one_call(body):
                before = line.index(body)
                self.write(line[:before])
                self.declared(body, body)
                self.write(line[before + len(body) :])
                continue
            self.write(line)
            if self.notes:
                self.found += [Rejection(note.group(), note.group(1)) for note in _NOTE.finditer(line)]

    def declared(self, body: str, whole: str) -> None:
        """Handle a part that is declared to be a call."""
        try:
            self.put(calls_in(read_json(body.strip()), self.tools))
        except Malformed as error:
            self.reject(whole, str(error))

    def undeclared(self, body: str, whole: str) -> None:
        """Handle a part that may be a call; it is left alone unless it parses as one."""
        try:
            value = read_json(body.strip())
        except Malformed:
            self.write(whole)
            return
        if looks_like_calls(value):
            self.declared(body, whole)
        else:
            self.write(whole)

    def put(self, calls: list[ToolCall]) -> None:
        if self.calls + len(calls) > MOST_CALLS:
            raise Malformed(f"more than {MOST_CALLS} calls in one message")
        self.calls += len(calls)
        self.found += calls
        self.write("\n".join(call.canonical() for call in calls), "")

    def reject(self, whole: str, reason: str) -> None:
        rejection = Rejection(whole, reason)
        self.found.append(rejection)
        self.write(rejection.note(), whole)

    def done(self) -> Normalised:
        return Normalised("".join(self.pieces), tuple(self.found), "".join(self.beside))


def normalise_calls(text: str, tools: Collection[str] | None = None) -> Normalised:
    """The text with every call in canonical form. ``tools`` are the names of the tools; None allows any."""
    return _read(text, _Writer(tools))


def read_calls(text: str, tools: Collection[str] | None = None) -> tuple[ToolCall | Rejection, ...]:
    """The calls and rejections in a message of the shared context, in order, whether or not its calls were rewritten
    before. Calls within reasoning tags do not count; consecutive rejections with the same reason count once."""
    found = _read(without_thinking(text), _Writer(tools, notes=True)).found
    reasons = [each.reason if isinstance(each, Rejection) else None for each in found]
    return tuple(each for k, each in enumerate(found) if not k or reasons[k] is None or reasons[k] != reasons[k - 1])


def _read(text: str, writer: _Writer) -> Normalised:
    bare = text.strip()
    if bare[:1] in ("{", "["):
        writer.undeclared(bare, text)
        if writer.found:
            return writer.done()
        writer.pieces.clear()
        writer.beside.clear()
    try:
        signature = read_signature(bare, writer.tools)
    except Malformed as error:
        writer.reject(text, str(error))
        return writer.done()
    if signature is not None:
        writer.put(signature)
        return writer.done()
    _scan(text, writer)
    return writer.done()


def _is_one_call(body: str) -> bool:
    """Whether a line is a call in canonical form: an object with a name and arguments and nothing else."""
    try:
        value = read_json(body)
    except Malformed:
        return False
    return isinstance(value, dict) and value.keys() == {"name", "arguments"} and looks_like_calls(value)


def _scan(text: str, writer: _Writer) -> None:
    """Process tagged and fenced calls from mark to mark, so that every character belongs to one part."""
    marks = list(_MARK.finditer(text))
    end = k = 0
    while k < len(marks):
        mark = marks[k]
        writer.plain(text[end : mark.start()])
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
    writer.plain(text[end:])


def _fenced(text: str, marks: list[re.Match[str]], k: int, writer: _Writer) -> tuple[int, int]:
    """Process the fence that opens at mark k; returns the next mark and where the text continues."""
    opening = marks[k]
    language = opening.group(3).lower()
    if language not in ("", "json", *_DECLARED_FENCES):  # a code block in another language
        closing = next((j for j in range(k + 1, len(marks)) if marks[j].group(3) is not None), None)
        if closing is None:
            writer.write(opening.group())
            return k + 1, opening.end()
        writer.write(text[opening.start() : marks[closing].end()])
        return closing + 1, marks[closing].end()
    follower = marks[k + 1] if k + 1 < len(marks) else None
    if follower is None or follower.group(3) is None:
        if language in _DECLARED_FENCES:
            end = follower.start() if follower is not None else len(text)
            writer.reject(text[opening.start() : end], "the fence is not closed")
            return k + 1, end
        writer.write(opening.group())
        return k + 1, opening.end()
    body, whole = text[opening.end() : follower.start()], text[opening.start() : follower.end()]
    (writer.declared if language in _DECLARED_FENCES else writer.undeclared)(body, whole)
    return k + 2, follower.end()
