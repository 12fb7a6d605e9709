"""Played dialogues: the user, simulated by a player from the task's instruction, and the tools that agents call.

The user speaks first and replies to every message of the team, until it says ``###STOP###`` or is transferred to a
human. It does not see a message that calls a tool: if a round ends with one, it sends nothing and the team goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.calls import Schema, ToolCall, name_of
from teamtr.chat.render import ChatMessages
from teamtr.chat.thinking import without_thinking
from teamtr.chat.tools import read_calls
from teamtr.tasks.benchmarks.taubench.replay import STOP
from teamtr.tasks.benchmarks.taubench.state import State
from teamtr.tasks.data.rows import DataError
from teamtr.tasks.players import Player
from teamtr.tools.kinds import object_schema
from teamtr.tools.toolbox import Toolbox, ToolboxTools
from teamtr.types import Event, Message, Problem, Reply, Situation, ToolRequest

USER = "user"
"""The author of the user's messages."""
GREETING = "Good day. What can I do for you?"
"""The desk's first message as shown to the user's player; no agent sees it."""
SILENCE = "(The agent says nothing.)"
ROLE = f"""You play a customer who writes to a support desk. Who you are, and what you want:
{{instruction}}

How you write:
- In the first person, one short message at a time, in the manner that the description gives you.
- Say what the present step needs, and leave the rest until you are asked for it.
- Use your own words; do not recite the description, and never say that you were given one.
- Make nothing up: what the description does not say, you do not know.
- When all that you want is done, or you learn that it cannot be done and want nothing else, or you are handed over to \
a person, write {STOP} and nothing else."""


def heard(text: str, toolbox: Toolbox[State]) -> str | None:
    """The part of a message that the user sees: not its reasoning, and nothing (None) if it calls a tool."""
    return None if read_calls(text, frozenset(toolbox)) else without_thinking(text).strip()


@dataclass(frozen=True)
class Customer:
    """The environment of a domain's dialogues: the user."""

    player: Player
    toolbox: Toolbox[State]

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        gone = {i for i, s in enumerate(situations) if any(map(self.toolbox.ends, s.calls))}
        asked = [i for i, s in enumerate(situations) if i not in gone and self._is_spoken_to(s)]
        said = self.player.answer([self._prompt(situations[i]) for i in asked], seed=seed) if asked else []
        replies = {i: _reply(text, opens=not situations[i].acts) for i, text in zip(asked, said, strict=True)}
        return [replies.get(i, Reply(ends=i in gone)) for i in range(len(situations))]

    def speakers(self, problem: Problem) -> tuple[str, ...]:
        return (USER,)

    def _is_spoken_to(self, situation: Situation) -> bool:
        return not situation.acts or heard(situation.acts[-1], self.toolbox) is not None

    def _prompt(self, situation: Situation) -> ChatMessages:
        """The player's chat: it writes as the assistant, and the team's messages are the user's."""
        instruction = situation.problem.columns["instruction"]
        chat = [
            {"role": "system", "content": ROLE.replace("{instruction}", instruction)},
            {"role": "user", "content": GREETING},
        ]
        for act, reply in zip(situation.acts, situation.replies, strict=True):
            chat += [{"role": "assistant", "content": message.text} for message in reply.messages]
            told = heard(act, self.toolbox)
            if told is not None:
                chat.append({"role": "user", "content": told or SILENCE})
        return chat


def _reply(text: str, *, opens: bool) -> Reply:
    """The user's reply. The first message cannot stop the dialogue, so the marker is removed from it."""
    said = without_thinking(text).strip()
    if opens:
        said = said.replace(STOP, "").strip()
    return Reply((Message(USER, said),), ends=STOP in said)


def trajectory(events: Iterable[Event], toolbox: Toolbox[State]) -> str:
    """The dialogue as the benchmark stores it: a JSON list of chat messages, without the tools' results."""
    messages: list[dict[str, Any]] = []
    for event in events:
        if event.call is not None:
            messages.append(calling(event.call))
        elif event.by == "environment":
            messages.append({"role": "user", "content": event.text})
        elif (told := heard(event.text, toolbox)) is not None:
            messages.append({"role": "assistant", "content": told})
    return json.dumps(messages)


def calling(call: ToolCall) -> dict[str, Any]:
    """The agent's message that makes a call."""
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


@dataclass(frozen=True)
class DomainTools:
    """A domain's tools, with the descriptions in the benchmark's own file."""

    tools: ToolboxTools[State]
    told: tuple[Schema, ...]

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        return self.told

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        return self.tools.results(requests)


def check_schemas(file: str, schemas: Any, toolbox: Toolbox[State]) -> tuple[Schema, ...]:
    """The schemas of the file. Raises DataError unless they match the domain's tools and their arguments."""
    if not isinstance(schemas, list) or not all(_is_schema(schema) for schema in schemas):
        raise DataError(f'{file}: must be a list of tools, each {{"type": "function", "function": {{"name": ...}}}}')
    told = {name_of(schema): _bare(schema["function"].get("parameters")) for schema in schemas}
    ours = {name: _bare(object_schema(tool.parameters)) for name, tool in toolbox.items()}
    wrong = sorted(name for name in told.keys() | ours.keys() if told.get(name) != ours.get(name))
    if wrong or len(told) != len(schemas):
        which = ", ".join(wrong) or "one of them stands there twice"
        raise DataError(f"{file}: these are not the tools of this domain, or they take other arguments: {which}")
    return tuple(schemas)


def _is_schema(schema: Any) -> bool:
    function = schema.get("function") if isinstance(schema, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _bare(schema: Any) -> Any:
    """The schema without descriptions, and with ``required`` sorted."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: _bare(value) for key, value in schema.items() if key != "description" or not isinstance(value, str)}
    return {**kept, "required": sorted(kept["required"])} if isinstance(kept.get("required"), list) else kept
