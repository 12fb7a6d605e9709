"""Batches of rollouts: whole episodes grouped by problem, and the messages of one agent in them.

A worked example, two agents, one problem, G = 2::

    batch = RolloutBatch(problems=(p,), episodes=(e0, e1), group_size=2)
    batch.returns_PG(gamma=1.0)            # array([[1., 0.]])
    batch.of("left")                       # AgentBatch of two messages, episode_M == [0, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from teamtr.types import Episode, Floats, Ids, Problem, Verdict


@dataclass(frozen=True)
class AgentBatch:
    """The messages of one agent in a batch of episodes.

    ``prompts[m]`` and ``messages[m]`` are token ids of any length; padding, if any, is left to the engine.
    ``episode_M``, ``problem_M`` and ``turn_M`` give the origin of each message. ``cluster_M`` is equal for all messages
    of one problem, even if the problem is in the batch more than once (default: ``problem_M``). ``cut_M`` marks
    messages that ended at the token limit (default: none).
    """

    agent: str
    prompts: tuple[Ids, ...]
    messages: tuple[Ids, ...]
    sampler_logprobs: tuple[NDArray[np.float32], ...]
    episode_M: NDArray[np.int64]
    problem_M: NDArray[np.int64]
    turn_M: NDArray[np.int64]
    cluster_M: NDArray[np.int64] = None  # type: ignore[assignment]
    cut_M: NDArray[np.bool_] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.cluster_M is None:
            object.__setattr__(self, "cluster_M", self.problem_M)
        if self.cut_M is None:
            object.__setattr__(self, "cut_M", np.zeros(len(self.messages), dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.messages)

    @cached_property
    def lengths_M(self) -> NDArray[np.int64]:
        """Number of tokens of each message."""
        return _fixed(np.array([len(m) for m in self.messages], dtype=np.int64))

    @cached_property
    def sizes_M(self) -> NDArray[np.int64]:
        """Number of tokens of each message with its prompt."""
        return _fixed(self.lengths_M + np.array([len(p) for p in self.prompts], dtype=np.int64))

    def rows(self, index: Sequence[int] | NDArray[np.int64]) -> AgentBatch:
        """The messages at these positions, in this order."""
        places = np.asarray(index).tolist()  # indexing lists is faster with Python integers
        return AgentBatch(
            agent=self.agent,
            prompts=tuple([self.prompts[i] for i in places]),
            messages=tuple([self.messages[i] for i in places]),
            sampler_logprobs=tuple([self.sampler_logprobs[i] for i in places]),
            episode_M=self.episode_M[index],
            problem_M=self.problem_M[index],
            turn_M=self.turn_M[index],
            cluster_M=self.cluster_M[index],
            cut_M=self.cut_M[index],
        )


def _fixed(counts_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """Makes a cached array read-only, since all callers share it."""
    counts_M.flags.writeable = False
    return counts_M


@dataclass(frozen=True)
class Verified:
    """How much of each message may be kept as a sample of the updated agent (``theory.verification``).

    ``kept_M`` counts the tokens that are kept. Where that is less than the whole message, ``next_M`` is the token that
    follows them (-1 elsewhere), and the rest is sampled again.
    """

    kept_M: NDArray[np.int64]
    next_M: NDArray[np.int64]


@dataclass(frozen=True)
class Carried:
    """How far a team has moved since it wrote a batch, by turn.

    ``log_ratio_U`` is the log-probability of each turn's message under the team ``team_version``, minus that under the
    weights that wrote it. ``kept_U`` and ``next_U`` are the values of ``Verified`` for each turn, in plans that redraw
    partially; -1 in ``kept_U`` means that the turn's agent was not updated and its message is kept whole.
    """

    team_version: str
    log_ratio_U: Floats
    kept_U: NDArray[np.int64] | None = None
    next_U: NDArray[np.int64] | None = None


def discounted(verdict: Verdict, turns: int, gamma: float) -> float:
    """The discounted return of an episode of ``turns`` turns: rewards of turns arrive with them, the rest with the last
    turn."""
    last = gamma ** max(turns - 1, 0)
    made = verdict.breakdown
    if made is None or not made.by_turn:
        return verdict.reward * last
    early = sum(reward * gamma**t for t, reward in enumerate(made.by_turn))
    return early + made.unplaced * last


@dataclass(frozen=True)
class RolloutBatch:
    """Episodes of P problems x G, problem-major.

    ``carried`` says how far the team has moved since the batch was written; None if no agent was updated since.
    ``redrawn``: parts of it were kept from episodes that earlier updates were trained on (``rollout.redraw``). The last
    ``past`` problems are from an earlier stage and were drawn again (``joined``).
    """

    problems: tuple[Problem, ...]
    episodes: tuple[Episode, ...]
    group_size: int
    carried: Carried | None = None
    redrawn: bool = False
    past: int = 0

    def __post_init__(self) -> None:
        if len(self.episodes) != len(self.problems) * self.group_size:
            raise ValueError(
                f"a batch of {len(self.problems)} problems x {self.group_size} needs "
                f"{len(self.problems) * self.group_size} episodes, got {len(self.episodes)}"
            )

    @property
    def team_version(self) -> str:
        versions = {e.team_version for e in self.episodes}
        if len(versions) != 1:
            raise ValueError(f"a batch must be written by one team, found {len(versions)} team versions")
        return versions.pop()

    def returns_PG(self, gamma: float) -> Floats:
        """Discounted return of each episode; rewards that belong to no turn arrive with the last one."""
        flat = [discounted(e.verdict, len(e.turns), gamma) for e in self.episodes]
        return np.array(flat, dtype=np.float64).reshape(len(self.problems), self.group_size)

    def discounts_PG(self, gamma: float) -> Floats:
        """The discount of rewards that arrive with each episode's last turn."""
        flat = [gamma ** max(len(e.turns) - 1, 0) for e in self.episodes]
        return np.array(flat, dtype=np.float64).reshape(len(self.problems), self.group_size)

    @property
    def present(self) -> tuple[Episode, ...]:
        """The episodes of the current stage."""
        return self.episodes[: (len(self.problems) - self.past) * self.group_size]

    def of_problems(self, problems: Sequence[int]) -> RolloutBatch:
        """The episodes of these problems, in this order."""
        g = self.group_size
        carried = self.carried
        if carried is not None:
            spans = [np.arange(self.first_U[p * g], self.first_U[(p + 1) * g]) for p in problems]
            turns = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
            kept_U, next_U = (None if array is None else array[turns] for array in (carried.kept_U, carried.next_U))
            carried = Carried(carried.team_version, carried.log_ratio_U[turns], kept_U, next_U)
        return replace(
            self,
            problems=tuple(self.problems[p] for p in problems),
            episodes=tuple(e for p in problems for e in self.episodes[p * g : (p + 1) * g]),
            carried=carried,
            past=0,
        )

    def joined(self, past: RolloutBatch) -> RolloutBatch:
        """This batch, written by the current team, followed by episodes of an earlier stage."""
        assert self.carried is None, "nobody was updated since these were written"
        assert past.carried is not None, "somebody was updated since those were written"
        return RolloutBatch(
            (*self.problems, *past.problems),
            (*self.episodes, *past.episodes),
            self.group_size,
            Carried(
                past.carried.team_version,
                np.concatenate([np.zeros(int(self.first_U[-1])), past.carried.log_ratio_U]),
            ),
            redrawn=self.redrawn,
            past=len(past.problems),
        )

    @cached_property
    def cluster_P(self) -> NDArray[np.int64]:
        """The index at which each problem occurs first in the batch: equal for equal problems."""
        first: dict[str, int] = {}
        return np.array([first.setdefault(problem.id, p) for p, problem in enumerate(self.problems)], dtype=np.int64)

    @cached_property
    def first_U(self) -> NDArray[np.int64]:
        """The index of each episode's first turn among all turns; the last entry is the number of turns."""
        return np.concatenate([[0], np.cumsum([len(episode.turns) for episode in self.episodes])]).astype(np.int64)

    def place_M(self, own: AgentBatch) -> NDArray[np.int64]:
        """The indices of these messages among all turns."""
        return np.asarray(self.first_U[own.episode_M] + own.turn_M)

    @property
    def log_weights_E(self) -> Floats | None:
        """Trajectory log-weights from the team that wrote the episodes to the current one (app:exp:isdeg)."""
        if self.carried is None:
            return None
        before_U = np.concatenate([[0.0], np.cumsum(self.carried.log_ratio_U)])
        return np.asarray(np.diff(before_U[self.first_U]))

    def log_weights_before_M(self, own: AgentBatch) -> Floats | None:
        """The same for the turns before each of these messages: the log-weight of its context."""
        if self.carried is None:
            return None
        before_U = np.concatenate([[0.0], np.cumsum(self.carried.log_ratio_U)])
        return np.asarray(before_U[self.place_M(own)] - before_U[self.first_U[own.episode_M]])

    def after(
        self, own: AgentBatch, log_ratio_M: Floats, team_version: str, verified: Verified | None = None
    ) -> RolloutBatch:
        """The same episodes after an update of the agent of ``own``, which made the team ``team_version``."""
        place_M, turns = self.place_M(own), int(self.first_U[-1])
        past = self.carried or Carried(team_version, np.zeros(turns))
        log_ratio_U = past.log_ratio_U.copy()
        log_ratio_U[place_M] += log_ratio_M
        kept_U, next_U = past.kept_U, past.next_U
        if verified is not None:
            kept_U = np.full(turns, -1, dtype=np.int64) if kept_U is None else kept_U.copy()
            next_U = np.full(turns, -1, dtype=np.int64) if next_U is None else next_U.copy()
            kept_U[place_M], next_U[place_M] = verified.kept_M, verified.next_M
        return replace(self, carried=Carried(team_version, log_ratio_U, kept_U, next_U))

    def of(self, agent: str) -> AgentBatch:
        """The messages of one agent, in the order of episodes and turns."""
        found = [
            (e, t, turn)
            for e, episode in enumerate(self.episodes)
            for t, turn in enumerate(episode.turns)
            if turn.agent == agent
        ]
        problem_M = np.array([e // self.group_size for e, _, _ in found], dtype=np.int64)
        return AgentBatch(
            agent=agent,
            prompts=tuple(turn.context_ids for _, _, turn in found),
            messages=tuple(turn.token_ids for _, _, turn in found),
            sampler_logprobs=tuple(turn.sampler_logprobs for _, _, turn in found),
            episode_M=np.array([e for e, _, _ in found], dtype=np.int64),
            problem_M=problem_M,
            turn_M=np.array([t for _, t, _ in found], dtype=np.int64),
            cluster_M=self.cluster_P[problem_M],
            cut_M=np.array([turn.finish == "length" for _, _, turn in found], dtype=np.bool_),
        )
