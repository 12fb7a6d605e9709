"""The section ``team``: agents, who speaks when, who sees what, and whose message is the answer.

Routers and visibilities are defined in ``teamtr.team``; this module only selects and validates them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from teamtr.config.texts import ANSWER_WORDS, AgentName
from teamtr.own_code import PREFIX as OWN
from teamtr.settings.paths import BUILT_IN_MODELS, Anchor
from teamtr.settings.refusals import KeyPath, Refusal, hint, show
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, Flag, InSchema, InWords, NonEmpty, Positive
from teamtr.team import Router, visibility
from teamtr.team.router import ROUTERS, closers_of, keys_of, speakers_of
from teamtr.team.visibility import HELP as SEES_HELP
from teamtr.team.visibility import MAPPING as SEES_MAPPING
from teamtr.team.visibility import WORDS

Train = Literal["full", "lora"]


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list | tuple) else None


def _number_or_lists(value: Any) -> str | None:
    if isinstance(value, int | float):
        return "number"
    return "lists" if isinstance(value, list | tuple) else None


_OWN_ROUTER = rf"{OWN}.+\.py:[^\W\d]\w*"


def _router_kind(value: str) -> str:
    if value not in ROUTERS and not re.fullmatch(_OWN_ROUTER, value):
        must = f"must be {', '.join(ROUTERS)} or python:FILE.py:CLASS (FILE relative to the team file)"
        raise ValueError(f"{must}, got {show(value)}{hint(value, ROUTERS)}")
    return value


def _sees(value: Any) -> Any:
    """Validate a visibility and return it as written; tuples become lists, so that a stored copy compares equal."""
    try:
        visibility(value)
    except ValueError as error:
        raise ValueError(f"{error}, got {show(value)}{hint(value, WORDS)}") from None
    if not isinstance(value, dict):
        return value
    return {form: list(said) if isinstance(said, tuple) else said for form, said in value.items()}


Names = Annotated[tuple[str, ...], Field(min_length=1)]
Rounds = Annotated[
    Annotated[Positive, Tag("number")] | Annotated[tuple[Names, ...], Field(min_length=1), Tag("lists")],
    Discriminator(
        _number_or_lists, "number_or_lists", "must be a whole number, or a list with the order of every round"
    ),
]
RouterKind = Annotated[
    str,
    AfterValidator(_router_kind),
    InSchema({"anyOf": [{"enum": list(ROUTERS)}, {"pattern": f"^{_OWN_ROUTER}$"}]}),
]
AgentTools = Annotated[
    Annotated[Literal["all", "none"], Tag("text")] | Annotated[tuple[NonEmpty, ...], Field(min_length=1), Tag("list")],
    Discriminator(_text_or_list, "text_or_list", "must be all, none or a list of names"),
]
Sees = Annotated[
    Any,
    BeforeValidator(_sees),
    InWords(" | ".join((*WORDS, "mapping"))),
    InSchema({"anyOf": [{"enum": list(WORDS)}, SEES_MAPPING]}),
]


class LoraConfig(Section):
    """A low-rank adapter on a frozen base."""

    rank: Positive = key(16, "Rank of the adapter.")
    alpha: Above0 = key(32.0, "Scale of the adapter; its output is multiplied by alpha / rank.")
    targets: Annotated[
        Annotated[NonEmpty, Tag("text")] | Annotated[tuple[NonEmpty, ...], Field(min_length=1), Tag("list")],
        Discriminator(_text_or_list, "text_or_list", "must be text or a list of text"),
    ] = key("all-linear", "Layers that get an adapter: all-linear, a pattern, or a list of names.")
    start: NonEmpty | None = unset(
        "The folder of an adapter to start from, relative to the team file, as `teamtr export` writes it; the model is "
        "its base. Default: an adapter that changes nothing."
    )

    def anchored(self, anchor: Anchor) -> Self:
        return self if self.start is None else self.model_copy(update={"start": anchor.path(self.start)})


class AgentConfig(Section):
    """One agent. If its model, system_prompt, train, lora or max_tokens is missing, the team's is used."""

    unset_means: ClassVar[str] = "the team's"

    name: AgentName = Field(description="Name of the agent, for the others and in the log.")
    model: NonEmpty = unset("tiny, tabular, a folder (relative to the team file) or a hub id.")
    revision: NonEmpty | None = unset("For a hub id: the branch, tag or commit to load.")
    system_prompt: str = unset("Its system prompt.")
    train: Train = unset(
        "full: all weights; lora: an adapter. If the team has none either: full for tiny and tabular, else lora."
    )
    lora: LoraConfig = unset("The adapter, if it trains one; missing keys are the team's.")
    sees: Sees = key("everything", SEES_HELP)
    max_tokens: Positive = unset("Most tokens in one message, including the end token.")
    frozen: Flag = key(False, "Speaks, but is never updated.")
    tools: AgentTools = key("all", "The tools that it may call: all, none, or a list of names; see docs/tools.md.")

    @property
    def own_tools(self) -> tuple[str, ...] | None:
        """The names of the tools that the agent may call; None for all of them."""
        if isinstance(self.tools, str):
            return None if self.tools == "all" else ()
        return self.tools

    @property
    def source(self) -> tuple[str, str | None]:
        """What the model is loaded from; agents with the same source share it."""
        return self.model, self.revision


class ProtocolConfig(Section):
    """How messages enter the shared context, so that different models understand each other."""

    think: Literal["keep", "strip", "forbid"] = key(
        "keep", "Thinking in a message: shared as it is, hidden from the others, or hidden and counted as a violation."
    )
    tools: Literal["off", "canonical"] = key(
        "off",
        "canonical: tool calls of any dialect are rewritten to one JSON form before others see them; none is executed.",
    )
    system: Literal["explicit", "template"] = key(
        "explicit",
        "explicit: the system prompt is always sent, even if empty; template: a chat template may supply its own.",
    )


_ROUTER: KeyPath = ("team", "router")
_KEYS_OF_ROUTERS: tuple[KeyPath, ...] = tuple((*_ROUTER, k) for k in ("kind", "order", "rounds", "then", "turns"))


class RouterConfig(Section):
    """Who speaks when."""

    kind: RouterKind = key(
        "schedule", f"The router: {', '.join(ROUTERS)}, or your own class, python:FILE.py:CLASS; see docs/teams.md."
    )
    rounds: Rounds = key(1, "Number of rounds, each in the speaking order; or a list with the order of every round.")
    order: Names | None = unset("Names in speaking order; default: the agents as listed.")
    then: Names | None = unset("Who speaks in a final round; without order, all others speak before it.")
    turns: Positive | None = unset("Required for addressed: most messages before those of then.")
    options: dict[str, Any] = key({}, "Arguments of your own class, in addition to the agents.")

    @property
    def is_own(self) -> bool:
        return self.kind.startswith(OWN)

    @property
    def given(self) -> dict[str, Any]:
        """The router's settings in the file that differ from the defaults."""
        fields = type(self).model_fields
        said = {name: getattr(self, name) for name in fields if name not in ("kind", "options")}
        return {name: value for name, value in said.items() if value != fields[name].default}

    def made(self, agents: tuple[str, ...]) -> Router:
        """Create the library's router. Raises TypeError or ValueError if its settings are invalid."""
        return ROUTERS[self.kind](agents, **self.given, **self.options)

    def anchored(self, anchor: Anchor) -> Self:
        if not self.is_own:
            return self
        file, _, attribute = self.kind.removeprefix(OWN).rpartition(":")
        return self.model_copy(update={"kind": f"{OWN}{anchor.path(file)}:{attribute}"})

    def names(self) -> Iterator[tuple[KeyPath, str]]:
        """Yield every agent name in this section, with its path."""
        orders: dict[KeyPath, Any] = {("order",): self.order or (), ("then",): self.then or ()}
        if not isinstance(self.rounds, int):
            orders |= {("rounds", round): order for round, order in enumerate(self.rounds)}
        for path, order in orders.items():
            for i, name in enumerate(order):
                yield (*_ROUTER, *path, i), name

    def _refusals(self) -> Iterator[Refusal]:
        """Refuses keys that the chosen router does not accept, and reports missing ones that it needs."""
        taken = {} if self.is_own else keys_of(self.kind)
        kind: KeyPath = (*_ROUTER, "kind")
        for name in self.given:
            if name not in taken:
                remedy = "give it in team.router.options" if self.is_own else f"it takes {', '.join(taken)}"
                message = f"team.router.{name} is not a setting of router {show(self.kind)}; {remedy}"
                yield Refusal((*_ROUTER, name), message, (kind,), at_key=True)
        for name in self.options:
            if not self.is_own and (name not in taken or name in type(self).model_fields):
                message = f"team.router.options has no {show(name)} for router {show(self.kind)}"
                yield Refusal((*_ROUTER, "options", name), message, (kind,), at_key=True)
        for name, needed in taken.items():
            if needed and name not in {**self.given, **self.options}:
                message = f"team.router.kind is {show(self.kind)}, which needs team.router.{name}"
                yield Refusal(kind, message, (kind, (*_ROUTER, name)))


class TeamConfig(Section):
    """The agents and how they communicate."""

    model: NonEmpty | None = unset("Model of agents that have none of their own.")
    revision: NonEmpty | None = unset("For a hub id: the branch, tag or commit of that model.")
    system_prompt: str = key("", "System prompt of agents that have none of their own.")
    train: Train | None = unset("What agents train by default: full or lora.")
    lora: LoraConfig = key(LoraConfig(), "The default adapter.")
    max_tokens: Positive = key(16, "Default for the most tokens in one message.")
    agents: Annotated[tuple[AgentConfig, ...], Field(min_length=1)]
    router: RouterConfig = RouterConfig()
    answer: str = key("last", "Whose message is the team's answer: last, majority or an agent.")
    protocol: ProtocolConfig = ProtocolConfig()
    history: Literal["transcript", "chat"] = key(
        "transcript", "The conversation so far: as lines of one user message (transcript), or as chat messages (chat)."
    )
    template_kwargs: dict[str, Any] = key({}, "Passed to the chat template, such as enable_thinking: false.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(agent.name for agent in self.agents)

    @property
    def known_router(self) -> Router | None:
        """The router; None for a user-defined one, whose behavior only its code determines, or if the settings are
        invalid."""
        try:
            return None if self.router.is_own else self.router.made(self.names)
        except (TypeError, ValueError):  # reported by _refusals
            return None

    @property
    def speaking_order(self) -> tuple[str, ...]:
        """The agents that speak, in order if the router has one; all agents for a user-defined router."""
        router = self.known_router
        return self.names if router is None else speakers_of(router, self.names)

    @property
    def closing(self) -> tuple[str, ...]:
        """The agents that may speak last; all agents for a user-defined router."""
        router = self.known_router
        return self.names if router is None else closers_of(router, self.names)

    @property
    def rounds(self) -> int | None:
        """Maximum rounds of an episode; None for a user-defined router."""
        router = self.known_router
        return None if router is None else router.rounds

    def anchored(self, anchor: Anchor) -> Self:
        """The section with absolute paths."""
        agents = [
            agent.model_copy(update={"model": anchor.model(agent.model), "lora": agent.lora.anchored(anchor)})
            for agent in self.agents
        ]
        changes = {
            "model": anchor.model(self.model),
            "lora": self.lora.anchored(anchor),
            "agents": tuple(agents),
            "router": self.router.anchored(anchor),
        }
        return self.model_copy(update=changes)

    def _settle(self) -> None:
        """Fill in each agent's missing settings from the team."""
        object.__setattr__(self, "agents", tuple(map(self._settled, self.agents)))

    def _settled(self, agent: AgentConfig) -> AgentConfig:
        model = agent.model or self.model
        own_lora = agent.lora.model_dump(exclude_unset=True, exclude_none=True) if agent.lora else {}
        train = agent.train or self.train or ("full" if model in BUILT_IN_MODELS else "lora")
        if train == "full":  # the team's ``start`` is for adapters only
            own_lora.setdefault("start", None)
        return agent.model_copy(
            update={
                "model": model,
                "revision": agent.revision or (self.revision if agent.model is None else None),
                "system_prompt": self.system_prompt if agent.system_prompt is None else agent.system_prompt,
                "train": train,
                "lora": self.lora.model_copy(update=own_lora),
                "max_tokens": agent.max_tokens or self.max_tokens,
            }
        )

    def _refusals(self) -> Iterator[Refusal]:
        if self.revision is not None and self.model is None:
            message = "team.revision is of team.model, which is not given: give each agent its own revision"
            yield Refusal(("team", "revision"), message, (("team", "model"),), at_key=True, idle=True)
        for i, agent in enumerate(self.agents):
            here = ("team", "agents", i)
            if agent.name in self.names[:i]:
                yield Refusal((*here, "name"), f'two agents are called "{agent.name}"; names must differ')
            if agent.model is None:
                message = f'agent "{agent.name}" has no model; give it one, or set team.model for all'
                yield Refusal(here, message, (("team", "model"), (*here, "model")))
            if agent.model in BUILT_IN_MODELS and agent.revision is not None:
                message = f'agent "{agent.name}" is {agent.model}, which has no revision; leave it out'
                yield Refusal(here, message, (("team", "revision"), (*here, "revision")))
            if agent.train == "full" and agent.lora.start is not None:
                message = f'agent "{agent.name}" trains all its weights and has no adapter to start; set train: lora'
                yield Refusal((*here, "lora", "start"), message, ((*here, "train"), (*here, "lora", "start")))
            elif agent.train == "full" and agent.lora != self.lora.model_copy(update={"start": None}):
                message = f'agent "{agent.name}" trains all its weights and has no adapter: '
                message += "set train: lora, or leave lora out"
                yield Refusal((*here, "lora"), message, ((*here, "train"), (*here, "lora")), at_key=True, idle=True)
            if agent.model == "tabular" and agent.train == "lora":
                yield Refusal(here, f'agent "{agent.name}" is tabular and cannot train lora; set train: full')
        yield from self._refusals_of_names()
        yield from self._refusals_of_router()

    def _refusals_of_names(self) -> Iterator[Refusal]:
        """Refuses names that are not agents, in the router, in ``sees`` and in ``answer``."""
        for path, name in self.router.names():
            if name not in self.names:
                where = f"team.router.{path[2]}"
                message = f"{where} names no agent {show(name)}{hint(name, self.names, 'the agents are')}"
                yield Refusal(path, message)
        for i, agent in enumerate(self.agents):
            for name in visibility(agent.sees).names:
                if name not in self.names:
                    where = f"team.agents.{agent.name}.sees"
                    message = f"{where} names no agent {show(name)}{hint(name, self.names, 'the agents are')}"
                    yield Refusal(("team", "agents", i, "sees"), message)
        if self.answer not in (*ANSWER_WORDS, *self.names):
            near = hint(self.answer, (*ANSWER_WORDS, *self.names), "one of")
            message = f"team.answer must be last, majority or an agent, got {show(self.answer)}{near}"
            yield Refusal(("team", "answer"), message)

    def _refusals_of_router(self) -> Iterator[Refusal]:
        """Refuses agents that should speak but never do, and rounds in ``sees`` that do not exist."""
        if self.router.is_own or any(True for _ in self.router._refusals()):  # the section reports these itself
            return
        try:
            router = self.router.made(self.names)
        except (TypeError, ValueError) as error:
            yield Refusal(_ROUTER, f"team.router {error}", _KEYS_OF_ROUTERS)
            return
        if self.answer in self.names and not router.turns_of(self.answer):
            message = f'team.answer names "{self.answer}", who never speaks in team.router'
            yield Refusal(("team", "answer"), message, (("team", "answer"), *_KEYS_OF_ROUTERS))
        # ``order`` alone may leave agents out, as it always could. With rounds listed one by one, or with ``then``, an
        # agent that never speaks is taken for a mistake.
        planned = self.router.then is not None or not isinstance(self.router.rounds, int)
        for i, agent in enumerate(self.agents):
            here: KeyPath = ("team", "agents", i)
            if planned and not agent.frozen and agent.name != self.answer and not router.turns_of(agent.name):
                message = f'agent "{agent.name}" never speaks in team.router; name it there, or set frozen: true'
                yield Refusal(here, message, _KEYS_OF_ROUTERS)
            late = [round for round in visibility(agent.sees).rounds if round >= router.rounds]
            if late:
                rounds = f"0 to {router.rounds - 1}" if router.rounds > 1 else "0"
                message = f"team.agents.{agent.name}.sees names round {late[0]}, but the rounds are {rounds}"
                yield Refusal((*here, "sees"), message, ((*here, "sees"), *_KEYS_OF_ROUTERS))
