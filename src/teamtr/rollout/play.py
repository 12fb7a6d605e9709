"""Play episodes in lockstep: at every turn, all episodes whose next speaker is the same agent go as one batch.

An interactive task has an environment, which speaks before every round: it replies to what the team said in the round
before (the team's answer of that round; its last message where whoever answers did not speak), or ends the episode. The
last round is the final answer.

Where there are tools, what a message calls is answered at once (``calling.py``), and its author speaks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from teamtr.ports import Environment, unheard
from teamtr.progress import working
from teamtr.randomness import seed_of, uniforms
from teamtr.rollout.calling import Said, calls_in_message, calls_so_far, results_of
from teamtr.rollout.context import Ledger, RolloutContext, check_author
from teamtr.rollout.episode import EpisodeState
from teamtr.rollout.grading import Asked, Grading
from teamtr.rollout.outcome import act, graded_text
from teamtr.team import Agent, Router, Team, Upcoming, visible
from teamtr.team.router import next_turn, opens_round
from teamtr.types import (
    Decoding,
    Episode,
    Finish,
    Ids,
    Problem,
    RolloutBatch,
    Sample,
    Situation,
    Transcript,
    Turn,
    Verdict,
    conversation,
)


class StaleWeights(RuntimeError):
    """The engine's weights are not those that the team names."""


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
    states = [EpisodeState(problem) for problem in problems for _ in range(group_size)]
    return play_out(
        context, team, problems, group_size, states, seed=seed, temperature=temperature, ledger=ledger or Ledger()
    )


def play_out(
    context: RolloutContext,
    team: Team,
    problems: Sequence[Problem],
    group_size: int,
    states: Sequence[EpisodeState],
    *,
    seed: int,
    temperature: float | None,
    ledger: Ledger,
    end_ids: Mapping[str, frozenset[int]] | None = None,
) -> RolloutBatch:
    """These episodes to their end, graded. ``end_ids`` by agent: what ends a message, where there are drafts."""
    with Grading(context.task) as grading:

        def ended(state: EpisodeState) -> None:
            if state.drafted_verdict is None:
                grading.ended(_asked(context, team, state))

        heard = ended if grading.is_early else None
        converse(context, team, states, seed=seed, temperature=temperature, ledger=ledger, end_ids=end_ids, ended=heard)
        asked = [_asked(context, team, state) for state in states]
        with working("grading"):
            verdicts = _verdicts(states, asked, grading, ledger)
    answers = [answer for _, answer, _ in asked]
    return RolloutBatch(
        problems=tuple(problems),
        episodes=_episodes(states, answers, verdicts, group_size, team.version),
        group_size=group_size,
    )


def converse(
    context: RolloutContext,
    team: Team,
    states: Sequence[EpisodeState],
    *,
    seed: int,
    temperature: float | None,
    ledger: Ledger,
    end_ids: Mapping[str, frozenset[int]] | None = None,
    ended: Callable[[EpisodeState], None] | None = None,
) -> None:
    """Say all that is still to be said in these episodes; nothing is graded. ``ended`` is told of every episode that is
    over, while others may still be sampled; not of one that its draft ends."""
    environment = context.task.environment
    tick = 0
    while True:
        if environment is not None:
            _step_environment(context, team, environment, states, seed_of(seed, "environment", tick), ledger)
        speaking = _speakers(context.router, team, states)
        if not speaking:
            break
        for name, turns in speaking.items():
            ends = frozenset() if end_ids is None else end_ids[name]
            turn_seed = seed_of(seed, "turn", tick, name)
            with working(f"sampling {name}"):
                _speak(context, team, name, turns, turn_seed, temperature, ledger, ends, ended)
        tick += 1


def _verdicts(
    states: Sequence[EpisodeState], asked: Sequence[Asked], grading: Grading, ledger: Ledger
) -> list[Verdict]:
    """The grader's, of all episodes that are not word for word what their draft was."""
    started = time.perf_counter()
    known = {e: verdict for e, state in enumerate(states) if (verdict := state.drafted_verdict) is not None}
    new = [e for e in range(len(states)) if e not in known]
    graded = grading.verdicts([asked[e] for e in new])
    ledger.grading_seconds += time.perf_counter() - started
    ledger.episodes += len(new)
    known.update(zip(new, graded, strict=True))
    return [known[e] for e in range(len(states))]


def _asked(context: RolloutContext, team: Team, state: EpisodeState) -> Asked:
    text = graded_text(context, team, state.problem, state.turns, state.replies)
    return state.problem, text, Transcript(state.turns, state.replies)


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
            state.acts.append(act(context, state.turns))
    new = []
    for state in asked:
        if state.draft is not None and state.as_drafted and len(state.replies) < len(state.draft.episode.replies):
            state.replies.append(state.draft.episode.replies[len(state.replies)])
        else:
            new.append(state)
    situations = [
        Situation(
            state.problem,
            tuple(state.acts),
            tuple(state.replies),
            rounds_left=context.router.rounds - 1 - len(state.acts),
            calls=calls_so_far(context, team, state),
        )
        for state in new
    ]
    for state, reply in zip(new, environment.reply(situations, seed=seed) if new else (), strict=True):
        for message in reply.messages:
            check_author(context, team, state.problem, message.author)
        state.replies.append(reply)
    ledger.environment_seconds += time.perf_counter() - started


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
    ends: frozenset[int],
    ended: Callable[[EpisodeState], None] | None,
) -> None:
    """One turn of one agent in all these episodes; what a draft says of it stays as far as it may."""
    agent, codec = team[name], context.codecs[name]
    started = time.perf_counter()
    prompts = [
        context.prompt(team, agent, state.problem, conversation(visible(state.turns, agent, round), state.replies))
        for state, round in turns
    ]
    begun = [
        _begun(state.drafted_turn(name, prompt), agent, ends) for (state, _), prompt in zip(turns, prompts, strict=True)
    ]
    noise_BT = uniforms(seed, len(prompts), agent.max_tokens)
    open_rows = [row for row, beginning in enumerate(begun) if beginning.finish is None]
    samples: list[Sample] = []

    def with_turn(row: int, whole: _Beginning) -> EpisodeState:
        """The episode with this message."""
        state, round = turns[row]
        assert whole.finish is not None
        turn = Turn(
            agent=agent.name,
            round=round,
            context_ids=prompts[row],
            token_ids=whole.token_ids,
            sampler_logprobs=whole.logprobs,
            finish=whole.finish,
            agent_version=agent.version,
            text=codec.decode(whole.token_ids),
        )
        return replace(state, turns=[*state.turns, turn])

    def heard(place: int, sample: Sample) -> None:
        row = open_rows[place]
        after = with_turn(row, begun[row].followed_by(sample, agent))
        if ended is None or calls_in_message(context, agent, after.problem, after.turns[-1].text):
            return  # what is called is answered first
        if _upcoming(context.router, team, after) is None:
            ended(after)

    if open_rows:
        asked = [np.concatenate([prompts[row], begun[row].token_ids]) for row in open_rows]
        samples = context.sampler.sample(
            agent.name,
            asked,
            noise_BT[open_rows],
            decoding=Decoding(temperature),
            heard=unheard if ended is None else heard,
        )
    if other := {sample.version for sample in samples} - {agent.version}:
        raise StaleWeights(
            f"agent {agent.name!r} wrote with weights {min(other)[:8]}, but the team says {agent.version[:8]}"
        )
    said = dict(enumerate(begun))
    said.update((row, begun[row].followed_by(sample, agent)) for row, sample in zip(open_rows, samples, strict=True))
    spoken = [with_turn(row, said[row]).turns[-1] for row in range(len(turns))]
    ledger.add(
        agent.name,
        sum(len(prompts[row]) for row in open_rows),
        sum(len(s.token_ids) for s in samples),
        time.perf_counter() - started,
    )
    _call_tools(context, team, agent, [state for state, _ in turns], spoken, ledger)


def _call_tools(
    context: RolloutContext,
    team: Team,
    agent: Agent,
    states: Sequence[EpisodeState],
    spoken: Sequence[Turn],
    ledger: Ledger,
) -> None:
    """Every episode with this turn of the agent, and what tools reply to it."""
    started = time.perf_counter()
    said = [Said(state, turn.text) for state, turn in zip(states, spoken, strict=True)]
    for state, turn, results in zip(states, spoken, results_of(context, team, agent, said), strict=True):
        state.turns.append(replace(turn, results=results) if results else turn)
    if context.tools is not None:
        ledger.environment_seconds += time.perf_counter() - started


@dataclass(frozen=True)
class _Beginning:
    """What stands of a message before anything is sampled; with a ``finish`` it is the whole of it."""

    token_ids: Ids
    logprobs: NDArray[np.float32]
    finish: Finish | None = None

    def followed_by(self, sample: Sample, agent: Agent) -> _Beginning:
        """With what was sampled after it, as far as the agent may speak."""
        room = agent.max_tokens - len(self.token_ids)
        cut = len(sample.token_ids) > room
        return _Beginning(
            np.concatenate([self.token_ids, sample.token_ids[:room]]),
            np.concatenate([self.logprobs, sample.logprobs[:room]]),
            "length" if cut else sample.finish,
        )


def _begun(drafted: tuple[Turn, int, int] | None, agent: Agent, ends: frozenset[int]) -> _Beginning:
    if drafted is None:
        return _Beginning(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))
    turn, kept, following = drafted
    if kept < 0 or kept == len(turn.token_ids):
        return _Beginning(turn.token_ids, turn.sampler_logprobs, turn.finish)
    # The sampler never said the token that follows: it has no log-probability of it.
    token_ids = np.append(turn.token_ids[:kept], np.int32(following))
    logprobs = np.append(turn.sampler_logprobs[:kept], np.float32(np.nan))
    finish: Finish | None = "stop" if following in ends else "length" if len(token_ids) == agent.max_tokens else None
    return _Beginning(token_ids, logprobs, finish)


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
