"""Replays a stored dialogue: repeats the agent's acts on the data, and checks whether the result earns the reward.

A trajectory is a list of chat messages as the benchmark stores them: ``role`` (system, user, assistant or tool),
``content``, and ``tool_calls`` of the assistant. An act of the agent is a call, or a message to the user; the user does
not see text in an assistant message that has calls. The dialogue is over when the user says ``###STOP###`` or is
transferred to a human; what comes later does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from teamtr.bounded_json import NotJson, read_json
from teamtr.calls import ToolCall
from teamtr.tasks.benchmarks.taubench.state import State
from teamtr.text import shown
from teamtr.tools.toolbox import Outcome, Toolbox

STOP = "###STOP###"
_ROLES = ("system", "user", "assistant", "tool")


class NotATrajectory(ValueError):
    """The messages are not a trajectory; the error says which message is wrong, and how."""


@dataclass(frozen=True)
class Message:
    """A message of the agent that the user sees, or of the user that the agent sees."""

    by: Literal["agent", "user"]
    text: str


@dataclass(frozen=True)
class Call:
    """One call as the agent wrote it, and its recorded result; None if none is stored."""

    name: str
    arguments: str
    recorded: str | None = None


Turn = Message | Call


@dataclass(frozen=True)
class Replay:
    """The outcome of replaying the agent's acts.

    Attributes:
        state: the data after them.
        results: the result of each call.
        differing: the indices of the results that differ, as JSON, from the recorded ones.
        said: the agent's messages to the user.
        over: whether the dialogue ended. One that was cut off earns nothing.
    """

    state: State
    results: tuple[str, ...]
    differing: tuple[int, ...]
    said: tuple[str, ...]
    over: bool


def turns_in(messages: Any) -> tuple[Turn, ...]:
    """The turns of a stored dialogue, in order. Raises NotATrajectory."""
    if not isinstance(messages, list):
        raise NotATrajectory(f"a trajectory is a list of messages, found {shown(messages)}")
    results = _results(messages)
    turns: list[Turn] = []
    for place, message in enumerate(messages):
        match message["role"]:
            case "user":
                turns.append(Message("user", _text(message, place) or ""))
            case "assistant":
                calls = _calls(message, place)
                turns += [Call(name, arguments, results.get((place, k))) for k, (name, arguments) in enumerate(calls)]
                if not calls:
                    turns.append(Message("agent", _text(message, place) or ""))
    return tuple(turns)


def _results(messages: Sequence[Any]) -> dict[tuple[int, int], str]:
    """The recorded results, by the index of the calling message and the index of the call in it."""
    found: dict[tuple[int, int], str] = {}
    asked, answered = -1, 0
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise NotATrajectory(
                f"message {place + 1}: must be an object with a role of {', '.join(_ROLES)}, found {shown(message)}"
            )
        if role == "tool":
            if asked < 0 or answered >= len(_calls(messages[asked], asked)):
                raise NotATrajectory(f"message {place + 1}: the result of a tool, but no call waits for one")
            found[asked, answered] = _text(message, place) or ""
            answered += 1
        else:
            asked, answered = (place, 0) if role == "assistant" else (-1, 0)
    return found


def _text(message: dict[str, Any], place: int) -> str | None:
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise NotATrajectory(f"message {place + 1}: 'content' must be text, found {shown(content)}")
    return content


def _calls(message: dict[str, Any], place: int) -> list[tuple[str, str]]:
    """The (name, arguments) of each call."""
    calls = message.get("tool_calls") or []
    found: list[tuple[str, str]] = []
    for call in calls if isinstance(calls, list) else [calls]:
        match call:
            case {"function": {"name": str(name), "arguments": str(arguments)}}:
                found.append((name, arguments))
            case _:
                wanted = '{"function": {"name": TEXT, "arguments": JSON AS TEXT}}'
                raise NotATrajectory(f"message {place + 1}: each of 'tool_calls' must be {wanted}, found {shown(call)}")
    return found


def replay(tools: Toolbox[State], start: State, turns: Iterable[Turn]) -> Replay:
    """Apply the agent's acts to the data, one after the other, until the dialogue is over."""
    state, over = start, False
    results: list[str] = []
    differing: list[int] = []
    said: list[str] = []
    for turn in turns:
        match turn:
            case Message("agent", text):
                said.append(text)
            case Message("user", text):
                over = STOP in text
            case Call(name, arguments, recorded):
                call = _read(name, arguments)
                unread = Outcome(f"Error: the arguments of {name} must be a JSON object", state)
                outcome = unread if call is None else tools.step(state, call)
                if recorded is not None and not same_json(outcome.text, recorded):
                    differing.append(len(results))
                results.append(outcome.text)
                state = outcome.state
                over = call is not None and tools.ends(call)
        if over:
            break
    return Replay(state, tuple(results), tuple(differing), tuple(said), over)


def _read(name: str, arguments: str) -> ToolCall | None:
    try:
        read = read_json(arguments, strict=True)
    except NotJson:
        return None
    return ToolCall(name, read) if isinstance(read, dict) else None


def same_json(one: str, other: str) -> bool:
    """Whether two results are equal as JSON, or as text if either is not JSON."""
    try:
        return bool(read_json(one) == read_json(other))
    except NotJson:
        return one == other


def after_all(tools: Toolbox[State], start: State, actions: Iterable[ToolCall]) -> State:
    """The data after a task's own actions. An action that ends a dialogue changes nothing; later ones still count."""
    state = start
    for action in actions:
        state = tools.step(state, action).state
    return state


def earns_reward(reached: State, wanted: State, said: Sequence[str], outputs: Iterable[str]) -> bool:
    """The benchmark's rule: the same data as after the task's own actions, and every output in some message to the
    user, ignoring case and the message's commas."""
    heard = [text.lower().replace(",", "") for text in said]
    all_told = all(any(output.lower() in text for text in heard) for output in outputs)
    return all_told and reached.changes() == wanted.changes()
