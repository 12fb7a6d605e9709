"""The team's answer, and what is graded of an episode: that answer, or the whole dialogue if the task grades it."""

from __future__ import annotations

from collections.abc import Sequence

from teamtr.calls import ToolCall
from teamtr.rollout.calling import calls_in_message
from teamtr.rollout.context import RolloutContext
from teamtr.team import Team, team_answer
from teamtr.types import Event, Problem, Reply, Turn


def said(context: RolloutContext, turns: Sequence[Turn]) -> str:
    """The team's answer, as the rule ``context.answer`` takes it from these turns."""
    return team_answer(turns, context.answer, context.task.extract)


def act(context: RolloutContext, turns: Sequence[Turn]) -> str:
    """The team's answer in the last of these rounds; its last message if the answering agent did not speak in it."""
    done = [turn for turn in turns if turn.round == turns[-1].round]
    silent = context.answer not in ("last", "majority", *(turn.agent for turn in done))
    return done[-1].text if silent else said(context, done)


def graded_text(
    context: RolloutContext, team: Team, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]
) -> str:
    """What is graded of an episode: the task's ``outcome`` of the dialogue, or else the team's answer."""
    told = outcome_of(context, team, problem, turns, replies)
    return said(context, turns) if told is None else told


def outcome_of(
    context: RolloutContext, team: Team, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]
) -> str | None:
    """The task's ``outcome`` of the whole dialogue; None if it grades the team's answer."""
    if context.task.environment is None:
        return None
    return context.task.outcome(problem, events_of(context, team, problem, turns, replies))


def grades_dialogue(context: RolloutContext, problem: Problem) -> bool:
    """Whether the task grades whole dialogues, so that no single message is the answer."""
    return context.task.environment is not None and context.task.outcome(problem, ()) is not None


def events_of(
    context: RolloutContext, team: Team, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]
) -> tuple[Event, ...]:
    """The events between the team and the environment, in order. The team's answer of a round comes at its end, after
    all tool calls made in it."""
    rounds = max([len(replies), *(turn.round + 1 for turn in turns)])
    found: list[Event] = []
    for number in range(rounds):
        for reply in replies[number : number + 1]:
            found += [Event("environment", message.text) for message in reply.messages]
        own = [turn for turn in turns if turn.round == number]
        for turn in own:
            found += _calls(context, team, problem, turn)
        if own:
            found.append(Event("team", act(context, own)))
    return tuple(found)


def _calls(context: RolloutContext, team: Team, problem: Problem, turn: Turn) -> list[Event]:
    if not turn.results:
        return []
    called = calls_in_message(context, team[turn.agent], problem, turn.text)
    return [
        Event("tool", result.text, call)
        for call, result in zip(called, turn.results, strict=True)
        if isinstance(call, ToolCall)
    ]
