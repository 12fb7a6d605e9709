"""The data types of rollouts, all frozen: problems, messages, turns, verdicts and episodes; and the axis letters.

Axis letters, used as suffixes of array names everywhere:

    P  problems in a batch          G  episodes of one problem (its group)
    E  episodes, E = P * G, problem-major: episode e is member e % G of problem e // G
    M  messages of one agent        T  token positions of a message, padded to the longest
    U  turns of all agents in a batch, in the order of episodes and turns
    N  real tokens, packed          V  vocabulary

Flow: problems -> episodes (here) -> RolloutBatch (``batches.py``) -> advantages -> AgentBatch -> update
(requests to engines: ``answers.py``) -> UpdateReport -> new team.
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
"""Name of the model outside the team that plays the other roles of an interactive task. No agent can have it."""

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

VerdictKind = Literal["right", "wrong", "unparsed", "timeout", "crash"]
Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Message:
    """The text of one turn as the team sees it."""

    author: str
    text: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Problem:
    """One problem. ``private[name]`` is shown only to the agent ``name``."""

    id: str
    prompt: str
    answer: Any = None
    private: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One reply of the environment of an interactive task: part of the shared context, never trained on.

    ``messages`` may be empty. If ``ends`` is set, the episode is over and the act it replies to is the team's answer.
    """

    messages: tuple[Message, ...] = ()
    ends: bool = False


@dataclass(frozen=True)
class Situation:
    """The input of an environment's reply: the whole state, so that a reply depends on nothing else.

    ``acts[k]`` is the team's answer of round k; ``replies[k]`` preceded it, the first one before any agent spoke.
    ``rounds_left`` counts the rounds that the environment will still reply to; with 0 the next round is the final
    answer. ``calls`` are all earlier tool calls of all agents, in order.
    """

    problem: Problem
    acts: tuple[str, ...]
    replies: tuple[Reply, ...]
    rounds_left: int
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolRequest:
    """The calls of one message, and all that their results may depend on: the problem, the calling agent, and all
    earlier calls of the episode in order, from which stateful tools can rebuild their state."""

    problem: Problem
    agent: str
    past: tuple[ToolCall, ...]
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Event:
    """One event between a team and the environment of an interactive task.

    ``by`` the environment or the team: ``text`` is its message to the other. ``by`` a tool: an agent made ``call``, and
    ``text`` is the result.
    """

    by: Literal["environment", "team", "tool"]
    text: str
    call: ToolCall | None = None


@dataclass(frozen=True)
class Breakdown:
    """The composition of a reward: ``shared`` belongs to no single agent, ``by_agent`` to single agents and ``by_turn``
    to single turns (one value per turn, or empty). Their sum is the reward. ``parts`` is the same sum split by reward
    function, weights included."""

    shared: float = 0.0
    by_agent: Mapping[str, float] = field(default_factory=dict)
    by_turn: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_personal(self) -> bool:
        """Whether any of the reward is attributed to agents or turns."""
        return bool(self.by_agent) or bool(self.by_turn)

    @property
    def reward(self) -> float:
        return math.fsum((self.unplaced, *self.by_turn))

    @property
    def unplaced(self) -> float:
        """The reward that belongs to no turn. Its sum does not depend on the order of agents, which no file keeps."""
        return math.fsum((self.shared, *self.by_agent.values()))


@dataclass(frozen=True)
class Verdict:
    """A grader's verdict. ``right`` is success; ``reward`` is the whole team's reward for training, which may include
    partial credit. ``breakdown`` is its composition; None if the reward is a single number."""

    kind: VerdictKind
    reward: float
    extracted: str | None = None
    breakdown: Breakdown | None = None

    @property
    def right(self) -> bool:
        return self.kind == "right"

    @property
    def failed(self) -> bool:
        """Whether the grader timed out or crashed."""
        return self.kind in ("timeout", "crash")


@dataclass(frozen=True)
class Turn:
    """One agent's message: its prompt tokens and its sampled tokens, with the end token if it stopped.

    ``results``: the results of its tool calls, in the order of the calls; never trained on.
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
    """One problem played to the end by the team. ``replies[k]`` is the environment's reply before round k; empty
    without an environment. ``without[name]`` is the verdict if this agent had said nothing and all others the same;
    computed only with ``credit: difference``. ``crossed[name][k]`` is the return of this agent's messages combined with
    the others' messages of episode k of the group; computed only with ``credit: crossed``."""

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
    """All messages in order: the environment's k-th reply precedes the turns of round k, and the results of tools
    directly follow the message that called them."""
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
    """A message as passed to a grader: ``assistant`` is an agent of the team, ``user`` the environment, ``tool`` the
    result of a call."""

    role: Role
    name: str
    content: str


class Transcript(tuple[str, ...]):
    """The texts of all agents' messages in an episode, in order, as passed to graders, with their speakers.

    ``speakers`` are the agents, one for each text; ``spoken`` is the whole conversation, including messages of the
    environment and of tools.
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
    """The state that an agent carries from one update to the next, besides weights and optimizer moments."""

    beta: float
    step_scale: float
    radius_nats: float
    """Per message or per token, as the plan's ``Radii`` says."""
    updates: int = 0


def common_beginning(a: Ids, b: Ids) -> int:
    """The length of the common prefix of two rows of ids."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
