"""Renders the shared text into one agent's chat messages.

The context is text. An agent's prompt is a rendering of that text, a function of what the agent may see and of
nothing else. There are two styles:

transcript (default)  one system and one user message; the conversation so far is lines of the user message.
                      A template cannot rewrite history, because no history goes through it.
chat                  the agent's own turns are assistant messages, the others' are user messages. The template
                      must then be stable under appended messages (``template.check_template``).

In both, ``transcript.py`` writes the others' lines, so that no text can imitate another speaker.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from teamtr.chat.transcript import YOU, quoted, spoken
from teamtr.types import Problem

ChatMessages = list[dict[str, str]]


def render(
    *,
    agent: str,
    system_prompt: str,
    problem: Problem,
    history: Sequence[tuple[str, str]],
    speakers: Collection[str],
    style: Literal["transcript", "chat"] = "transcript",
) -> ChatMessages:
    """Chat messages for one agent. ``history``: (author, text) of the messages that it sees. ``speakers``: all that may
    speak in this episode, whether they have spoken or not."""
    names = {*speakers, *(author for author, _ in history)}
    question = quoted("\n".join(part for part in (problem.prompt, problem.private.get(agent, "")) if part), names)
    system = {"role": "system", "content": system_prompt}
    if style == "transcript":
        lines = [question, *(spoken(YOU if author == agent else author, text, names) for author, text in history)]
        return [system, {"role": "user", "content": "\n".join(lines)}]

    messages = [system, {"role": "user", "content": question}]
    for author, text in history:
        said = spoken(author, text, names)
        if author == agent:
            messages.append({"role": "assistant", "content": text})
        elif messages[-1]["role"] == "user":  # several templates reject two user messages in a row
            messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n{said}"}
        else:
            messages.append({"role": "user", "content": said})
    return messages
