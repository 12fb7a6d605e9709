"""A dialogue that is played: the user, who is played from the task's instruction, and the tools that agents call.

The user speaks first and replies to every message of the team, until it says ``###STOP###`` or is transferred to a
person. A message that calls a tool is not heard: should a round end with one, the user waits, and the team goes on.
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
"""Who speaks to the team."""
GREETING = "Good day. What can I do for you?"
"""What the user's player is told that the desk said first; no agent sees it."""
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
    """What the user hears of a message: not what was thought, and nothing of one that calls a tool (None)."""
    return None if read_calls(text, frozenset(toolbox)) else without_thinking(text).strip()


@dataclass(frozen=True)
class Customer:
    """The user of every dialogue of a domain."""

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
        """The player writes as the assistant of this chat; what the team said is its user's."""
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
    """Nobody can stop what has not begun: in the first message the marker is left out."""
    said = without_thinking(text).strip()
    if opens:
        said = said.replace(STOP, "").strip()
    return Reply((Message(USER, said),), ends=STOP in said)


def trajectory(events: Iterable[Event], toolbox: Toolbox[State]) -> str:
    """What happened, as the benchmark stores a dialogue: a JSON list of chat messages, without the tools' results."""
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
    """A message of the agent that calls."""
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


@dataclass(frozen=True)
class DomainTools:
    """A domain's tools, told to agents in the words of the benchmark's own file."""

    tools: ToolboxTools[State]
    told: tuple[Schema, ...]

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        return self.told

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        return self.tools.results(requests)


def check_schemas(file: str, schemas: Any, toolbox: Toolbox[State]) -> tuple[Schema, ...]:
    """Those of the file, if they are of the tools that there are, with the same arguments. Raises DataError."""
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
    """Without descriptions, and with what is required in one order."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: _bare(value) for key, value in schema.items() if key != "description" or not isinstance(value, str)}
    return {**kept, "required": sorted(kept["required"])} if isinstance(kept.get("required"), list) else kept
