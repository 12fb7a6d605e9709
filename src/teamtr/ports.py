"""The Protocols between the training loop and its engines, tasks, environments and tools.

The loop, the advantages and the gate are on one side, the weights on the other. Only ids, numbers and names cross.
Every implementation passes the same suite in ``tests/contract``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NewType, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from teamtr.answers import (
    AS_TRAINED,
    AgentInfo,
    Decoding,
    Divergence,
    Ended,
    Sample,
    StepStats,
    TokenShift,
    ValueStats,
    Wanted,
)
from teamtr.batches import AgentBatch, Verified
from teamtr.calls import Schema
from teamtr.errors import TeamTRError
from teamtr.theory.objective import Objective
from teamtr.types import Event, Floats, Ids, Problem, Reply, Situation, ToolRequest, Verdict

GB = 2**30

Snapshot = NewType("Snapshot", object)
"""An engine's opaque handle to a saved state of a learner, to be restored later."""


Heard = Callable[[int, Sample], None]
"""Callback for a finished message while others are still being sampled: its row, and the message."""


def unheard(row: int, sample: Sample) -> None:
    """The default ``Heard``: does nothing."""


Follow = Callable[[int, int, Ids], bool]
"""Callback for tokens while their message is still being sampled: its row, the number of its earlier tokens, and the
new tokens. Returns whether to continue the row."""


def unfollowed(row: int, before: int, token_ids: Ids) -> bool:
    """The default ``Follow``: continues every row."""
    return True


More = Callable[[Sequence[Ended]], Sequence[Wanted]]
"""Callback of a stream: receives the messages finished since its last call, if any; returns the next requests."""


class EngineLost(TeamTRError):
    """Part of an engine is lost, with all work since the last commit: rebuild it and resume from that commit."""


@runtime_checkable
class Batches(Protocol):
    """The part of a sampler that samples one batch of one agent at a time."""

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
        """Samples one message per prompt, of at most as many tokens as the noise has columns. A row that is NaN from
        some column on needs no more tokens, and no room for them; it may get more.

        The tokens of row b depend only on its prompt and on row b of ``noise_BT`` (uniform in [0, 1)), so splitting a
        batch over workers does not change them. Log-probabilities are those of the distribution that was actually
        sampled from, end token included. Every sample names the weights that wrote it.

        ``heard`` is called with every finished message, as soon as the engine has it, in any order, in the caller's
        thread. If rows have to be sampled again, it is called again: only the returned messages count.

        ``follow`` is called with every token of a row, in order, before ``heard``, as soon as the engine has the
        tokens: one by one, a few at a time, or the whole message at once. If it returns False, the row may end there,
        with the finish "length".
        """
        ...


@runtime_checkable
class Sampler(Batches, Protocol):
    """Samples messages for any agent of the team."""

    def version(self, agent: str) -> str:
        """A hash of the weights that would write the next message of this agent."""
        ...

    def stream(self, more: More, *, heard: Heard = unheard, follow: Follow = unfollowed) -> None:
        """Samples messages of any agents, accepting new requests while others are running, until there are no more.

        ``more`` is called first of all, then whenever messages are finished, and possibly in between; always in the
        caller's thread. Messages passed to it are final. The rows that it returns are numbered consecutively. The
        stream ends when no row is open and ``more`` returns nothing. ``more`` must not call the sampler.

        A row's tokens depend only on its prompt, its noise and its agent's weights, as in ``sample``. Which rows are
        computed together depends on requests and messages, never on a clock: the same requests give the same bits, as
        far as ``sample`` does.

        ``heard`` and ``follow`` are as in ``sample``; a message that is passed to ``more`` at once need not be passed
        to ``heard``.
        """
        ...


class SetAside(Protocol):
    """The stored part of a learner's state, as it was when set aside."""

    def fingerprint(self) -> str: ...

    def save(self, folder: Path) -> None: ...


@runtime_checkable
class Learner(Protocol):
    """Trains one agent. ``begin`` freezes the current policy on a batch; all later measurements refer to it."""

    agent: str

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens processed without and with a gradient since the start: {"scored": n, "trained": n}."""
        ...

    def version(self) -> str:
        """A hash of the weights."""
        ...

    def fingerprint(self) -> str:
        """A hash of everything that ``save`` writes: weights, optimizer state, and the critic if there is one."""
        ...

    def begin(self, batch: AgentBatch, *, reference: bool = False, from_sampler: bool = False) -> Floats:
        """Freeze the policy on this batch; returns log p(message) under it, one per message.

        ``reference``: also score the batch under the policy that the learner began with, which steps with
        ``objective.reference_kl`` need. Weights end bit-identical.

        ``from_sampler``: use the features that sampling kept (``Engine.keep_scores``) as the frozen policy where they
        come from the learner's current weights, and compute the rest.
        """
        ...

    @property
    def sampler_scored(self) -> int:
        """The number of messages for which the last ``begin`` used what the sampler had kept."""
        ...

    def token_logprobs(self) -> list[Floats]:
        """Token log-probabilities of the frozen policy, per message."""
        ...

    def step(
        self,
        rows: NDArray[np.int64],
        advantages: Floats | Sequence[Floats],
        objective: Objective,
        *,
        beta: float,
        learning_rate: float,
    ) -> StepStats:
        """One optimizer step on these rows of the batch: maximize surrogate - beta * KL(old || new) -
        objective.reference_kl * KL(new || reference). Never applies a non-finite loss or gradient.

        ``advantages``: an array with one number per row, or a list with an array per row, one number per token.
        """
        ...

    def values(self) -> list[Floats]:
        """The critic's value before each token of the batch under the frozen policy, per message; raises without a
        critic."""
        ...

    def fit_values(
        self, rows: NDArray[np.int64], targets: Sequence[Floats], *, clip: float, learning_rate: float
    ) -> ValueStats:
        """One optimizer step of the critic on these rows, towards one target per token. A value that is ``clip`` away
        from that of ``values()`` is not moved further. The policy stays bit-identical; raises without a critic."""
        ...

    def measure(self, rows: NDArray[np.int64] | None = None) -> Divergence:
        """The divergence from the frozen policy to the current one, on these rows (None: all)."""
        ...

    def verify(self, noise_N: Floats, noise_M: Floats) -> Verified:
        """How much of each message of the batch may be kept as a sample of the current policy
        (``theory.verification``). The noise is one number in [0, 1) per token and one per message."""
        ...

    def token_kls(self) -> list[Floats]:
        """The exact KL from the frozen policy to the current one at each token's position, per message."""
        ...

    def token_shift(self) -> TokenShift:
        """The change since ``begin`` of the tokens of each rank, over all positions of its batch."""
        ...

    def end(self) -> None:
        """Discard the frozen policy and free its memory."""
        ...

    def snapshot(self) -> Snapshot:
        """Weights and optimizer state, of the critic too, to be restored bit for bit."""
        ...

    def restore(self, snapshot: Snapshot) -> None: ...

    def move(self, start: Snapshot, end: Snapshot, fraction: float) -> None:
        """Set the weights to start + fraction * (end - start), keeping the current optimizer state and critic."""
        ...

    def perturb(self, relative: float, seed: int) -> None:
        """Add noise of this relative size to the trainable weights (to measure the noise floor of scoring)."""
        ...

    def save(self, folder: Path) -> None:
        """Write the weights in Hugging Face format, next to the optimizer state and the critic; no pickle."""
        ...

    def set_aside(self) -> SetAside | None:
        """The current state, on which another thread can call ``fingerprint`` and ``save`` while the engine samples,
        with the results that they would have now. Valid until the next ``begin`` of this learner, and to be released
        before. None if the engine handles one call at a time."""
        ...

    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Lengths:
    """The maximum tokens of one agent's prompt and message, and the length of the prefix that its prompts share."""

    prompt: int
    message: int
    shared: int = 0

    @property
    def whole(self) -> int:
        return self.prompt + self.message

    def distinct(self, rows: int) -> int:
        """Tokens of this many rows, with the shared prefix counted once."""
        return self.shared + rows * (self.whole - self.shared)


@dataclass(frozen=True)
class Demand:
    """The largest load that a run puts on an engine at once.

    ``episodes`` are played together. ``messages`` is the number of messages that an update is trained on, ``checked``
    the number that the check before the run scores, both by trainable agent. An update's messages belong to
    ``problems`` problems; a step takes one of ``minibatches`` parts of them.
    """

    lengths: Mapping[str, Lengths]
    episodes: int
    problems: int
    messages: Mapping[str, int]
    checked: Mapping[str, int]
    minibatches: int
    objective: Objective
    sampled_elsewhere: frozenset[str] = frozenset()
    """Agents whose messages are not sampled by this engine."""

    def of(self, agents: Collection[str]) -> Demand:
        """The part of the demand that concerns these agents."""

        def own(by_agent: Mapping[str, Any]) -> dict[str, Any]:
            return {agent: value for agent, value in by_agent.items() if agent in agents}

        return replace(self, lengths=own(self.lengths), messages=own(self.messages), checked=own(self.checked))

    def of_worker(self, shards: int, workers: int) -> Demand:
        """The largest demand on one of ``workers`` workers among which the shards are distributed.

        A worker samples its shards one after the other and keeps the messages of all of them; all messages of a problem
        are in one shard. A step is drawn from the whole update, so one worker may hold all of its rows. ``checked`` is
        not divided.
        """
        problems = min(self.problems, -(-shards // workers) * -(-self.problems // shards))
        messages = {name: -(-count * problems // self.problems) for name, count in self.messages.items()}
        fewest = [
            _most_parts(own, -(-self.messages[name] // self.minibatches)) for name, own in messages.items() if own
        ]
        return replace(
            self,
            episodes=-(-self.episodes // shards),
            problems=problems,
            messages=messages,
            minibatches=min([self.minibatches, *fewest]),
        )


def _most_parts(rows: int, size: int) -> int:
    """The largest number of parts into which rows can be split if the largest part must have ``size`` rows, or all rows
    if there are fewer."""
    size = min(rows, size)
    return rows if size <= 1 else -(-rows // (size - 1)) - 1


@dataclass(frozen=True)
class MemoryItem:
    """One item of memory use."""

    what: str
    bytes: int
    why: str = ""

    @property
    def gb(self) -> float:
        return self.bytes / GB


@dataclass(frozen=True)
class MemoryPlan:
    """The memory needed, and the memory available on the device (None on a CPU). ``where``: the group of workers that
    needs it, if there are several. ``servers``: the memory of servers that sample for the team; they take ``taken`` of
    it on the same device, and ``available`` is what they leave. ``lacking``: the reasons why some of them cannot start.
    ``recomputed``: agents whose activations are recomputed in the backward pass (``learner.recompute``)."""

    items: tuple[MemoryItem, ...]
    available: int | None
    where: str = ""
    servers: tuple[MemoryItem, ...] = ()
    taken: int = 0
    lacking: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return not self.lacking and (self.available is None or self.total <= self.available)

    @property
    def missing(self) -> int:
        """Bytes missing: negative if memory is left over, the whole total if the available memory is not known."""
        return self.total - (self.available or 0)

    def as_record(self) -> dict[str, Any]:
        return {
            "items": [{"what": i.what, "gb": i.gb, "why": i.why} for i in self.items],
            "total_gb": self.total / GB,
            "available_gb": None if self.available is None else self.available / GB,
            "fits": self.fits,
            "where": self.where,
            "servers": [{"what": i.what, "gb": i.gb, "why": i.why} for i in self.servers],
            "lacking": list(self.lacking),
            "recomputed": list(self.recomputed),
        }


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal: the micro-batch that fits, in messages by trainable agent, the peak memory in use
    (None if it is not counted), and the agents whose activations are recomputed."""

    micro_batch: Mapping[str, int]
    peak_bytes: int | None
    recomputed: tuple[str, ...] = ()


@runtime_checkable
class Engine(Sampler, Protocol):
    """The models of a team: samples for all agents, trains each of them, and predicts the memory needed.

    An engine may run in other processes: only arrays, numbers, names and the records of ``types`` and ``ports`` cross.
    """

    agents: tuple[str, ...]
    """Every model of the engine: the agents of the team, and models that play other roles."""

    def publish(self, agent: str, version: str) -> None:
        """From now on, sample this agent with the weights ``version``; raises if its learner does not hold them."""
        ...

    def keep_scores(self, agent: str | None) -> None:
        """From now on, keep the features that sampling computes for this agent's messages, for its next ``begin``, and
        discard earlier ones. None: keep nothing more. Publishing any weights discards everything that was kept, because
        a run resumed from a commit starts without kept features and must compute the same."""
        ...

    def learner(self, agent: str) -> Learner: ...

    def info(self, agent: str) -> AgentInfo: ...

    def set_precision(self, agent: str, precision: str) -> None:
        """From now on, score and train in this precision."""
        ...

    def memory_plan(self, demand: Demand) -> MemoryPlan:
        """The memory that this demand takes, predicted before anything runs."""
        ...

    def rehearse(self, demand: Demand) -> Rehearsal:
        """Allocate the peak memory of the demand once. This changes nothing but the micro-batch, which then fits, and
        the loss scale of agents that have taken no step."""
        ...

    def peak_bytes(self) -> int | None:
        """The peak memory in use since the last rehearsal; None if it is not counted."""
        ...

    def close(self) -> None:
        """Release external resources. The engine must not be used afterwards."""
        ...


class Distiller(Learner, Protocol):
    """A learner whose divergences are measured from another model, the teacher, instead of its own frozen policy
    (app:align)."""

    def use_probes(self, old: AgentBatch, new: AgentBatch, *, exact: bool) -> None:
        """From now on, measure from the teacher on these messages: ``old`` as tokenized for the teacher, ``new`` for
        the student. Without ``exact`` the two tokenize differently, and the teacher's messages are taken as certain."""
        ...

    def teacher_logprobs(self, batch: AgentBatch) -> Floats:
        """log p(message) under the teacher."""
        ...


class Codec(Protocol):
    """One agent's chat template and tokenizer: encodes the shared context to token ids and decodes messages."""

    def encode(self, messages: Sequence[dict[str, str]], tools: Sequence[Schema] = ()) -> Ids:
        """Prompt ids; ``tools`` are those declared in the prompt."""
        ...

    def encode_message(self, text: str) -> Ids: ...

    def decode(self, token_ids: Ids) -> str: ...


class Environment(Protocol):
    """The other side of an interactive task. It is stateless: a reply depends only on the situation and the seed."""

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        """One reply per situation, called before every round. All episodes of a tick come at once, so that a model that
        plays the other roles can sample one batch."""
        ...

    def speakers(self, problem: Problem) -> Sequence[str]:
        """Every author that a reply to this problem may have, so that no other message can pass for one of theirs."""
        ...


class Tools(Protocol):
    """The tools that agents can call. Stateless: results depend only on the request."""

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        """JSON schemas of the tools for this problem, with unique names."""
        ...

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        """One text for every call of every request, in order. All episodes of a tick come at once. No content of a call
        may raise: the result of a bad call is an error message."""
        ...


class Task(Protocol):
    """The interface of a task. ``teamtr.tasks.Task`` is the base class, with defaults for all but ``grade``."""

    @property
    def reward_range(self) -> float | None:
        """Largest minus smallest reward; None if not known."""
        ...

    @property
    def environment(self) -> Environment | None:
        """The other side of an interactive task."""
        ...

    @property
    def tools(self) -> Tools | None:
        """The task's own tools, if it has any."""
        ...

    @property
    def grades_early(self) -> bool:
        """Whether each verdict depends only on its own episode and ``grade`` may be called from another thread. If so,
        episodes are graded while others are still played."""
        ...

    @property
    def silence(self) -> str:
        """The text that replaces an agent's messages when a plan evaluates episodes without them."""
        ...

    @property
    def failures(self) -> Counter[str]:
        """The number of grader failures of each kind (crash, timeout)."""
        ...

    def problems(self, split: str) -> Sequence[Problem]: ...

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        """One verdict per (problem, the team's answer, the texts of all messages), for played episodes a
        ``Transcript``."""
        ...

    def outcome(self, problem: Problem, events: Sequence[Event]) -> str | None:
        """The text to grade in place of the team's answer, for tasks that grade a whole dialogue; None to grade the
        answer."""
        ...

    def extract(self, text: str) -> str | None:
        """The answer stated in a message, in a form suited to counting votes; None if it states none."""
        ...

    def labels(self, problem: Problem) -> dict[str, str]:
        """Labels by which result tables are broken down."""
        ...

    def measures(self, problem: Problem, reply: str) -> dict[str, float]:
        """Measures of a reply that are reported besides its verdict."""
        ...
