"""Play episodes in lockstep: at every turn, all episodes whose next speaker is the same agent go as one batch.

An interactive task has an environment, which speaks before every round: it replies to what the team said in the round
before (the team's answer of that round; its last message where whoever answers did not speak), or ends the episode. The
last round is the final answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from teamtr.chat import render
from teamtr.chat.transcript import YOU, is_label
from teamtr.errors import UserError
from teamtr.ports import Codec, Environment, Sampler, Task
from teamtr.randomness import seed_of, uniforms
from teamtr.team import Router, Team, Upcoming, team_answer, visible
from teamtr.team.router import next_turn, opens_round
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
class RolloutContext:
    """Where a team plays: who computes, how text becomes tokens, who speaks when, and what is asked."""

    sampler: Sampler
    codecs: Mapping[str, Codec]
    router: Router
    task: Task
    answer: str = "last"
    history: Literal["transcript", "chat"] = "transcript"

    def speakers(self, team: Team, problem: Problem) -> tuple[str, ...]:
        """All who may speak in an episode of this problem: the agents, and whoever the environment speaks as."""
        environment = self.task.environment
        return team.names if environment is None else (*team.names, *_authors(environment, problem))


class StaleWeights(RuntimeError):
    """The engine's weights are not those that the team names."""


@dataclass
class EpisodeState:
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
    context: RolloutContext,
    team: Team,
    problems: Sequence[Problem],
    group_size: int,
    *,
    seed: int,
    temperature: float | None = None,
    ledger: Ledger | None = None,
) -> RolloutBatch:
    """G episodes of each problem under this team, graded. ``seed`` names the batch; turns derive theirs from it."""
    ledger = ledger or Ledger()
    states = [EpisodeState(problem) for problem in problems for _ in range(group_size)]
    environment = context.task.environment
    tick = 0
    while True:
        if environment is not None:
            _step_environment(context, team, environment, states, seed_of(seed, "environment", tick), ledger)
        speaking = _speakers(context.router, team, states)
        if not speaking:
            break
        for name, turns in speaking.items():
            _speak(context, team, name, turns, seed_of(seed, "turn", tick, name), temperature, ledger)
        tick += 1
    answers = [_said(context, state.turns) for state in states]
    started = time.perf_counter()
    verdicts = context.task.grade(
        [(state.problem, answer, [t.text for t in state.turns]) for state, answer in zip(states, answers, strict=True)]
    )
    ledger.grading_seconds += time.perf_counter() - started
    ledger.episodes += len(states)
    return RolloutBatch(
        problems=tuple(problems),
        episodes=_episodes(states, answers, verdicts, group_size, team.version),
        group_size=group_size,
    )


def _said(context: RolloutContext, turns: Sequence[Turn]) -> str:
    """What the team says with these turns, by its rule."""
    return team_answer(turns, context.answer, context.task.extract)


def _act(context: RolloutContext, turns: Sequence[Turn]) -> str:
    """What the team said in its last round: by its rule, or last where whoever answers did not speak in it."""
    done = [turn for turn in turns if turn.round == turns[-1].round]
    silent = context.answer not in ("last", "majority", *(turn.agent for turn in done))
    return done[-1].text if silent else _said(context, done)


def _step_environment(
    context: RolloutContext,
    team: Team,
    environment: Environment,
    states: Sequence[EpisodeState],
    seed: int,
    ledger: Ledger,
) -> None:
    """One reply of the environment in all episodes in which a round is about to open."""
    asked = [state for state in states if opens_round(state.turns, _upcoming(context.router, team, state))]
    if not asked:
        return
    started = time.perf_counter()
    for state in asked:
        if state.turns:
            state.acts.append(_act(context, state.turns))
    situations = [
        Situation(state.problem, tuple(state.acts), tuple(state.replies), context.router.rounds - 1 - len(state.acts))
        for state in asked
    ]
    for state, reply in zip(asked, environment.reply(situations, seed=seed), strict=True):
        for message in reply.messages:
            _check_author(environment, team, state.problem, message.author)
        state.replies.append(reply)
    ledger.environment_seconds += time.perf_counter() - started


def _authors(environment: Environment, problem: Problem) -> Sequence[str]:
    if not hasattr(environment, "speakers"):  # written by somebody whom no type checker told
        raise UserError(
            f"{type(environment).__name__} does not say who speaks in it: give it `def speakers(self, problem)`, which "
            "returns the names of all authors that its replies may have (docs/tasks.md)"
        )
    return environment.speakers(problem)


def _check_author(environment: Environment, team: Team, problem: Problem, author: str) -> None:
    """Every author must be known beforehand and read like nobody else, or a message could pass for one of its lines."""
    speaks = f"the environment of problem {problem.id!r} speaks as {author!r}"
    if author in team.names:
        raise UserError(
            f"{speaks}, which is also the name of an agent: call the agent otherwise, or it takes these words for "
            "its own"
        )
    if author not in _authors(environment, problem):
        raise UserError(f"{speaks}, whom its speakers() does not name: name there everyone it may speak as")
    if not is_label(author):
        raise UserError(f"{speaks}: a name must be one line without a colon, and not {YOU!r}")


def _upcoming(router: Router, team: Team, state: EpisodeState) -> Upcoming | None:
    """The next turn of this episode; None when it is over."""
    return None if state.ended else next_turn(router, state.turns, team.names)


def _speakers(router: Router, team: Team, states: Sequence[EpisodeState]) -> dict[str, list[tuple[EpisodeState, int]]]:
    """Who speaks now: agent -> [(episode, round)]; empty when all episodes are over."""
    speaking: dict[str, list[tuple[EpisodeState, int]]] = {}
    for state in states:
        upcoming = _upcoming(router, team, state)
        if upcoming is not None:
            speaking.setdefault(upcoming.agent, []).append((state, upcoming.round))
    return speaking


def _speak(
    context: RolloutContext,
    team: Team,
    name: str,
    turns: Sequence[tuple[EpisodeState, int]],
    seed: int,
    temperature: float | None,
    ledger: Ledger,
) -> None:
    """One turn of one agent in all these episodes."""
    agent, codec = team[name], context.codecs[name]
    started = time.perf_counter()
    prompts = [
        codec.encode(
            render(
                agent=agent.name,
                system_prompt=agent.system_prompt,
                problem=state.problem,
                history=[(m.author, m.text) for m in conversation(visible(state.turns, agent, round), state.replies)],
                speakers=context.speakers(team, state.problem),
                style=context.history,
            )
        )
        for state, round in turns
    ]
    noise_BT = uniforms(seed, len(prompts), agent.max_tokens)
    samples = context.sampler.sample(agent.name, prompts, noise_BT, temperature=temperature)
    if other := {sample.version for sample in samples} - {agent.version}:
        raise StaleWeights(
            f"agent {agent.name!r} wrote with weights {min(other)[:8]}, but the team says {agent.version[:8]}"
        )
    for (state, round), prompt, sample in zip(turns, prompts, samples, strict=True):
        state.turns.append(
            Turn(
                agent=agent.name,
                round=round,
                context_ids=prompt,
                token_ids=sample.token_ids,
                sampler_logprobs=sample.logprobs,
                finish=sample.finish,
                agent_version=sample.version,
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
    states: Sequence[EpisodeState],
    answers: Sequence[str],
    verdicts: Sequence[Verdict],
    group_size: int,
    team_version: str,
) -> tuple[Episode, ...]:
    return tuple(
        Episode(
            problem_id=state.problem.id,
            group_index=e % group_size,
            turns=tuple(state.turns),
            answer=answers[e],
            verdict=verdicts[e],
            team_version=team_version,
            replies=tuple(state.replies),
        )
        for e, state in enumerate(states)
    )
