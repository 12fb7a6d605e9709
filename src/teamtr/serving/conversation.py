"""A client's conversation as the team, or one of its agents, gets to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from teamtr.chat.render import ChatMessages
from teamtr.chat.transcript import spoken
from teamtr.serving.request import BadRequest, ChatMessage
from teamtr.types import Problem

USER, TEAM = "User", "Team"
"""How earlier messages are labelled in what the team reads."""


def problem_of(messages: Sequence[ChatMessage], private: Mapping[str, str], agents: Sequence[str]) -> Problem:
    """The conversation as a problem for the team.

    A single user message is the problem's prompt to the letter: the team is asked what it was trained on. Of a longer
    conversation every message is a line with its author, written so that no text can pass for somebody else's line.
    Instructions (system, developer) stand before it: the agents have system prompts of their own.
    """
    _require_question(messages)
    unknown = sorted(set(private) - set(agents))
    if unknown:
        raise BadRequest(
            f"private names {unknown[0][:100]!r}, who is no agent of the team: they are {', '.join(agents)}",
            "private",
            "invalid_value",
        )
    instructions = [message.text for message in messages if message.role in ("system", "developer")]
    said = [message for message in messages if message.role in ("user", "assistant")]
    if len(said) == 1:
        talk = said[0].text
    else:
        labels = {"user": USER, "assistant": TEAM}
        names = {USER, TEAM, *agents}
        talk = "\n".join(spoken(labels[message.role], message.text, names) for message in said)
    return Problem(id="request", prompt="\n\n".join([*instructions, talk]), private=dict(private))


def chat_of(messages: Sequence[ChatMessage], system_prompt: str) -> ChatMessages:
    """The conversation as chat messages of one agent, who keeps its own system prompt unless the client gives one."""
    _require_question(messages)
    instructions = [message.text for message in messages if message.role in ("system", "developer")]
    chat = [{"role": "system", "content": "\n\n".join(instructions) if instructions else system_prompt}]
    for message in messages:
        if message.role in ("system", "developer"):
            continue
        if chat[-1]["role"] == message.role:  # several templates refuse two messages of one role in a row
            chat[-1] = {"role": message.role, "content": f"{chat[-1]['content']}\n{message.text}"}
        else:
            chat.append({"role": message.role, "content": message.text})
    return chat


def _require_question(messages: Sequence[ChatMessage]) -> None:
    said = [message.role for message in messages if message.role in ("user", "assistant")]
    if not said or said[-1] != "user":
        raise BadRequest("the last message must be the user's: there is nothing to answer", "messages", "invalid_value")
