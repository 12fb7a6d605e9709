"""A team, and each of its agents, as models that answer a conversation.

The team plays with ``rollout.converse``, as in training and in ``teamtr eval``: the same question, weights and seed
give the same tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from teamtr.answers import AS_TRAINED, Decoding, Sample
from teamtr.calls import name_of
from teamtr.errors import UserError
from teamtr.ports import Follow, Heard, Tools, unfollowed, unheard
from teamtr.randomness import seed_of, uniforms
from teamtr.rollout import EpisodeState, Ledger, RolloutContext, converse
from teamtr.serving.client_tools import ClientTools, HandedCall, Held
from teamtr.serving.conversation import chat_of, problem_of
from teamtr.serving.locked import LockedCodec, LockedTools
from teamtr.serving.outgoing import Outgoing, first_stop
from teamtr.serving.request import BadRequest, ChatRequest, NotKept
from teamtr.serving.schedule import Row, Scheduler
from teamtr.session.build import Session
from teamtr.streams import InTurns
from teamtr.tasks import Task
from teamtr.team import Team, team_answer
from teamtr.team.router import Upcoming, closers_of, ends_after
from teamtr.types import Finish, Floats, Ids, Problem, Turn, Verdict

Ending = Finish | Literal["tool_calls"]


class TooLong(BadRequest):
    """A conversation that exceeds the model's context length."""

    def __init__(self, tokens: int, room: int) -> None:
        super().__init__(
            f"the conversation and its answer need {tokens} tokens, and there is room for {room}: shorten the "
            "messages or what describes tools, or lower max_tokens",
            "messages",
            "context_length_exceeded",
        )


class Teller(Protocol):
    """Receives text while it is sampled; called from other threads."""

    def discussion(self, choice: int, agent: str, text: str, *, begins: bool) -> None: ...

    def answer(self, choice: int, agent: str, text: str) -> None: ...


@dataclass(frozen=True)
class Spoken:
    """One message of a choice: the number of tokens that its author read and wrote, and the results of the tools that
    it called. ``answers``: whether it is the answer."""

    agent: str
    text: str
    read: int
    written: int
    answers: bool
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One answer and all messages that led to it. If there are ``calls`` for the client to run, ``text`` is the text
    beside them."""

    text: str
    finish: Ending
    spoken: tuple[Spoken, ...]
    calls: tuple[HandedCall, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(message.read for message in self.spoken)

    @property
    def completion_tokens(self) -> int:
        return sum(message.written for message in self.spoken)

    @property
    def reasoning_tokens(self) -> int:
        """Completion tokens outside the answer."""
        return sum(message.written for message in self.spoken if not message.answers)


@dataclass(frozen=True)
class Ask:
    """One choice of a request: the request, the index of the choice, its seed, and whether it was cancelled."""

    request: ChatRequest
    choice: int
    seed: int
    teller: Teller
    cancelled: threading.Event

    @classmethod
    def of(cls, request: ChatRequest, choice: int, seed: int, teller: Teller, cancelled: threading.Event) -> Ask:
        """The first choice has the request's own seed, so it is what ``teamtr eval`` plays with that seed."""
        return cls(request, choice, seed_of(seed, "choice", choice) if choice else seed, teller, cancelled)


class _Asked(Task):
    """The task of a client's questions: there are no reference answers, and only ``extract`` is the team's own task."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lock = threading.Lock()

    def problems(self, split: str) -> Sequence[Problem]:
        return ()

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        raise NotImplementedError("what a client asks is not graded")

    def extract(self, text: str) -> str | None:
        with self._lock:
            return self._task.extract(text)


@dataclass(frozen=True)
class ServedTeam:
    """A team that answers under ``name``, and each of its agents under ``name/AGENT``."""

    name: str
    team: Team
    context: RolloutContext
    codecs: Mapping[str, LockedCodec]
    scheduler: Scheduler
    temperature: float | None
    """For requests that give none: the temperature of evaluations; None is the training temperature."""
    rooms: Mapping[str, int | None] = field(default_factory=dict)
    """Maximum number of tokens of a prompt and its message, by agent; None if there is no known limit."""
    own_tools: tuple[str, ...] = ()
    """Names of the tools of the team file. Read once, because ``LockedTools`` blocks while tools run."""

    @classmethod
    def of(cls, session: Session, team: Team, name: str, scheduler: Scheduler) -> ServedTeam:
        if session.task.environment is not None:
            raise UserError(
                f"the team plays {session.task.name} against an environment, which would speak in the client's place: "
                "only teams whose task has none can be served"
            )
        if session.task.tools is not None:
            raise UserError(
                f"the tools of {session.task.name} answer for its own problems, and a client asks others: only teams "
                "without tools, or with those of their team file (`tools:`), can be served"
            )
        locks: dict[int, threading.Lock] = {}
        codecs = {
            agent: LockedCodec(codec, locks.setdefault(id(getattr(codec, "tokenizer", codec)), threading.Lock()))
            for agent, codec in session.context.codecs.items()
        }
        return cls(
            name,
            team,
            replace(
                session.context,
                codecs=codecs,
                task=_Asked(session.task),
                tools=None if session.context.tools is None else LockedTools(session.context.tools),
            ),
            codecs,
            scheduler,
            session.team_file.eval.temperature,
            {agent: session.engine.info(agent).positions for agent in team.names},
            _names(session.context.tools),
        )

    @property
    def models(self) -> tuple[str, ...]:
        return (self.name, *(f"{self.name}/{agent}" for agent in self.team.names))

    def require(self, request: ChatRequest) -> None:
        """Raises BadRequest if the request cannot be served, before anything is sampled for it."""
        if request.model not in self.models:
            raise UnknownModel(request.model)
        agent = self.agent_of(request.model)
        if agent is not None:
            chat_of(request.messages, "")
            if request.private or request.shows_discussion:
                param = "private" if request.private else "show"
                raise BadRequest(
                    f"{param} is for the whole team: ask {self.name!r}, or leave it out",
                    param,
                    "invalid_value",
                )
        else:
            problem_of(request.messages, request.private, self.team.names)
        self.client_tools(request)

    def play(self, ask: Ask) -> Choice:
        """Play one choice to its end. Raises BadRequest, Cancelled, or what the engine raises."""
        agent = self.agent_of(ask.request.model)
        return self._converse(ask) if agent is None else self._reply(ask, agent)

    def agent_of(self, model: str) -> str | None:
        """The agent that a model name stands for; None is the whole team."""
        return None if model == self.name else model.removeprefix(f"{self.name}/")

    def client_tools(self, request: ChatRequest) -> ClientTools | None:
        """The client's tools for the agent that answers; None if there are none. Raises BadRequest."""
        if not request.offered:
            return None
        agent = self.agent_of(request.model)
        if agent is not None:
            return ClientTools.of(agent, request.offered)
        agent = self._answering_agent()
        twice = sorted({tool.function.name for tool in request.offered} & set(self.own_tools))
        if twice:
            raise BadRequest(
                f"the team has a tool {twice[0]} of its own: give yours another name", "tools", "invalid_value"
            )
        allowed = self.team[agent].tools
        return ClientTools.of(agent, request.offered, frozenset(self.own_tools if allowed is None else allowed))

    def _answering_agent(self) -> str:
        """The agent that will answer. Raises BadRequest if it is not known in advance."""
        rule = self.context.answer
        may_answer = {rule} if rule in self.team.names else set(closers_of(self.context.router, self.team.names))
        if rule == "majority" or len(may_answer) != 1:
            raise NotKept(
                "tools", f"nobody is known beforehand to give this team's answer; ask one agent, {self.models[1]!r} say"
            )
        return may_answer.pop()

    def _converse(self, ask: Ask) -> Choice:
        request = ask.request
        state = EpisodeState(problem_of(request.messages, request.private, self.team.names))
        voice = _Voice(self, ask, state)
        warmth = self.temperature if request.temperature is None else request.temperature
        context, team = replace(self.context, sampler=voice), self.team
        if voice.client is not None:
            self.codecs[voice.client.agent].require_tools(voice.client.schemas)
            context, team = self._with_client_tools(context, voice.client)
        converse(context, team, [state], seed=ask.seed, temperature=warmth, ledger=Ledger())
        if state.turns and voice.hands_out(state.turns[-1]):
            state.turns[-1] = replace(state.turns[-1], results=())  # the client will send the results
        voice.finish_message()
        return voice.choice()

    def _with_client_tools(self, context: RolloutContext, client: ClientTools) -> tuple[RolloutContext, Team]:
        codecs = {**context.codecs, client.agent: client.told_by(context.codecs[client.agent])}
        context = replace(context, codecs=codecs, router=client.until_called(context.router))
        if context.tools is None or not client.own:
            return context, self.team
        return replace(context, tools=client.beside(context.tools)), client.among(self.team, self.own_tools)

    def _reply(self, ask: Ask, name: str) -> Choice:
        request, agent = ask.request, self.team[name]
        codec = self.codecs[name]
        warmth = self.temperature if request.temperature is None else request.temperature
        voice = _Voice(self, ask, EpisodeState(Problem("request", "")))
        told = () if voice.client is None else voice.client.schemas
        codec.require_tools(told)
        prompt = codec.encode(chat_of(request.messages, agent.system_prompt), told)
        noise_BT = uniforms(seed_of(ask.seed, "turn", 0, name), 1, agent.max_tokens)
        [sample] = voice.sample(name, [prompt], noise_BT, decoding=Decoding(warmth))
        text = codec.decode(sample.token_ids)
        turn = Turn(name, 0, prompt, sample.token_ids, sample.logprobs, sample.finish, sample.version, text)
        voice.state.turns.append(turn)
        voice.finish_message()
        return voice.choice()


class UnknownModel(BadRequest):
    status = 404

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model[:100]!r} does not exist: GET /v1/models lists what there is", "model", "model_not_found"
        )


class _Voice(InTurns):
    """The sampler of one choice: samples through the scheduler and streams the text to the teller.

    ``state`` is the episode that is played; it determines which turn is being sampled.
    """

    def __init__(self, served: ServedTeam, ask: Ask, state: EpisodeState) -> None:
        self.served, self.ask, self.state = served, ask, state
        self.client = served.client_tools(ask.request)
        self._open: Outgoing | None = None
        self._answered = False
        self._held: Held | None = None

    # -- ports.Sampler ----------------------------------------------------------------------------------------

    def version(self, agent: str) -> str:
        return self.served.team[agent].version

    def sample(
        self,
        agent: str,
        prompts: Sequence[Ids],
        noise_BT: Floats,
        *,
        decoding: Decoding = AS_TRAINED,
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        self.finish_message()
        request, answers = self.ask.request, self._answers(agent)
        [prompt], [noise_T] = prompts, noise_BT
        limit = min(len(noise_T), request.most_tokens or len(noise_T)) if answers else len(noise_T)
        room = self.served.rooms.get(agent)
        if room is not None and len(prompt) + limit > room:
            raise TooLong(len(prompt) + limit, room)
        self._open = self._outgoing(agent, answers)
        row = Row(
            agent,
            prompt,
            noise_T,
            replace(decoding, top_p=request.top_p or 1.0),
            limit,
            (lambda token_ids: True) if self._open is None else self._open.listen,
            self.ask.cancelled,
        )
        [sample] = self.served.scheduler.samples([row])
        return [sample]

    # -- streaming --------------------------------------------------------------------------------------------

    def finish_message(self) -> None:
        """Stream the rest of the message that was sampled last, now that its text is known."""
        if self._open is not None:
            self._open.end(self.state.turns[-1].text)
            self._open = None
            request = self.ask.request
            if request.stream and request.shows_discussion:
                for result in self.state.turns[-1].results:
                    self.ask.teller.discussion(self.ask.choice, result.author, result.text, begins=True)

    def hands_out(self, turn: Turn) -> bool:
        """Whether this turn calls tools that the client is to run."""
        return self.client is not None and turn.agent == self.client.agent and bool(self.client.calls_in(turn.text))

    def choice(self) -> Choice:
        """The finished choice. An answer that was not known in advance to be the answer is streamed now."""
        served, turns = self.served, self.state.turns
        by_agent = served.agent_of(self.ask.request.model) is not None
        rule = "last" if by_agent else served.context.answer
        text = team_answer(turns, rule, served.context.task.extract)
        answering = _answering(turns, rule, text)
        finish: Ending = "stop" if answering is None else turns[answering].finish
        most = self.ask.request.most_tokens
        if answering is not None and most is not None and len(turns[answering].token_ids) > most:
            # It was not known in advance that this message is the answer: truncate it now, as it would have been then.
            text, finish = served.codecs[turns[answering].agent].decode(turns[answering].token_ids[:most]), "length"
        stop = first_stop(text, self.ask.request.stops)
        if stop is not None:
            text, finish = text[:stop], "stop"
        calls = () if self.client is None else tuple(map(HandedCall.of, self.client.calls_in(text)))
        if self.client is not None and calls:
            text, finish = self.client.content(text), "tool_calls"
        if self._held is not None:
            self._held.end(text)
        elif not self._answered and text:
            self.ask.teller.answer(self.ask.choice, turns[answering].agent if answering is not None else "", text)
        spoken = tuple(
            Spoken(
                turn.agent,
                turn.text,
                len(turn.context_ids),
                len(turn.token_ids),
                t == answering,
                tuple(result.text for result in turn.results),
            )
            for t, turn in enumerate(turns)
        )
        return Choice(text, finish, spoken, calls)

    def _outgoing(self, agent: str, answers: bool) -> Outgoing | None:
        """The stream of the message; None if the client does not read along and no stop string can end it."""
        request, teller, choice = self.ask.request, self.ask.teller, self.ask.choice
        codec = self.served.codecs[agent]
        if answers:
            if not request.stream and not request.stops:
                return None
            self._answered = True
            if self.client is None:
                return Outgoing(codec.stream(), request.stops, lambda text: teller.answer(choice, agent, text))
            self._held = Held(self.client.names | self.client.own, lambda text: teller.answer(choice, agent, text))
            return Outgoing(codec.stream(), request.stops, self._held.take)
        if not request.stream or not request.shows_discussion:
            return None
        first = [True]

        def tell(text: str) -> None:
            teller.discussion(choice, agent, text, begins=first[0])
            first[0] = False

        return Outgoing(codec.stream(), (), tell, even_empty=True)  # an empty message is shown too

    def _answers(self, agent: str) -> bool:
        """Whether the turn that is sampled next is certainly the answer."""
        served, turns = self.served, self.state.turns
        if served.agent_of(self.ask.request.model) is not None:
            return True
        router, rule = served.context.router, served.context.answer
        if rule == "majority":
            return False
        found = router.next(turns)
        assert found is not None
        if ends_after(router, turns, Upcoming(*found)):
            return rule in ("last", agent)
        spoken = sum(turn.agent == agent for turn in turns)
        return rule == agent and spoken + 1 == router.turns_of(agent)


def _names(tools: Tools | None) -> tuple[str, ...]:
    return () if tools is None else tuple(map(name_of, tools.schemas(Problem("request", ""))))


def _answering(turns: Sequence[Turn], rule: str, text: str) -> int | None:
    """The index of the turn that is the answer; None if there is none."""
    if rule == "last":
        return len(turns) - 1 if turns else None
    for t in range(len(turns) - 1, -1, -1):
        if turns[t].agent == rule or (rule == "majority" and turns[t].text.strip() == text):
            return t
    return None
