"""A client's conversation in the form that the team, or one of its agents, reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from teamtr.calls import ToolCall
from teamtr.chat.render import ChatMessages
from teamtr.chat.tool_calls import MOST_CALLS, Malformed, checked, read_json
from teamtr.chat.transcript import spoken
from teamtr.serving.request import BadRequest, ChatMessage, MadeCall
from teamtr.types import Problem

USER, TEAM, RESULT = "User", "Team", "Tool result"
"""Labels of earlier messages in the text that the team reads. Results of a client's tools do not get the label of the
team's own tools (``calls.TOOL``), because the server did not run them."""
LONGEST_RESULT = 65_536
"""Maximum number of characters of a tool result."""


@dataclass(frozen=True)
class Said:
    """One message of the conversation as the team reads it. Calls follow the text, one per line; their results follow
    as messages, in the order of the calls."""

    role: Literal["user", "assistant", "result"]
    text: str


def problem_of(messages: Sequence[ChatMessage], private: Mapping[str, str], agents: Sequence[str]) -> Problem:
    """The conversation as a problem for the team.

    A single user message becomes the problem's prompt unchanged, which is the form the team was trained on. In a longer
    conversation every message is a line with its author, written so that no text can pass for another author's line.
    Instructions (system, developer) come first, because the agents have system prompts of their own.
    """
    said = said_in(messages)
    unknown = sorted(set(private) - set(agents))
    if unknown:
        raise BadRequest(
            f"private names {unknown[0][:100]!r}, who is no agent of the team: they are {', '.join(agents)}",
            "private",
            "invalid_value",
        )
    if len(said) == 1:
        talk = said[0].text
    else:
        labels = {"user": USER, "assistant": TEAM, "result": RESULT}
        names = {USER, TEAM, RESULT, *agents}
        talk = "\n".join(spoken(labels[one.role], one.text, names) for one in said)
    return Problem(id="request", prompt="\n\n".join([*_instructions(messages), talk]), private=dict(private))


def chat_of(messages: Sequence[ChatMessage], system_prompt: str) -> ChatMessages:
    """The conversation as chat messages for one agent. Instructions of the client replace the agent's system prompt.
    Tool results are lines of the user's message, as in a chat of the team; user text after them is labeled too, or a
    result could pass for it."""
    instructions = _instructions(messages)
    chat = [{"role": "system", "content": "\n\n".join(instructions) if instructions else system_prompt}]
    before = None
    for one in said_in(messages):
        role, text = ("assistant", one.text) if one.role == "assistant" else ("user", one.text)
        if one.role == "result":
            text = spoken(RESULT, text, (USER, RESULT))
        elif one.role == "user" and before == "result":
            text = spoken(USER, text, (USER, RESULT))
        before = "result" if "result" in (one.role, before) and role == "user" else one.role
        if chat[-1]["role"] == role:  # several templates refuse two messages of one role in a row
            chat[-1] = {"role": role, "content": f"{chat[-1]['content']}\n{text}"}
        else:
            chat.append({"role": role, "content": text})
    return chat


def said_in(messages: Sequence[ChatMessage]) -> list[Said]:
    """All messages but instructions. Raises BadRequest if there is nothing to answer, or if a tool call does not have
    exactly one result."""
    said: list[Said] = []
    open_calls: _OpenCalls | None = None
    for k, message in enumerate(messages):
        _check_parts(k, message)
        if message.role == "tool":
            if open_calls is None:
                raise _wrong(k, "a result must stand behind the message whose call it answers, and none is there")
            open_calls.answer(k, message)
            continue
        if open_calls is not None:
            said += open_calls.results()
            open_calls = None
        if message.role == "user":
            said.append(Said("user", message.text))
        elif message.role == "assistant":
            calls = message.tool_calls or []
            made = [_call(k, j, call).canonical() for j, call in enumerate(calls)]
            text = "\n".join([*([message.text] if message.text or not made else []), *made])
            said.append(Said("assistant", text))
            open_calls = _OpenCalls(k, calls) if calls else None
    if open_calls is not None:
        said += open_calls.results()
    if not said or said[-1].role == "assistant":
        raise BadRequest(
            "the last message must be the user's, or the result of a tool: there is nothing to answer",
            "messages",
            "invalid_value",
        )
    return said


class _OpenCalls:
    """The calls of message ``place`` and their results so far."""

    def __init__(self, place: int, calls: Sequence[MadeCall]) -> None:
        self.place = place
        self._answers: dict[str, str | None] = {call.id: None for call in calls}
        if len(calls) > MOST_CALLS:
            raise _wrong(place, f"at most {MOST_CALLS} calls are taken in one message, not {len(calls)}")
        if len(self._answers) < len(calls):
            raise _wrong(place, "two calls have the same id: no result could say which it answers")

    def answer(self, k: int, message: ChatMessage) -> None:
        called = message.tool_call_id or ""
        if called not in self._answers:
            raise _wrong(k, f"answers the call {_shown(called)}, which messages.{self.place} did not make")
        if self._answers[called] is not None:
            raise _wrong(k, f"answers the call {_shown(called)} a second time")
        if len(message.text) > LONGEST_RESULT:
            raise _wrong(k, f"a result may have {LONGEST_RESULT} characters, and this has {len(message.text)}")
        self._answers[called] = message.text

    def results(self) -> list[Said]:
        """The results in the order of the calls. Raises BadRequest if one is missing."""
        missing = [called for called, text in self._answers.items() if text is None]
        if missing:
            raise _wrong(self.place, f"no message of role tool right behind it answers the call {_shown(missing[0])}")
        return [Said("result", text or "") for text in self._answers.values()]


def _check_parts(k: int, message: ChatMessage) -> None:
    """Raises BadRequest if a message lacks a field that its role needs, or has a field of another role."""
    if message.content is None and not message.tool_calls:
        raise BadRequest(f"messages.{k}.content is missing", "messages", "missing_required_parameter")
    if message.tool_calls and message.role != "assistant":
        raise _wrong(k, "only an assistant's message can hold tool_calls")
    if message.role == "tool" and message.tool_call_id is None:
        raise BadRequest(f"messages.{k}.tool_call_id is missing", "messages", "missing_required_parameter")
    if message.role != "tool" and message.tool_call_id is not None:
        raise _wrong(k, "only a message of role tool can hold a tool_call_id")


def _call(k: int, j: int, made: MadeCall) -> ToolCall:
    try:
        arguments = read_json(made.function.arguments) if made.function.arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise Malformed("the arguments are not an object")
        return checked(made.function.name, arguments, None)
    except Malformed as error:
        raise _wrong(k, f"tool_calls.{j} cannot be read: {error}") from None


def _instructions(messages: Sequence[ChatMessage]) -> list[str]:
    return [message.text for message in messages if message.role in ("system", "developer")]


def _wrong(k: int, why: str) -> BadRequest:
    return BadRequest(f"messages.{k}: {why}", "messages", "invalid_value")


def _shown(called: str) -> str:
    return repr(called[:100])
