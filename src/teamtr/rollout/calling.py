"""Tool calls in messages, and their results.

Every call in a message of an agent with tools is answered, in order, including malformed ones. Calls are parsed from
the text alone, so a grader or an environment can recover them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teamtr.calls import TOOL, ToolCall, name_of
from teamtr.chat.tools import Rejection, read_calls
from teamtr.rollout.context import RolloutContext
from teamtr.rollout.episode import EpisodeState
from teamtr.team import Agent, Team
from teamtr.text import without_surrogates
from teamtr.types import Message, Problem, ToolRequest, Turn

Found = tuple[ToolCall | Rejection, ...]


@dataclass(frozen=True)
class Said:
    """A message that is about to become a turn: its text and its episode's state."""

    state: EpisodeState
    text: str


def calls_in_message(context: RolloutContext, agent: Agent, problem: Problem, text: str) -> Found:
    """The tool calls and rejected calls in a message of this agent; empty if the agent has no tools."""
    offered = context.offered(agent, problem)
    return read_calls(text, frozenset(map(name_of, offered))) if offered else ()


def calls_so_far(context: RolloutContext, team: Team, state: EpisodeState) -> tuple[ToolCall, ...]:
    """All valid tool calls of an episode so far, in order."""
    if context.tools is None:
        return ()
    found = [_of_turn(context, team, state.problem, turn) for turn in state.turns if turn.results]
    return tuple(call for calls in found for call in calls)


def _of_turn(context: RolloutContext, team: Team, problem: Problem, turn: Turn) -> tuple[ToolCall, ...]:
    return _readable(calls_in_message(context, team[turn.agent], problem, turn.text))


def _readable(found: Found) -> tuple[ToolCall, ...]:
    return tuple(each for each in found if isinstance(each, ToolCall))


def results_of(
    context: RolloutContext, team: Team, agent: Agent, messages: Sequence[Said]
) -> list[tuple[Message, ...]]:
    """The tool results for each of these messages of one agent, requested in one batch. An episode that equals its
    draft up to and including this message reuses the draft's results."""
    if context.tools is None or agent.tools == ():
        return [()] * len(messages)
    found = [calls_in_message(context, agent, said.state.problem, said.text) for said in messages]
    known = {row: kept for row, s in enumerate(messages) if (kept := s.state.drafted_results(s.text)) is not None}
    asked = [row for row in range(len(messages)) if row not in known and _readable(found[row])]
    requests = [
        ToolRequest(
            messages[row].state.problem,
            agent.name,
            calls_so_far(context, team, messages[row].state),
            _readable(found[row]),
        )
        for row in asked
    ]
    replied = dict(zip(asked, context.tools.results(requests) if requests else (), strict=True))
    return [known[row] if row in known else _in_order(found[row], replied.get(row, ())) for row in range(len(messages))]


def _in_order(found: Found, texts: Sequence[str]) -> tuple[Message, ...]:
    """One message per call, in order: the tool's result, or the reason why the call was rejected."""
    replies = iter(texts)
    told = [f"Error: {each.reason}" if isinstance(each, Rejection) else next(replies) for each in found]
    if next(replies, None) is not None:
        raise ValueError(f"tools gave {len(texts)} results to fewer calls")
    return tuple(Message(TOOL, without_surrogates(text)) for text in told)
