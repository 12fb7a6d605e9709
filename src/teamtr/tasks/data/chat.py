"""Questions in chat format: a list of messages with ``role`` and ``content``, one of them the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from teamtr.tasks.data.rows import DataError, image_refusal
from teamtr.text import shown

SYSTEM = ("system", "developer")


class Chat(NamedTuple):
    """The user's text; the assistant's reply after it, if any; and whether a system prompt was left out."""

    prompt: str
    reply: str | None
    has_system: bool


def is_chat(value: Any) -> bool:
    """Whether a value is a list of chat messages."""
    return (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def read_chat(messages: Sequence[Mapping[str, Any]], where: str) -> Chat:
    """The question that a conversation asks. Raises DataError if it has several, or content other than text."""
    roles = [str(message["role"]) for message in messages]
    texts = [_text(message.get("content"), f"{where}, message {k + 1}") for k, message in enumerate(messages)]
    asked = [k for k, role in enumerate(roles) if role == "user"]
    if len(asked) != 1:
        raise DataError(
            f"{where}: its prompt has {len(asked)} user messages; give one (system prompts belong to the agents, and a "
            "conversation of several turns must be written as one text)"
        )
    after = roles[asked[0] + 1 :]
    if any(role not in SYSTEM for role in roles[: asked[0]]) or after not in ([], ["assistant"]):
        raise DataError(
            f"{where}: its messages are of {', '.join(roles)}: give one of the user, a reply of the assistant behind "
            "it at most, and nothing else but system prompts before it"
        )
    return Chat(texts[asked[0]], texts[-1] if after else None, asked[0] > 0)


def _text(content: Any, where: str) -> str:
    """A message's text, or the joined text of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise DataError(f"{where}: its content must be text, found {shown(content)}")
    parts = []
    for part in content:
        if refused := image_refusal("content", part):
            raise DataError(f"{where}: {refused}")
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: a part of its content must be text, found {shown(part)}")
        parts.append(part["text"])
    return "".join(parts)
