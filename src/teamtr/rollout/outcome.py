"""What a team says with its turns, and what is graded of an episode: that, or the whole dialogue where a task asks."""

from __future__ import annotations

from collections.abc import Sequence

from teamtr.calls import ToolCall
from teamtr.rollout.calling import calls_in_message
from teamtr.rollout.context import RolloutContext
from teamtr.team import Team, team_answer
from teamtr.types import Event, Problem, Reply, Turn


def said(context: RolloutContext, turns: Sequence[Turn]) -> str:
    """What the team says with these turns, by its rule."""
    return team_answer(turns, context.answer, context.task.extract)


def act(context: RolloutContext, turns: Sequence[Turn]) -> str:
    """What the team said in the last round of these: by its rule, or last where whoever answers did not speak in it."""
    done = [turn for turn in turns if turn.round == turns[-1].round]
    silent = context.answer not in ("last", "majority", *(turn.agent for turn in done))
    return done[-1].text if silent else said(context, done)


def graded_text(
    context: RolloutContext, team: Team, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]
) -> str:
    """What is graded of an episode: what the task makes of the dialogue, else the team's answer."""
    told = outcome_of(context, team, problem, turns, replies)
    return said(context, turns) if told is None else told


def outcome_of(
    context: RolloutContext, team: Team, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]
) -> str | None:
    """What the task makes of the whole dialogue; None where it grades the team's answer."""
    if context.task.environment is None:
        return None
    return context.task.outcome(problem, events_of(context, team, problem, turns, replies))


def grades_dialogue(context: RolloutContext, problem: Problem) -> bool:
    """Whether the task grades whole dialogues, so that a single message states no answer."""
    return context.task.environment is not None and context.task.outcome(problem, ()) is not None


def events_of(
    context: RolloutContext, team: Team, problem: Problem, turns: Sequence[Turn], replies: Sequence[Reply]
) -> tuple[Event, ...]:
    """What happened between the team and the environment, in order: what a team says in a round is heard at its end,
    after all calls that were made in it."""
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
