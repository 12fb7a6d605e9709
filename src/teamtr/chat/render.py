"""How the shared text becomes one agent's chat messages.

The context is text. An agent's prompt is a rendering of that text, a function of what the agent may see and of
nothing else. Two renderings:

transcript (default)  one system and one user message; the conversation so far is lines of the user message.
                      No template rewrites history, because no history goes through it.
chat                  the agent's own turns are assistant messages, the others' are user messages. The template
                      must then be stable under appended messages (``template.check_template``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from teamtr.types import Problem

ChatMessages = list[dict[str, str]]


def render(
    *,
    agent: str,
    system_prompt: str,
    problem: Problem,
    history: Sequence[tuple[str, str]],
    style: Literal["transcript", "chat"] = "transcript",
) -> ChatMessages:
    """Chat messages for one agent; ``history`` is (author, text) of the turns it sees."""
    question = "\n".join(part for part in (problem.prompt, problem.private.get(agent, "")) if part)
    system = {"role": "system", "content": system_prompt}
    if style == "transcript":
        lines = [question, *(f"{'you' if author == agent else author}: {text}" for author, text in history)]
        return [system, {"role": "user", "content": "\n".join(lines)}]

    messages = [system, {"role": "user", "content": question}]
    for author, text in history:
        if author == agent:
            messages.append({"role": "assistant", "content": text})
        elif messages[-1]["role"] == "user":  # several templates refuse two user messages in a row
            messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n{author}: {text}"}
        else:
            messages.append({"role": "user", "content": f"{author}: {text}"})
    return messages
