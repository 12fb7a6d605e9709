"""What is said: problems, messages, turns, verdicts and episodes, frozen; and the letters of axes.

Axis letters, used as suffixes of array names everywhere:

    P  problems in a batch          G  episodes of one problem (its group)
    E  episodes, E = P * G, problem-major: episode e is member e % G of problem e // G
    M  messages of one agent        T  token positions of a message, padded to the longest
    U  turns of a batch, of all agents, in the order of episodes and turns
    N  real tokens, packed          V  vocabulary

Flow: problems -> episodes (here) -> RolloutBatch (``batches.py``) -> advantages -> AgentBatch -> update
(asking engines: ``answers.py``) -> UpdateReport -> new team.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teamtr.calls import ToolCall

PLAYER = "the player"
"""The name of a model beside the team that plays the other roles of an interactive task: no agent can have it."""

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

VerdictKind = Literal["right", "wrong", "unparsed", "timeout", "crash"]
Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Message:
    """One turn's text as the team sees it."""

    author: str
    text: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Problem:
    """One problem. ``private[name]`` is shown to that agent alone."""

    id: str
    prompt: str
    answer: Any = None
    private: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What the environment of an interactive task said at one go: part of the shared context, never trained on.

    ``messages`` may be empty. With ``ends`` the episode is over, and the act it replies to is the team's answer.
    """

    messages: tuple[Message, ...] = ()
    ends: bool = False


@dataclass(frozen=True)
class Situation:
    """What an environment replies to: the whole state, so that a reply depends on nothing else.

    ``acts[k]`` is what the team said in round k (its answer of that round); ``replies[k]`` came before it, the first
    before anyone spoke. ``rounds_left`` counts the rounds that will still be replied to; with 0 the next round is the
    final answer. ``calls`` are all calls of tools that were made before, by whomever, in their order.
    """

    problem: Problem
    acts: tuple[str, ...]
    replies: tuple[Reply, ...]
    rounds_left: int
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolRequest:
    """The calls of one message, and all that their results may depend on: the problem, who calls, and every call that
    was made earlier in the episode, in order, so that a world which calls change can be rebuilt."""

    problem: Problem
    agent: str
    past: tuple[ToolCall, ...]
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Event:
    """One thing that happened between a team and the environment of an interactive task.

    ``by`` the environment or the team: it said ``text`` to the other. ``by`` a tool: an agent made ``call``, and the
    text is its result.
    """

    by: Literal["environment", "team", "tool"]
    text: str
    call: ToolCall | None = None


@dataclass(frozen=True)
class Breakdown:
    """What a reward is made of: ``shared``, which nobody earned alone, what single agents earned, and what single turns
    earned, one value for each turn or none at all. Their sum is the reward. ``parts`` is the same sum by reward
    function, each with its weight."""

    shared: float = 0.0
    by_agent: Mapping[str, float] = field(default_factory=dict)
    by_turn: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_personal(self) -> bool:
        """Whether it says who earned what."""
        return bool(self.by_agent) or bool(self.by_turn)

    @property
    def reward(self) -> float:
        return math.fsum((self.unplaced, *self.by_turn))

    @property
    def unplaced(self) -> float:
        """What no turn earned. The sum does not depend on the order of agents, which no file keeps."""
        return math.fsum((self.shared, *self.by_agent.values()))


@dataclass(frozen=True)
class Verdict:
    """What a grader said. ``right`` is success; ``reward`` is what training uses (it may give partial credit), the
    whole team's. ``breakdown``: what it is made of; None where it is one number and no more."""

    kind: VerdictKind
    reward: float
    extracted: str | None = None
    breakdown: Breakdown | None = None

    @property
    def right(self) -> bool:
        return self.kind == "right"

    @property
    def failed(self) -> bool:
        """Whether the grader was late or crashed."""
        return self.kind in ("timeout", "crash")


@dataclass(frozen=True)
class Turn:
    """One agent's message: the tokens it saw and the tokens it sampled, end token included when it stopped.

    ``results``: what tools replied to the calls in it, in their order; never trained on.
    """

    agent: str
    round: int
    context_ids: Ids
    token_ids: Ids
    sampler_logprobs: NDArray[np.float32]
    finish: Finish
    agent_version: str
    text: str
    results: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Episode:
    """One problem played to the end by the team. ``replies[k]`` is what the environment said before round k; without
    an environment there are none. ``without[name]`` is the verdict had this agent said nothing and all others the same;
    only plans that credit differences ask for it. ``crossed[name][k]`` is the return had this agent said what it said
    and all others what they said in episode k of the group; only plans that credit agents crosswise ask for it."""

    problem_id: str
    group_index: int
    turns: tuple[Turn, ...]
    answer: str
    verdict: Verdict
    team_version: str
    replies: tuple[Reply, ...] = ()
    without: Mapping[str, Verdict] = field(default_factory=dict)
    crossed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        return self.verdict.reward

    @property
    def messages(self) -> tuple[Message, ...]:
        return conversation(self.turns, self.replies)


def conversation(turns: Sequence[Turn], replies: Sequence[Reply]) -> tuple[Message, ...]:
    """Who said what, in order: the environment's k-th reply comes before the turns of round k, what tools replied to a
    message right behind it."""
    return tuple(message for _, message in _in_order(turns, replies))


Role = Literal["assistant", "user", "tool"]


def _in_order(turns: Sequence[Turn], replies: Sequence[Reply]) -> Iterator[tuple[Role, Message]]:
    heard = 0
    for turn in turns:
        for reply in replies[heard : turn.round + 1]:
            yield from (("user", message) for message in reply.messages)
        heard = max(heard, turn.round + 1)
        yield "assistant", Message(turn.agent, turn.text)
        yield from (("tool", message) for message in turn.results)
    for reply in replies[heard:]:
        yield from (("user", message) for message in reply.messages)


class Spoken(NamedTuple):
    """A message as a grader is shown it: ``assistant`` is an agent of the team, ``user`` the environment, ``tool`` the
    result of a call."""

    role: Role
    name: str
    content: str


class Transcript(tuple[str, ...]):
    """The texts of all that the agents said in an episode, in order, as graders are given them; and who said them.

    ``speakers`` are the agents, one for each text; ``spoken`` is the whole conversation, the environment's and tools'
    messages too.
    """

    spoken: tuple[Spoken, ...]

    def __new__(cls, turns: Sequence[Turn], replies: Sequence[Reply] = ()) -> Transcript:
        made = super().__new__(cls, (turn.text for turn in turns))
        made.spoken = tuple(Spoken(role, each.author, each.text) for role, each in _in_order(turns, replies))
        return made

    @property
    def speakers(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.spoken if each.role == "assistant")


@dataclass(frozen=True)
class AgentState:
    """How an agent's next update is steered: what it carries from one to the next besides weights and moments."""

    beta: float
    step_scale: float
    radius_nats: float
    """Per message or per token, as the plan's ``Radii`` says."""
    updates: int = 0


def common_beginning(a: Ids, b: Ids) -> int:
    """How many ids two rows begin with in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
