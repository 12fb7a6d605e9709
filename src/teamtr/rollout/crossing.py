"""Crossed credit: an agent's messages graded together with everything that the others said (``plan.credit: crossed``).

An agent that reads none of the others and is read by none of them is *apart*. Given the problem, its messages and
theirs are independent, so its messages of one episode and theirs of any other episode of the group form an episode
that the same team might have played. All G x G combinations are graded, not only the G that were played. This samples
no tokens, and an agent's messages are compared with the same messages of the others, not by the luck of the pairing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from teamtr.batches import RolloutBatch
from teamtr.presets import Plan
from teamtr.rollout.context import Ledger, RolloutContext
from teamtr.rollout.outcome import said
from teamtr.rollout.shaping import trained_returns_PG
from teamtr.team import Router, Schedule, Team, visible
from teamtr.team.router import Upcoming
from teamtr.types import Episode, Floats, Transcript, Turn


def is_unheard(team: Team, router: Router, agent: str) -> bool:
    """Whether the order of speakers is fixed and no other agent ever reads a message of this one."""
    if not isinstance(router, Schedule):
        return False
    slots = router.turns()
    return not any(
        _reads(team, reader, [slot for slot in slots[:k] if slot.agent == agent])
        for k, reader in enumerate(slots)
        if reader.agent != agent
    )


def is_apart(team: Team, router: Router, agent: str) -> bool:
    """Whether the order of speakers is fixed, others speak too, and this agent and the others never read each other."""
    if not isinstance(router, Schedule) or not is_unheard(team, router, agent):
        return False
    slots = router.turns()
    return {slot.agent for slot in slots} > {agent} and not any(
        _reads(team, reader, [slot for slot in slots[:k] if slot.agent != agent])
        for k, reader in enumerate(slots)
        if reader.agent == agent
    )


def with_crossings(
    context: RolloutContext, team: Team, batch: RolloutBatch, plan: Plan, ledger: Ledger
) -> RolloutBatch:
    """The batch with the crossed returns of every trainable agent that is apart. With an environment or tools none is:
    an environment replies to what was said, and a router of tool turns has no fixed order."""
    if context.task.environment is not None:
        return batch
    apart = [name for name in team.trainable if is_apart(team, context.router, name)]
    started = time.perf_counter()
    for name in apart:
        returns_PGG = _crossed_PGG(context, team, batch, name, plan)
        rows = returns_PGG.reshape(len(batch.episodes), batch.group_size).tolist()
        episodes = [
            replace(episode, crossed={**episode.crossed, name: tuple(row)})
            for episode, row in zip(batch.episodes, rows, strict=True)
        ]
        batch = replace(batch, episodes=tuple(episodes))
    ledger.grading_seconds += time.perf_counter() - started
    return batch


def crossed_returns_PGG(batch: RolloutBatch, agent: str) -> Floats | None:
    """[p, g, k]: the return of this agent's messages of episode g with the others' of episode k, in problem p's group;
    None if the agent is not apart."""
    rows = [episode.crossed.get(agent) for episode in batch.episodes]
    if not rows or any(row is None for row in rows):
        return None
    return np.array(rows, dtype=np.float64).reshape(len(batch.problems), batch.group_size, batch.group_size)


def _crossed_PGG(context: RolloutContext, team: Team, batch: RolloutBatch, name: str, plan: Plan) -> Floats:
    """As ``crossed_returns_PGG``, computed by grading; identical combinations are graded once."""
    g = batch.group_size
    groups = [_Group.of(batch.episodes[p * g : (p + 1) * g], name) for p in range(len(batch.problems))]
    problems = [problem for problem, group in zip(batch.problems, groups, strict=True) for _ in group.pairs]
    turns = [_mixed(own, others, name) for group in groups for own, others in group.pairs]
    asked = [(problem, said(context, each), Transcript(each)) for problem, each in zip(problems, turns, strict=True)]
    verdicts = context.task.grade(asked)
    episodes = tuple(
        Episode(problem.id, 0, tuple(each), text, verdict, "")
        for (problem, text, _), each, verdict in zip(asked, turns, verdicts, strict=True)
    )
    crossed = RolloutBatch(tuple(problems), episodes, group_size=1)
    returns = trained_returns_PG(crossed, plan, team.limits)[:, 0]
    ends = np.cumsum([len(group.pairs) for group in groups])
    of_groups = np.split(returns, ends[:-1])
    return np.stack([found[group.pair_GG] for found, group in zip(of_groups, groups, strict=True)])


@dataclass(frozen=True)
class _Group:
    """One problem's episodes: the distinct pairs of the agent's and the others' messages, and at [g, k] the index of
    the pair made by the agent's messages of episode g and the others' of episode k."""

    pairs: list[tuple[Episode, Episode]]
    pair_GG: NDArray[np.int64]

    @classmethod
    def of(cls, episodes: Sequence[Episode], name: str) -> _Group:
        mine, row_G = _different([_words(episode, lambda agent: agent == name) for episode in episodes])
        theirs, column_G = _different([_words(episode, lambda agent: agent != name) for episode in episodes])
        pairs = [(episodes[g], episodes[k]) for g in mine for k in theirs]
        return cls(pairs, np.asarray(row_G[:, None] * len(theirs) + column_G[None, :]))


_Words = tuple[tuple[str, int, str], ...]
"""All of each message that a return can depend on: its text, its length in tokens, and its finish reason."""


def _different(words: Sequence[_Words]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The index at which each distinct item occurs first, and which distinct item each one is."""
    first: dict[_Words, int] = {}
    first_G = np.array([first.setdefault(each, g) for g, each in enumerate(words)], dtype=np.int64)
    found, which_G = np.unique(first_G, return_inverse=True)
    return found, np.asarray(which_G, dtype=np.int64)


def _words(episode: Episode, whose: Callable[[str], bool]) -> _Words:
    return tuple((turn.text, len(turn.token_ids), turn.finish) for turn in episode.turns if whose(turn.agent))


def _mixed(own: Episode, others: Episode, name: str) -> list[Turn]:
    """The turns of ``others`` with this agent's replaced by those of ``own``; they line up, as the order is fixed."""
    return [mine if theirs.agent == name else theirs for mine, theirs in zip(own.turns, others.turns, strict=True)]


def _reads(team: Team, reader: Upcoming, slots: Sequence[Upcoming]) -> bool:
    return bool(visible([_silent(slot) for slot in slots], team[reader.agent], reader.round))


def _silent(slot: Upcoming) -> Turn:
    nothing = np.zeros(0, np.int32)
    return Turn(slot.agent, slot.round, nothing, nothing, np.zeros(0, np.float32), "stop", "", "")
