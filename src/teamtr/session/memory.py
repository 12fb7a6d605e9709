"""The largest demand of a run on its engine: lengths, episodes and messages, from the team file and the task.

The engine plans the memory for it (``Engine.memory_plan``) and tries the longest step once (``Engine.rehearse``), so
that a run that does not fit fails in its first minute, not in its third hour. A run logs the peak of every stage next
to the plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.errors import UserError
from teamtr.evaluation.evaluate import PROBLEMS_IN_A_RUN, SAMPLES_IN_A_RUN
from teamtr.ports import GB, Demand, Lengths, MemoryPlan
from teamtr.session import trial
from teamtr.session.build import Session
from teamtr.tasks.benchmarks.arbench.endpoint import EndpointPlayer
from teamtr.tasks.players import PolicyPlayer
from teamtr.team import Agent
from teamtr.team.router import most_before
from teamtr.training.scoring import FLOOR_MESSAGES
from teamtr.types import Ids, Message, Problem, Situation, common_beginning

WORDS_OF_A_LINE = 8
"""Tokens that a transcript adds to each message: the author's name and line breaks."""
PROBLEMS_LOOKED_AT = 256


def plan_memory(session: Session) -> MemoryPlan:
    """The memory plan of a built team."""
    return session.engine.memory_plan(demand_of(session))


def before_training(session: Session) -> dict[str, Any] | None:
    """On a GPU, the plan next to what the longest step actually used; None elsewhere. Refuses a run whose vLLM servers
    and learner do not fit together: each would fit alone, and one would run out of memory during the run."""
    engine = session.engine
    if all(engine.info(name).device.startswith("cpu") for name in engine.agents):
        return None
    plan = plan_memory(session)
    require_room_for_servers(plan)
    return {"planned_gb": plan.total / GB, **rehearse(session)}


def before_servers(session: Session) -> MemoryPlan | None:
    """The memory plan with servers, computed before the first request starts them; raises a UserError if they do not
    fit. None if no servers are used."""
    if session.team_file.sampling.engine != "vllm":
        return None
    plan = plan_memory(session)
    require_room_for_servers(plan)
    return plan


def require_room_for_servers(plan: MemoryPlan) -> None:
    """Raises a UserError if servers of this run cannot start, or leave the learner too little memory."""
    if (why := crowded(plan)) is not None:
        raise UserError(why)


def crowded(plan: MemoryPlan) -> str | None:
    """What servers and learner lack, and what to do; None if both fit, or if there are no servers."""
    remedies = "sampling.vllm.cards gives servers cards of their own, sampling.memory_gb less for keys and values"
    if plan.lacking:
        return f"{'; '.join(plan.lacking)}: {remedies}, sampling.precision smaller weights"
    if not plan.taken or plan.fits or plan.available is None:
        return None
    return (
        f"vLLM servers take {plan.taken / GB:.3g} GB of the card that trains and leave "
        f"{max(0, plan.available) / GB:.3g} GB, and the learner needs {plan.total / GB:.3g} GB: {remedies}; a smaller "
        "learner.micro_batch and learner.recompute: always need less"
    )


def rehearse(session: Session) -> dict[str, Any]:
    """Run and undo the longest step of every trainable agent that may need more than another. Returns the micro-batch
    that fits, and the peak."""
    found = session.engine.rehearse(demand_of(session))
    return {
        "micro_batch": dict(found.micro_batch),
        "peak_gb": None if found.peak_bytes is None else found.peak_bytes / GB,
        "recomputed": list(found.recomputed),
    }


def peak_gb(session: Session) -> float | None:
    """Peak memory since ``before_training`` in GB; None without a GPU."""
    peak = session.engine.peak_bytes()
    return None if peak is None else peak / GB


def demand_of(session: Session) -> Demand:
    """The most that this session requests at once. An update that learns once more from the last stage has up to twice
    as many problems as a batch."""
    router, plan, tried = session.context.router, session.plan, _tried(session)
    problems = plan.problems * (2 if plan.resample.across_stages else 1)
    return Demand(
        lengths=longest(session),
        episodes=_rows_at_once(session),
        problems=problems,
        messages={name: problems * plan.group_size * router.turns_of(name) for name in session.team.trainable},
        checked={name: min(FLOOR_MESSAGES, tried * router.turns_of(name)) for name in session.team.trainable},
        minibatches=session.team_file.learner.minibatches,
        objective=plan.objective,
    )


def _rows_at_once(session: Session) -> int:
    """Most episodes that are played at once: in a batch, in the check before the run, or in an evaluation during it."""
    most = max(session.plan.problems * session.plan.group_size, _tried(session))
    settings = session.team_file.eval
    if not settings.every:
        return most
    problems = len(session.task.problems("test")[: settings.problems or PROBLEMS_IN_A_RUN])
    return max(most, problems * (settings.samples or SAMPLES_IN_A_RUN))


def _tried(session: Session) -> int:
    """Episodes of the check before the run."""
    return trial.GROUP * min(trial.PROBLEMS, len(session.task.problems("train")))


def longest(session: Session) -> dict[str, Lengths]:
    """For every agent, its longest first prompt among some problems, plus all that may have been said before it speaks.
    A model that plays the other roles gets the longest of these prompts."""
    found, player = {}, _player(session)
    sizes = {agent.name: agent.max_tokens + WORDS_OF_A_LINE + result_tokens(session, agent) for agent in session.team}
    for name, opening in openings(session).items():
        before, rounds = most_before(session.context.router, name, sizes)
        prompt = opening.prompt + before + opening.reply * rounds
        found[name] = Lengths(prompt, session.team[name].max_tokens, opening.shared)
    if isinstance(player, PolicyPlayer):
        name, prompt = player.agent, max(one.prompt for one in found.values())
        message = max(player.max_tokens, found[name].message if name in found else 0)
        found[name] = Lengths(prompt, message)
    return found


def result_tokens(session: Session, agent: Agent) -> int:
    """Most tokens of tool results after a message of this agent, at the token rate of its tools' own schemas."""
    problems = session.task.problems("train") or session.task.problems("test")
    tools = session.context.offered(agent, problems[0])
    if not tools:
        return 0
    sample = json.dumps(tools)
    rate = len(session.context.codecs[agent.name].encode_message(sample)) / len(sample)
    return math.ceil(rate * session.team_file.tools.max_characters) + WORDS_OF_A_LINE


@dataclass(frozen=True)
class Opening:
    """What an agent reads before anybody has spoken, in tokens: its longest prompt, the part that all problems have in
    common, and what an environment adds in every later round."""

    prompt: int
    shared: int
    reply: int = 0


def openings(session: Session) -> dict[str, Opening]:
    """The opening of every agent, from some of the task's problems."""
    problems = (session.task.problems("train") or session.task.problems("test"))[:PROBLEMS_LOOKED_AT]
    told, player, found = _told_first(session, problems), _player(session), {}
    for agent in session.team:
        first = alone = [_prompt(session, agent, problem, []) for problem in problems]
        reply = 0
        if told:  # later replies may be as long as the opening, plus what a player may say
            first = [_prompt(session, agent, *one) for one in zip(problems, told, strict=True)]
            reply = max(len(a) - len(b) for a, b in zip(first, alone, strict=True)) + WORDS_OF_A_LINE
            reply += 0 if player is None else player.max_tokens
        shared = min(common_beginning(first[0], prompt) for prompt in first)
        found[agent.name] = Opening(max(map(len, first)), shared, reply)
    return found


def _prompt(session: Session, agent: Agent, problem: Problem, history: Sequence[Message]) -> Ids:
    return session.context.prompt(session.team, agent, problem, history)


def _told_first(session: Session, problems: Sequence[Problem]) -> list[tuple[Message, ...]]:
    """What an interactive task's environment says before anyone speaks; empty for other tasks."""
    environment = session.task.environment
    if environment is None:
        return []
    situations = [Situation(problem, (), (), session.context.router.rounds - 1) for problem in problems]
    replies = environment.reply(situations, seed=0)
    return [reply.messages for reply in replies]


def _player(session: Session) -> PolicyPlayer | EndpointPlayer | None:
    player = session.task.player
    return player if isinstance(player, (PolicyPlayer, EndpointPlayer)) else None
