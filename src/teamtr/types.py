"""The records that flow through TeamTR, frozen.

Axis letters, used as suffixes of array names everywhere:

    P  problems in a batch          G  episodes of one problem (its group)
    E  episodes, E = P * G, problem-major: episode e is member e % G of problem e // G
    M  messages of one agent        T  token positions of a message, padded to the longest
    U  turns of a batch, of all agents, in the order of episodes and turns
    N  real tokens, packed          V  vocabulary

Flow: problems -> episodes -> RolloutBatch -> advantages -> AgentBatch -> update -> UpdateReport -> new team.

A worked example, two agents, one problem, G = 2::

    batch = RolloutBatch(problems=(p,), episodes=(e0, e1), group_size=2)
    batch.returns_PG(gamma=1.0)            # array([[1., 0.]])
    batch.of("left")                       # AgentBatch of two messages, episode_M == [0, 1]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    only plans that credit differences ask for it."""

    problem_id: str
    group_index: int
    turns: tuple[Turn, ...]
    answer: str
    verdict: Verdict
    team_version: str
    replies: tuple[Reply, ...] = ()
    without: Mapping[str, Verdict] = field(default_factory=dict)

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
class AgentBatch:
    """The messages of one agent in a batch of episodes.

    ``prompts[m]`` and ``messages[m]`` are token ids of any length; padding, if any, is the engine's affair.
    ``episode_M``, ``problem_M`` and ``turn_M`` say where each message came from; ``cluster_M`` is equal for messages
    of one problem also when it stands in the batch more than once (by default ``problem_M``). ``cut_M`` marks messages
    that ended at the token limit (by default none).
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

    @property
    def lengths_M(self) -> NDArray[np.int64]:
        return np.array([len(m) for m in self.messages], dtype=np.int64)

    def rows(self, index: Sequence[int] | NDArray[np.int64]) -> AgentBatch:
        """The messages at these positions, in this order."""
        return AgentBatch(
            agent=self.agent,
            prompts=tuple(self.prompts[i] for i in index),
            messages=tuple(self.messages[i] for i in index),
            sampler_logprobs=tuple(self.sampler_logprobs[i] for i in index),
            episode_M=self.episode_M[index],
            problem_M=self.problem_M[index],
            turn_M=self.turn_M[index],
            cluster_M=self.cluster_M[index],
            cut_M=self.cut_M[index],
        )


@dataclass(frozen=True)
class Verified:
    """How much of each message may stand as the updated agent's own (``theory.verification``).

    ``kept_M`` counts the tokens that stay; where that is less than the whole message, ``next_M`` is the token that
    follows them (-1 elsewhere) and the rest is drawn anew.
    """

    kept_M: NDArray[np.int64]
    next_M: NDArray[np.int64]


@dataclass(frozen=True)
class Carried:
    """How far a team has moved from what it wrote, turn by turn.

    ``log_ratio_U`` is the log-probability of each turn's message under the team ``team_version``, less that under the
    weights that wrote it. ``kept_U`` and ``next_U`` are what ``Verified`` says of them, where a plan asks for it; a
    turn whose agent was not updated is kept whole, which -1 says.
    """

    team_version: str
    log_ratio_U: Floats
    kept_U: NDArray[np.int64] | None = None
    next_U: NDArray[np.int64] | None = None


def discounted(verdict: Verdict, turns: int, gamma: float) -> float:
    """The return of an episode of so many turns: the rewards of turns come with them, all else with the last one."""
    last = gamma ** max(turns - 1, 0)
    made = verdict.breakdown
    if made is None or not made.by_turn:
        return verdict.reward * last
    early = sum(reward * gamma**t for t, reward in enumerate(made.by_turn))
    return early + made.unplaced * last


@dataclass(frozen=True)
class RolloutBatch:
    """Episodes of P problems x G, problem-major.

    ``carried`` says how far the team has moved since; None when nobody was updated since it was written.
    ``redrawn``: parts of it were kept from episodes that earlier updates learned from (``rollout.redraw``). The last
    ``past`` problems are those of an earlier stage, drawn again (``joined``).
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
        """Discounted return of each episode; what no turn earned arrives with the last one."""
        flat = [discounted(e.verdict, len(e.turns), gamma) for e in self.episodes]
        return np.array(flat, dtype=np.float64).reshape(len(self.problems), self.group_size)

    def discounts_PG(self, gamma: float) -> Floats:
        """Of what arrives with each episode's last turn."""
        flat = [gamma ** max(len(e.turns) - 1, 0) for e in self.episodes]
        return np.array(flat, dtype=np.float64).reshape(len(self.problems), self.group_size)

    @property
    def present(self) -> tuple[Episode, ...]:
        """The episodes that are not of an earlier stage."""
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
        """With episodes of an earlier stage behind these, which the present team wrote."""
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
    def first_U(self) -> NDArray[np.int64]:
        """Where each episode's turns begin among all turns; one more entry says how many there are."""
        return np.concatenate([[0], np.cumsum([len(episode.turns) for episode in self.episodes])]).astype(np.int64)

    def place_M(self, own: AgentBatch) -> NDArray[np.int64]:
        """Where these messages stand among all turns."""
        return np.asarray(self.first_U[own.episode_M] + own.turn_M)

    @property
    def log_weights_E(self) -> Floats | None:
        """Trajectory log-weights from the team that wrote the episodes to the present one (app:exp:isdeg)."""
        if self.carried is None:
            return None
        before_U = np.concatenate([[0.0], np.cumsum(self.carried.log_ratio_U)])
        return np.asarray(np.diff(before_U[self.first_U]))

    def log_weights_before_M(self, own: AgentBatch) -> Floats | None:
        """The same of what came before each of these messages: what its context weighs."""
        if self.carried is None:
            return None
        before_U = np.concatenate([[0.0], np.cumsum(self.carried.log_ratio_U)])
        return np.asarray(before_U[self.place_M(own)] - before_U[self.first_U[own.episode_M]])

    def after(
        self, own: AgentBatch, log_ratio_M: Floats, team_version: str, verified: Verified | None = None
    ) -> RolloutBatch:
        """The same episodes after an update of the agent of these messages, which made the team ``team_version``."""
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
        first: dict[str, int] = {}
        cluster_P = [first.setdefault(problem.id, p) for p, problem in enumerate(self.problems)]
        return AgentBatch(
            agent=agent,
            prompts=tuple(turn.context_ids for _, _, turn in found),
            messages=tuple(turn.token_ids for _, _, turn in found),
            sampler_logprobs=tuple(turn.sampler_logprobs for _, _, turn in found),
            episode_M=np.array([e for e, _, _ in found], dtype=np.int64),
            problem_M=np.array([e // self.group_size for e, _, _ in found], dtype=np.int64),
            turn_M=np.array([t for _, t, _ in found], dtype=np.int64),
            cluster_M=np.array([cluster_P[e // self.group_size] for e, _, _ in found], dtype=np.int64),
            cut_M=np.array([turn.finish == "length" for _, _, turn in found], dtype=np.bool_),
        )


@dataclass(frozen=True)
class Decoding:
    """How tokens are drawn. Without a temperature, at the agent's training temperature; 0 is greedy."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0


AS_TRAINED = Decoding()


@dataclass(frozen=True)
class Sample:
    """What a sampler returns for one prompt. ``version`` names the weights that wrote it."""

    token_ids: Ids
    logprobs: NDArray[np.float32]
    finish: Finish
    version: str = ""


@dataclass(frozen=True)
class Wanted:
    """One message that a sampler is asked for: of at most as many tokens as there are numbers in ``noise_T``."""

    agent: str
    prompt: Ids
    noise_T: Floats
    decoding: Decoding = AS_TRAINED


@dataclass(frozen=True)
class Ended:
    """A message of a stream that is whole. ``row`` counts the messages that the stream was asked for, from 0."""

    row: int
    sample: Sample


@dataclass(frozen=True)
class AgentInfo:
    """What an engine says of one of its models.

    ``precision`` is the arithmetic of scoring and training; ``precisions`` are this one and all finer ones that
    ``set_precision`` takes, in order. ``sampling`` says in a few words how messages are sampled. ``end_ids`` end a
    message. ``reference_version`` names the policy that a reference KL is taken to; None without one.
    ``config_version`` names what is computed besides the weights, ``base_version`` the frozen weights under an adapter.
    ``trained_parameters`` counts the policy's own, without a critic's, and ``parameters`` those of its model, without
    adapters. ``samples_from_a_copy``: messages are sampled from a copy of the weights, and not from those that are
    trained. ``positions``: most tokens of a prompt and its message; None where nobody knows of a limit. ``batch``: the
    same for agents that are sampled in one batch; empty where each has batches of its own.
    """

    precision: str
    precisions: tuple[str, ...]
    sampling: str
    end_ids: frozenset[int]
    samples_from_a_copy: bool = False
    device: str = "cpu"
    reference_version: str | None = None
    config_version: str = ""
    base_version: str = ""
    trained_parameters: int = 0
    positions: int | None = None
    parameters: int = 0
    batch: str = ""


@dataclass(frozen=True)
class TokenShift:
    """What an update did to the tokens of each rank before it, averaged over positions (fig:logit-vocab).

    Entry r belongs to the token that was the (r+1)-th most likely; the last entry is all other tokens together.
    """

    before_R: Floats
    """Probability before the update."""
    after_R: Floats
    """Probability of the same token after it."""
    moved_R: Floats
    """Mean absolute change of the log-probability; of the others' total in the last entry."""
    flipped: float
    """Share of positions whose most likely token changed."""
    positions: int


@dataclass(frozen=True)
class Divergence:
    """Per-message distances from the policy before an update (cur) to the one after (new), in nats per message.

    ``full_M`` is exact given the prefixes (app:impl); ``k1_M`` is the paper's estimate (eq:emp_tok_kl);
    ``k3_M`` its non-negative variant; ``log_ratio_M`` is log new(m) - log cur(m), so ``k1_M == -log_ratio_M``.
    ``reference_M`` estimates KL(new || reference) by the same variant, where the batch was scored under the reference.
    """

    full_M: Floats
    k1_M: Floats
    k3_M: Floats
    log_ratio_M: Floats
    reference_M: Floats | None = None

    def finite(self) -> bool:
        return bool(np.isfinite(self.full_M).all() and np.isfinite(self.log_ratio_M).all())


@dataclass(frozen=True)
class StepStats:
    """One optimizer step. ``applied`` is False when a non-finite loss or gradient was thrown away. ``kl_reference`` is
    the mean that ``Objective.reference_kl`` weighs, None without a reference."""

    applied: bool
    surrogate: float
    kl_full: float
    grad_norm: float
    ratio_clip_rate: float
    kl_reference: float | None = None


@dataclass(frozen=True)
class ValueStats:
    """One step of a critic: its mean loss over tokens before the step, and the share of tokens whose value had moved by
    more than the clip range. ``applied`` is False when a non-finite loss or gradient was thrown away."""

    applied: bool
    loss: float
    clip_rate: float


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
