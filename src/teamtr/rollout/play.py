"""Play episodes in lockstep: at every turn, all episodes whose next speaker is the same agent go as one batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from teamtr.ports import Codec, Sampler, Task
from teamtr.protocol import render
from teamtr.randomness import seed_of
from teamtr.team import Agent, Router, Team, team_answer, visible
from teamtr.types import Episode, Problem, RolloutBatch, Turn, Verdict


@dataclass
class Ledger:
    """What was spent, per agent and phase: tokens, messages or episodes, seconds."""

    sampled_tokens: dict[str, int] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    episodes: int = 0
    grading_seconds: float = 0.0

    def add(self, agent: str, prompt: int, sampled: int, seconds: float) -> None:
        self.prompt_tokens[agent] = self.prompt_tokens.get(agent, 0) + prompt
        self.sampled_tokens[agent] = self.sampled_tokens.get(agent, 0) + sampled
        self.seconds[agent] = self.seconds.get(agent, 0.0) + seconds


@dataclass(frozen=True)
class Arena:
    """Where a team plays: who computes, how text becomes tokens, who speaks when, and what is asked."""

    sampler: Sampler
    codecs: Mapping[str, Codec]
    router: Router
    task: Task
    answer: str = "last"
    history: Literal["transcript", "chat"] = "transcript"


class StaleWeights(RuntimeError):
    """The engine's weights are not those that the team names."""


def play(
    arena: Arena,
    team: Team,
    problems: Sequence[Problem],
    group_size: int,
    *,
    seed: int,
    temperature: float | None = None,
    ledger: Ledger | None = None,
) -> RolloutBatch:
    """G episodes of each problem under this team, graded. ``seed`` names the batch; turns derive theirs from it."""
    for agent in team:
        live = arena.sampler.version(agent.name)
        if live != agent.version:
            raise StaleWeights(
                f"agent {agent.name!r} would write with weights {live[:8]}, but the team says {agent.version[:8]}"
            )
    ledger = ledger or Ledger()
    cast = [problem for problem in problems for _ in range(group_size)]
    turns: list[list[Turn]] = [[] for _ in cast]
    tick = 0
    while speaking := _speakers(arena.router, turns):
        for name, episodes in speaking.items():
            _speak(arena, team[name], cast, turns, episodes, seed_of(seed, "turn", tick, name), temperature, ledger)
        tick += 1
    answers = [team_answer(t, arena.answer, getattr(arena.task, "extract", None)) for t in turns]
    started = time.perf_counter()
    verdicts = arena.task.grade([(p, a, [t.text for t in ts]) for p, a, ts in zip(cast, answers, turns, strict=True)])
    ledger.grading_seconds += time.perf_counter() - started
    ledger.episodes += len(cast)
    return RolloutBatch(
        problems=tuple(problems),
        episodes=_episodes(cast, turns, answers, verdicts, group_size, team.version),
        group_size=group_size,
    )


def _speakers(router: Router, turns: Sequence[Sequence[Turn]]) -> dict[str, list[tuple[int, int]]]:
    """Who speaks now: agent -> [(episode, round)]; empty when all episodes are over."""
    speaking: dict[str, list[tuple[int, int]]] = {}
    for e, taken in enumerate(turns):
        upcoming = router.next(len(taken))
        if upcoming is not None:
            round, name = upcoming
            speaking.setdefault(name, []).append((e, round))
    return speaking


def _speak(
    arena: Arena,
    agent: Agent,
    cast: Sequence[Problem],
    turns: list[list[Turn]],
    episodes: Sequence[tuple[int, int]],
    seed: int,
    temperature: float | None,
    ledger: Ledger,
) -> None:
    """One turn of one agent in all these episodes."""
    codec = arena.codecs[agent.name]
    started = time.perf_counter()
    prompts = [
        codec.encode(
            render(
                agent=agent.name,
                system_prompt=agent.system_prompt,
                problem=cast[e],
                history=[(t.agent, t.text) for t in visible(turns[e], agent, round)],
                style=arena.history,
            )
        )
        for e, round in episodes
    ]
    samples = arena.sampler.sample(agent.name, prompts, max_tokens=agent.max_tokens, seed=seed, temperature=temperature)
    for (e, round), prompt, sample in zip(episodes, prompts, samples, strict=True):
        turns[e].append(
            Turn(
                agent=agent.name,
                round=round,
                context_ids=prompt,
                token_ids=sample.token_ids,
                sampler_logprobs=sample.logprobs,
                finish=sample.finish,
                agent_version=agent.version,
                text=codec.decode(sample.token_ids),
            )
        )
    ledger.add(
        agent.name,
        sum(map(len, prompts)),
        sum(len(s.token_ids) for s in samples),
        time.perf_counter() - started,
    )


def _episodes(
    cast: Sequence[Problem],
    turns: Sequence[Sequence[Turn]],
    answers: Sequence[str],
    verdicts: Sequence[Verdict],
    group_size: int,
    team_version: str,
) -> tuple[Episode, ...]:
    return tuple(
        Episode(
            problem_id=problem.id,
            group_index=e % group_size,
            turns=tuple(turns[e]),
            answer=answers[e],
            verdict=verdicts[e],
            team_version=team_version,
        )
        for e, problem in enumerate(cast)
    )
