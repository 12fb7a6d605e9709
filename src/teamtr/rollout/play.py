"""Play episodes in lockstep: at every turn, all episodes whose next speaker is the same agent go as one batch.

An interactive task has an environment, which speaks before every round: it replies to what the team said in the round
before (the team's answer of that round), or ends the episode. The last round is the final answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from teamtr.chat import render
from teamtr.errors import Misuse
from teamtr.ports import Codec, Environment, Sampler, Task
from teamtr.randomness import seed_of
from teamtr.team import Agent, Router, Team, team_answer, visible
from teamtr.types import Episode, Problem, Reply, RolloutBatch, Situation, Turn, Verdict, conversation


@dataclass
class Ledger:
    """What was spent, per agent and phase: tokens, messages or episodes, seconds."""

    sampled_tokens: dict[str, int] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    episodes: int = 0
    grading_seconds: float = 0.0
    environment_seconds: float = 0.0

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


@dataclass
class _Game:
    """An episode while it is played; ``acts`` and ``replies`` as in ``Situation``."""

    problem: Problem
    turns: list[Turn] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the environment has ended it."""
        return bool(self.replies) and self.replies[-1].ends


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
    games = [_Game(problem) for problem in problems for _ in range(group_size)]
    environment: Environment | None = getattr(arena.task, "environment", None)
    tick = 0
    while True:
        if environment is not None:
            _listen(arena, team, environment, games, seed_of(seed, "environment", tick), ledger)
        speaking = _speakers(arena.router, games)
        if not speaking:
            break
        for name, turns in speaking.items():
            _speak(arena, team[name], turns, seed_of(seed, "turn", tick, name), temperature, ledger)
        tick += 1
    answers = [_said(arena, game.turns) for game in games]
    started = time.perf_counter()
    verdicts = arena.task.grade(
        [(game.problem, answer, [t.text for t in game.turns]) for game, answer in zip(games, answers, strict=True)]
    )
    ledger.grading_seconds += time.perf_counter() - started
    ledger.episodes += len(games)
    return RolloutBatch(
        problems=tuple(problems),
        episodes=_episodes(games, answers, verdicts, group_size, team.version),
        group_size=group_size,
    )


def _said(arena: Arena, turns: Sequence[Turn]) -> str:
    """What the team says with these turns, by its rule."""
    return team_answer(turns, arena.answer, getattr(arena.task, "extract", None))


def _listen(
    arena: Arena, team: Team, environment: Environment, games: Sequence[_Game], seed: int, ledger: Ledger
) -> None:
    """One reply of the environment in all episodes in which a round is about to open."""
    asked = [game for game in games if not game.ended and arena.router.opens_round(len(game.turns))]
    if not asked:
        return
    started = time.perf_counter()
    for game in asked:
        if game.turns:
            done = game.turns[-1].round
            game.acts.append(_said(arena, [turn for turn in game.turns if turn.round == done]))
    situations = [
        Situation(game.problem, tuple(game.acts), tuple(game.replies), arena.router.rounds - 1 - len(game.acts))
        for game in asked
    ]
    for game, reply in zip(asked, environment.reply(situations, seed=seed), strict=True):
        for message in reply.messages:
            if message.author in team.names:
                raise Misuse(
                    f"the environment of problem {game.problem.id!r} speaks as {message.author!r}, which is also the "
                    "name of an agent: call the agent otherwise, or it takes these words for its own"
                )
        game.replies.append(reply)
    ledger.environment_seconds += time.perf_counter() - started


def _speakers(router: Router, games: Sequence[_Game]) -> dict[str, list[tuple[_Game, int]]]:
    """Who speaks now: agent -> [(episode, round)]; empty when all episodes are over."""
    speaking: dict[str, list[tuple[_Game, int]]] = {}
    for game in games:
        upcoming = None if game.ended else router.next(len(game.turns))
        if upcoming is not None:
            round, name = upcoming
            speaking.setdefault(name, []).append((game, round))
    return speaking


def _speak(
    arena: Arena,
    agent: Agent,
    turns: Sequence[tuple[_Game, int]],
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
                problem=game.problem,
                history=[(m.author, m.text) for m in conversation(visible(game.turns, agent, round), game.replies)],
                style=arena.history,
            )
        )
        for game, round in turns
    ]
    samples = arena.sampler.sample(agent.name, prompts, max_tokens=agent.max_tokens, seed=seed, temperature=temperature)
    for (game, round), prompt, sample in zip(turns, prompts, samples, strict=True):
        game.turns.append(
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
    games: Sequence[_Game], answers: Sequence[str], verdicts: Sequence[Verdict], group_size: int, team_version: str
) -> tuple[Episode, ...]:
    return tuple(
        Episode(
            problem_id=game.problem.id,
            group_index=e % group_size,
            turns=tuple(game.turns),
            answer=answers[e],
            verdict=verdicts[e],
            team_version=team_version,
            replies=tuple(game.replies),
        )
        for e, game in enumerate(games)
    )
