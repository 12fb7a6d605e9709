"""Samples the messages of episodes. Each episode goes on to its next turn as soon as its last message is complete.

The requests of all agents go into one stream (``ports.Sampler.stream``); the sampler decides which are computed
together. A turn's noise is derived from the batch's seed, the turn's position in its episode and its speaker, and the
episode's index picks the row. So it does not depend on how far other episodes have come.

1. An episode whose last message is complete gets it as a turn, with the tools' results.
2. The prompt of its next speaker is rendered, and what a draft keeps of the message is reused.
3. The rest of the message is requested from the stream.

The environment is not called while a stream runs, because it may need the same sampler. Episodes wait for it where a
round opens. It is called at once for all waiting episodes with the same number of turns, fewest turns first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from teamtr.answers import Decoding, Ended, Sample, Wanted
from teamtr.ports import Environment, unheard
from teamtr.randomness import RowNoise, seed_of
from teamtr.rollout.calling import Said, calls_in_message, calls_so_far, results_of
from teamtr.rollout.context import Ledger, RolloutContext, check_author
from teamtr.rollout.episode import EpisodeState
from teamtr.rollout.outcome import act
from teamtr.team import Agent, Team, Upcoming, visible
from teamtr.team.router import next_turn, opens_round
from teamtr.types import Finish, Ids, Situation, Turn, conversation


class StaleWeights(RuntimeError):
    """A message was sampled with weights other than those that the team names."""


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
    """Sample all remaining messages of these episodes, in place; nothing is graded. ``ended`` is called for each
    episode that the router ends, while others may still be sampled."""
    talk = _Conversations(context, team, states, seed, temperature, ledger, end_ids, ended)
    while talk.begin():
        context.sampler.stream(talk.more, heard=unheard if ended is None else talk.heard)


@dataclass(frozen=True)
class _Message:
    """A message of episode ``episode`` that is not complete yet; ``begun`` is what there is of it."""

    episode: int
    agent: Agent
    round: int
    prompt: Ids
    begun: _Beginning

    def turn(self, whole: _Beginning, text: str) -> Turn:
        assert whole.finish is not None
        return Turn(
            agent=self.agent.name,
            round=self.round,
            context_ids=self.prompt,
            token_ids=whole.token_ids,
            sampler_logprobs=whole.logprobs,
            finish=whole.finish,
            agent_version=self.agent.version,
            text=text,
        )


@dataclass(frozen=True)
class _Spoken:
    """A complete turn, to be appended to its episode once tools have replied."""

    episode: int
    turn: Turn


@dataclass(eq=False)
class _Conversations:
    """The episodes of one batch while they are played, over one or more streams."""

    context: RolloutContext
    team: Team
    states: Sequence[EpisodeState]
    seed: int
    temperature: float | None
    ledger: Ledger
    end_ids: Mapping[str, frozenset[int]] | None
    ended: Callable[[EpisodeState], None] | None
    _ready: set[int] = field(init=False)
    _waits: set[int] = field(default_factory=set)
    """Episodes that wait for the environment."""
    _replied: dict[int, int] = field(default_factory=dict)
    """By episode: its number of turns when the environment last replied."""
    _open: dict[int, _Message] = field(default_factory=dict)
    """The messages being sampled, by row of the stream."""
    _rows: int = 0
    _told: dict[int, list[str]] = field(default_factory=dict)
    """Episodes for which ``ended`` was called, with their messages at that time."""
    _since: float = 0.0
    _noise: dict[tuple[int, str], RowNoise] = field(default_factory=dict)
    """By position of the turn in its episode, and by speaker."""

    def __post_init__(self) -> None:
        self._ready = set(range(len(self.states)))

    # -- between streams --------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Whether there is anything to sample. Calls the environment first, if no episode can go on without it."""
        assert not self._open
        self._rows = 0
        environment = self.context.task.environment
        if environment is not None:
            self._waits |= {e for e in self._ready if self._waits_for_reply(e, self._upcoming(e))}
            self._ready -= self._waits
            while self._waits and not self._speaking():
                self._ask(environment)
        self._since = time.perf_counter()
        return self._speaking()

    def _speaking(self) -> bool:
        return any(self._upcoming(e) is not None for e in self._ready)

    def _waits_for_reply(self, e: int, upcoming: Upcoming | None) -> bool:
        turns = self.states[e].turns
        return opens_round(turns, upcoming) and self._replied.get(e) != len(turns)

    def _ask(self, environment: Environment) -> None:
        """One environment reply in all waiting episodes with the fewest turns; no others can arrive at that number."""
        tick = min(len(self.states[e].turns) for e in self._waits)
        asked = [e for e in sorted(self._waits) if len(self.states[e].turns) == tick]
        states = [self.states[e] for e in asked]
        step_environment(
            self.context, self.team, environment, states, seed_of(self.seed, "environment", tick), self.ledger
        )
        self._replied.update(dict.fromkeys(asked, tick))
        self._waits.difference_update(asked)
        self._ready.update(asked)

    # -- ports.More and ports.Heard ---------------------------------------------------------------------------

    def more(self, ended: Sequence[Ended]) -> list[Wanted]:
        self._book(ended)
        spoken = [self._said(one) for one in ended]
        wanted: list[Wanted] = []
        while spoken or self._ready:
            self._call_tools(spoken)  # 1.
            spoken = []
            for e in sorted(self._ready):
                self._ready.remove(e)
                if (message := self._next(e)) is None:  # 2.
                    continue
                if message.begun.finish is not None:
                    spoken.append(_Spoken(e, self._turn(message, message.begun)))
                else:
                    wanted.append(self._wanted(message))  # 3.
        return wanted

    def heard(self, row: int, sample: Sample) -> None:
        """Handle a message that may still be sampled again: if it ends its episode, only ``ended`` is called."""
        message = self._open[row]
        state = self.states[message.episode]
        turn = self._turn(message, message.begun.followed_by(sample))
        if calls_in_message(self.context, message.agent, state.problem, turn.text):
            return  # the calls are answered first, so the episode is not over
        after = replace(state, turns=[*state.turns, turn])
        if not after.ended and next_turn(self.context.router, after.turns, self.team.names) is None:
            self._tell(message.episode, after)

    def _tell(self, e: int, state: EpisodeState) -> None:
        said = [turn.text for turn in state.turns]
        if self.ended is not None and self._told.get(e) != said:
            self._told[e] = said
            self.ended(state)

    # -- 1. ---------------------------------------------------------------------------------------------------

    def _said(self, one: Ended) -> _Spoken:
        message = self._open.pop(one.row)
        agent, written = message.agent, one.sample.version
        if written != agent.version:
            raise StaleWeights(
                f"agent {agent.name!r} wrote with weights {written[:8]}, but the team says {agent.version[:8]}"
            )
        whole = message.begun.followed_by(one.sample)
        return _Spoken(message.episode, self._turn(message, whole))

    def _turn(self, message: _Message, whole: _Beginning) -> Turn:
        return message.turn(whole, self.context.codecs[message.agent.name].decode(whole.token_ids))

    def _book(self, ended: Sequence[Ended]) -> None:
        """Add tokens to the ledger by agent, and the seconds since the last booking in proportion to sampled tokens."""
        if not ended:
            return
        now = time.perf_counter()
        sampled: dict[str, int] = {}
        read: dict[str, int] = {}
        for one in ended:
            message = self._open[one.row]
            name = message.agent.name
            sampled[name] = sampled.get(name, 0) + len(one.sample.token_ids)
            read[name] = read.get(name, 0) + len(message.prompt)
        total = sum(sampled.values())
        for name in sampled:
            share = sampled[name] / total if total else 1 / len(sampled)
            self.ledger.add(name, read[name], sampled[name], share * (now - self._since))
        self._since = now

    def _call_tools(self, spoken: Sequence[_Spoken]) -> None:
        """Append each turn to its episode, with its tool results; the calls of one agent are made in one batch."""
        if not spoken:
            return
        started = time.perf_counter() if self.context.tools is not None else 0.0
        for name in dict.fromkeys(one.turn.agent for one in spoken):
            own = [one for one in spoken if one.turn.agent == name]
            said = [Said(self.states[one.episode], one.turn.text) for one in own]
            for one, results in zip(own, results_of(self.context, self.team, self.team[name], said), strict=True):
                turn = replace(one.turn, results=results) if results else one.turn
                self.states[one.episode].turns.append(turn)
                self._ready.add(one.episode)
        if self.context.tools is not None:
            took = time.perf_counter() - started
            self.ledger.environment_seconds += took
            self._since += took

    # -- 2. and 3. --------------------------------------------------------------------------------------------

    def _upcoming(self, e: int) -> Upcoming | None:
        """The next turn of this episode; None when it is over."""
        state = self.states[e]
        return None if state.ended else next_turn(self.context.router, state.turns, self.team.names)

    def _next(self, e: int) -> _Message | None:
        """The next message of this episode; None if it is over or waits for the environment."""
        state, upcoming = self.states[e], self._upcoming(e)
        if upcoming is None:
            if state.turns and not state.ended:
                self._tell(e, state)
            return None
        if self.context.task.environment is not None and self._waits_for_reply(e, upcoming):
            self._waits.add(e)
            return None
        agent = self.team[upcoming.agent]
        history = conversation(visible(state.turns, agent, upcoming.round), state.replies)
        prompt = self.context.prompt(self.team, agent, state.problem, history)
        ends = frozenset() if self.end_ids is None else self.end_ids[agent.name]
        return _Message(e, agent, upcoming.round, prompt, _begun(state.drafted_turn(agent.name, prompt), agent, ends))

    def _wanted(self, message: _Message) -> Wanted:
        self._open[self._rows] = message
        self._rows += 1
        place, agent, begun = len(self.states[message.episode].turns), message.agent, message.begun.token_ids
        noise = self._noise.get((place, agent.name))
        if noise is None:
            noise = RowNoise(seed_of(self.seed, "turn", place, agent.name), agent.max_tokens)
            self._noise[place, agent.name] = noise
        return Wanted(
            agent.name,
            np.concatenate([message.prompt, begun]) if len(begun) else message.prompt,
            noise[message.episode][: agent.max_tokens - len(begun)],
            Decoding(self.temperature),
        )


@dataclass(frozen=True)
class _Beginning:
    """The part of a message that is already determined; if ``finish`` is set, it is the whole message."""

    token_ids: Ids
    logprobs: NDArray[np.float32]
    finish: Finish | None = None

    def followed_by(self, sample: Sample) -> _Beginning:
        """This part and the sample after it."""
        if not len(self.token_ids):
            return _Beginning(sample.token_ids, sample.logprobs, sample.finish)
        token_ids = np.concatenate([self.token_ids, sample.token_ids])
        logprobs = np.concatenate([self.logprobs, sample.logprobs])
        return _Beginning(token_ids, logprobs, sample.finish)


_NOTHING = _Beginning(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))


def _begun(drafted: tuple[Turn, int, int] | None, agent: Agent, ends: frozenset[int]) -> _Beginning:
    if drafted is None:
        return _NOTHING
    turn, kept, following = drafted
    if kept < 0 or kept == len(turn.token_ids):
        return _Beginning(turn.token_ids, turn.sampler_logprobs, turn.finish)
    # The token that follows comes from verification, not from the sampler, so it has no sampler log-probability.
    token_ids = np.append(turn.token_ids[:kept], np.int32(following))
    logprobs = np.append(turn.sampler_logprobs[:kept], np.float32(np.nan))
    finish: Finish | None = "stop" if following in ends else "length" if len(token_ids) == agent.max_tokens else None
    return _Beginning(token_ids, logprobs, finish)


def step_environment(
    context: RolloutContext,
    team: Team,
    environment: Environment,
    states: Iterable[EpisodeState],
    seed: int,
    ledger: Ledger,
) -> None:
    """One environment reply in each of these episodes, in all of which a round is about to open."""
    started = time.perf_counter()
    new = []
    for state in states:
        if state.turns:
            state.acts.append(act(context, state.turns))
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
