"""Credit assignment: the returns that one agent is trained on, as chosen by ``plan.credit``.

``team``: the team's return. ``own``: the agent's own rewards, plus those that belong to no single agent.
``difference``: the team's return minus what the team would have got if this agent had said nothing and all others the
same (Wolpert and Tumer's difference rewards). If nobody reads what the agent says, the subtracted part does not depend
on its messages, and the expected gradient is that of the team's return. If somebody does, replies to messages that
were never sent are kept, and the two expectations differ. ``crossed``: for an agent that is apart from the others
(``crossing.py``), the team's return averaged over what the others said in all episodes of the problem, whose expected
gradient is that of the team's return; for any other agent, the team's return itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from teamtr.batches import RolloutBatch, discounted
from teamtr.errors import UserError
from teamtr.presets import Plan
from teamtr.rollout.context import Ledger, RolloutContext
from teamtr.rollout.crossing import crossed_returns_PGG, is_unheard, with_crossings
from teamtr.rollout.grading import Asked
from teamtr.rollout.outcome import graded_text
from teamtr.rollout.shaping import punishments_PG, trained_returns_PG
from teamtr.team import Router, Team
from teamtr.theory.advantages import Advantages
from teamtr.theory.crossing import crossed_advantages, crossed_means_PG
from teamtr.types import Episode, Floats, Problem, Transcript


@dataclass(frozen=True)
class Credited:
    """The returns that an agent is trained on, and the advantages estimated from them."""

    returns_PG: Floats
    advantages: Advantages


def is_crossed(batch: RolloutBatch, agent: str, plan: Plan) -> bool:
    """Whether this agent's returns are averaged over the others' messages of all episodes of the problem."""
    return plan.credit == "crossed" and crossed_returns_PGG(batch, agent) is not None


def credited(
    batch: RolloutBatch, agent: str, plan: Plan, limits: Mapping[str, int], weights_E: Floats | None = None
) -> Credited:
    """This agent's returns and advantages on the batch. ``weights_E`` are importance weights towards the present team,
    one per episode; for a crossed agent they cover the others' messages alone."""
    shape = len(batch.problems), batch.group_size
    weights_PG = None if weights_E is None else weights_E.reshape(shape)
    crossed_PGG = crossed_returns_PGG(batch, agent) if plan.credit == "crossed" else None
    if crossed_PGG is None:
        returns_PG = agent_returns_PG(batch, agent, plan, limits)
        return Credited(returns_PG, plan.advantage.estimate(returns_PG, weights_PG))
    weights_PG = np.ones(shape) if weights_PG is None else weights_PG
    means_PG = crossed_means_PG(crossed_PGG, weights_PG)
    if plan.critic is not None:  # it learns from groups in which all messages earn the same, too
        return Credited(means_PG, plan.advantage.estimate(means_PG))
    return Credited(means_PG, crossed_advantages(plan.advantage.estimate, crossed_PGG, weights_PG))


def agent_returns_PG(batch: RolloutBatch, agent: str, plan: Plan, limits: Mapping[str, int]) -> Floats:
    """The returns that this agent is trained on, including the plan's length punishments, which all agents share."""
    crossed_PGG = crossed_returns_PGG(batch, agent) if plan.credit == "crossed" else None
    if crossed_PGG is not None:
        return crossed_means_PG(crossed_PGG, np.ones(crossed_PGG.shape[:2]))
    if plan.credit in ("team", "crossed"):
        return trained_returns_PG(batch, plan, limits)
    if plan.credit == "own":
        _require_personal(batch)
        flat = [_own(episode, agent, plan.gamma) for episode in batch.episodes]
        returns_PG = np.array(flat, dtype=np.float64).reshape(len(batch.problems), batch.group_size)
        if not plan.overlong.punishes:
            return returns_PG
        return returns_PG + punishments_PG(batch, plan, limits) * batch.discounts_PG(plan.gamma)
    return trained_returns_PG(batch, plan, limits) - _without_PG(batch, agent, plan, limits)


def with_counterfactuals(
    context: RolloutContext, team: Team, batch: RolloutBatch, plan: Plan, ledger: Ledger
) -> RolloutBatch:
    """The batch with the counterfactual grades that ``plan.credit`` needs: without each agent's messages, or with the
    others' messages from other episodes."""
    if plan.credit == "crossed":
        return with_crossings(context, team, batch, plan, ledger)
    if plan.credit != "difference":
        return batch
    if context.task.environment is not None or context.tools is not None:
        raise UserError(
            "plan.credit: difference asks what would have been without an agent's words, and an environment or tools "
            "would have replied otherwise: use plan.credit: team or own"
        )
    started = time.perf_counter()
    problems = [problem for problem in batch.problems for _ in range(batch.group_size)]
    spoke = [
        [name for name in team.trainable if any(turn.agent == name for turn in episode.turns)]
        for episode in batch.episodes
    ]
    asked = [
        _asked(context, team, problem, episode, name)
        for problem, episode, names in zip(problems, batch.episodes, spoke, strict=True)
        for name in names
    ]
    verdicts = iter(context.task.grade(asked) if asked else ())
    episodes = [
        replace(episode, without={name: next(verdicts) for name in names})
        for episode, names in zip(batch.episodes, spoke, strict=True)
    ]
    ledger.grading_seconds += time.perf_counter() - started
    return replace(batch, episodes=tuple(episodes))


def certified_range(plan: Plan, reward_range: float | None, team: Team, router: Router, agent: str) -> float | None:
    """The range of the returns that this agent is trained on, for certificates of the team's gain. None if the range is
    unknown, or if a gain in these returns is not a gain of the team.

    Own rewards may come at the others' expense. A difference gains what the team gains if nobody reads the agent, and
    may be as far below 0 as above. Dynamic sampling leaves out groups of equal rewards, whose surrogate is 0: what is
    left overstates the gain, by 1 over the share of groups with a signal.
    """
    team_range = plan.return_range(reward_range)
    if plan.dynamic_sampling.on:
        return None
    if plan.credit in ("team", "crossed") or team_range is None:
        return team_range
    if plan.credit == "difference" and is_unheard(team, router, agent):
        return 2.0 * team_range
    return None


def _asked(context: RolloutContext, team: Team, problem: Problem, episode: Episode, name: str) -> Asked:
    """What is graded of the episode, with this agent's messages replaced by the task's ``silence``."""
    silence = context.task.silence
    turns = [replace(turn, text=silence) if turn.agent == name else turn for turn in episode.turns]
    return problem, graded_text(context, team, problem, turns, episode.replies), Transcript(turns, episode.replies)


def _own(episode: Episode, agent: str, gamma: float) -> float:
    made, last = episode.verdict.breakdown, gamma ** max(len(episode.turns) - 1, 0)
    if made is None:
        return episode.reward * last
    early = sum(
        earned * gamma**t
        for t, (turn, earned) in enumerate(zip(episode.turns, made.by_turn, strict=bool(made.by_turn)))
        if turn.agent == agent
    )
    return early + (made.shared + made.by_agent.get(agent, 0.0)) * last


def _without_PG(batch: RolloutBatch, agent: str, plan: Plan, limits: Mapping[str, int]) -> Floats:
    """The team's returns without this agent's messages; the actual returns where it sent none."""
    flat = [
        discounted(episode.without.get(agent, episode.verdict), len(episode.turns), plan.gamma)
        for episode in batch.episodes
    ]
    returns_PG = np.array(flat, dtype=np.float64).reshape(len(batch.problems), batch.group_size)
    if not plan.overlong.punishes:
        return returns_PG
    return returns_PG + punishments_PG(batch, plan, limits, without=agent) * batch.discounts_PG(plan.gamma)


def _require_personal(batch: RolloutBatch) -> None:
    graded = [episode.verdict for episode in batch.episodes if not episode.verdict.failed]
    if graded and not any(verdict.breakdown is not None and verdict.breakdown.is_personal for verdict in graded):
        raise UserError(
            "plan.credit: own needs rewards of agents or turns, and this task's are the team's alone: let the reward "
            "function return a mapping from agents to numbers, or a list with a number for each message; or use "
            "plan.credit: team"
        )
