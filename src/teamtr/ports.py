"""The narrow Protocols between the loop and whoever computes.

The loop, the advantages and the gate live on one side; weights live on the other. Only ids, numbers and names
cross. Every implementation passes the one suite in ``tests/contract``.
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
"""A handle of an engine's own: what a learner was, to go back to. Nobody else looks inside."""


Heard = Callable[[int, Sample], None]
"""Told of a message while others are still sampled: its row, and the message."""


def unheard(row: int, sample: Sample) -> None:
    """Where nobody asks before all are sampled."""


Follow = Callable[[int, int, Ids], bool]
"""Told of tokens while their message is still sampled: its row, how many of its tokens came before, and the new ones.
Says whether the row is still wanted."""


def unfollowed(row: int, before: int, token_ids: Ids) -> bool:
    """Where nobody asks before a message is whole."""
    return True


More = Callable[[Sequence[Ended]], Sequence[Wanted]]
"""Told of the messages of a stream that are whole since it was last asked, none or several; gives those that it wants
next."""


class EngineLost(TeamTRError):
    """Part of an engine is gone, and with it all since the last commit: build it anew, and go on from that."""


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
        """One message per prompt, of at most as many tokens as the noise has columns.

        Row b's tokens depend on its prompt and on row b of ``noise_BT`` (uniform in [0, 1)) alone: a batch that is
        split over workers says the same.
        Log-probabilities are those of the distribution really sampled from, end token included. Every sample names
        the weights that wrote it.

        ``heard`` is told of every message as soon as the engine knows the whole of it, in any order, in the caller's
        thread. Should rows have to be sampled again, it is told again: what is returned counts.

        ``follow`` is told of every token of a row, in order, before the row is heard of, as soon and as many at a time
        as the engine knows them: by the token, every few tokens, or the whole message at once. A row that it does not
        want any more may end there, with the finish "length".
        """
        ...


@runtime_checkable
class Sampler(Batches, Protocol):
    """Samples messages for any agent of the team."""

    def version(self, agent: str) -> str:
        """A hash of the weights that would write the next message of this agent."""
        ...

    def stream(self, more: More, *, heard: Heard = unheard, follow: Follow = unfollowed) -> None:
        """Messages of any agents, new ones while others are still sampled, until nobody wants more.

        ``more`` is asked first of all, then whenever messages are whole, and may be asked in between; always in the
        caller's thread. What it is told is final. The rows that it gives are numbered on in their order. It ends when
        no row is open and nothing is given. Within ``more`` nothing else may be asked of the sampler.

        A row's tokens depend on its prompt, its noise and its agent's weights alone, as in ``sample``. Which rows are
        computed together depends on what was wanted and said, and never on a clock: a stream that is asked for the
        same again gives the same bits, as far as ``sample`` does.

        ``heard`` and ``follow`` are as in ``sample``; a stream need not tell ``heard`` what it tells ``more`` at once.
        """
        ...


class SetAside(Protocol):
    """A learner as it was, as far as it is stored."""

    def fingerprint(self) -> str: ...

    def save(self, folder: Path) -> None: ...


@runtime_checkable
class Learner(Protocol):
    """Trains one agent. ``begin`` freezes the current policy on a batch; all later measures refer to it."""

    agent: str

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens scored without and with a gradient since the start: {"scored": n, "trained": n}."""
        ...

    def version(self) -> str:
        """A hash of the weights."""
        ...

    def fingerprint(self) -> str:
        """A hash of everything that ``save`` writes: weights and optimizer, and the critic where there is one."""
        ...

    def begin(self, batch: AgentBatch, *, reference: bool = False, from_sampler: bool = False) -> Floats:
        """Freeze the policy on this batch; returns log p(message) under it, one per message.

        ``reference``: score the batch also under the policy that the learner began with, which steps with
        ``objective.reference_kl`` need. Weights end as they were, to the bit.

        ``from_sampler``: where sampling was told to keep what it computed (``Engine.keep_scores``) with the weights
        that the learner has now, take that as the frozen policy, and compute the rest.
        """
        ...

    @property
    def sampler_scored(self) -> int:
        """For how many messages the last ``begin`` took what the sampler had kept."""
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
        """One optimizer step on these rows of the batch: maximise surrogate - beta * KL(old || new) -
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
        """One optimizer step of the critic on these rows, towards one target per token; a value that is ``clip`` away
        from that of ``values()`` is drawn no further. The policy stays as it is to the bit; raises without a critic."""
        ...

    def measure(self, rows: NDArray[np.int64] | None = None) -> Divergence:
        """From the frozen policy to the present one, on these rows (all when None)."""
        ...

    def verify(self, noise_N: Floats, noise_M: Floats) -> Verified:
        """How much of each message of the batch may stand as the present policy's own (``theory.verification``), with
        one number in [0, 1) per token and one per message to draw by."""
        ...

    def token_kls(self) -> list[Floats]:
        """The exact KL from the frozen policy to the present one at each token's position, per message."""
        ...

    def token_shift(self) -> TokenShift:
        """What happened since ``begin`` to the tokens of each rank, over all positions of its batch."""
        ...

    def end(self) -> None:
        """Forget the frozen policy and free what it held."""
        ...

    def snapshot(self) -> Snapshot:
        """Weights and optimizer state, and the critic's, to be restored bit for bit."""
        ...

    def restore(self, snapshot: Snapshot) -> None: ...

    def move(self, start: Snapshot, end: Snapshot, fraction: float) -> None:
        """Put the weights at start + fraction * (end - start), keeping the present optimizer state and critic."""
        ...

    def perturb(self, relative: float, seed: int) -> None:
        """Add noise of this relative size to the trainable weights (to measure the floor of scoring)."""
        ...

    def save(self, folder: Path) -> None:
        """Weights in Hugging Face form, and the optimizer's state and the critic beside them; no pickle."""
        ...

    def set_aside(self) -> SetAside | None:
        """What ``fingerprint`` and ``save`` would tell and write now, for another thread to ask for while the engine
        samples; good until the next ``begin`` of this learner, and to be let go of before. None where an engine answers
        one call at a time."""
        ...

    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Lengths:
    """Most tokens that one agent reads and says at once, and how many of them all its prompts begin with."""

    prompt: int
    message: int
    shared: int = 0

    @property
    def whole(self) -> int:
        return self.prompt + self.message

    def distinct(self, rows: int) -> int:
        """Tokens of so many rows, common beginnings once."""
        return self.shared + rows * (self.whole - self.shared)


@dataclass(frozen=True)
class Demand:
    """The most that a run will ask of an engine at once.

    ``episodes`` are played together. ``messages`` is how many messages an update learns from, ``checked`` how many the
    check before the run scores, both by trainable agent. An update's messages are of ``problems`` problems; a step
    takes one of ``minibatches`` parts of them.
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
        """What of it concerns these agents."""

        def own(by_agent: Mapping[str, Any]) -> dict[str, Any]:
            return {agent: value for agent, value in by_agent.items() if agent in agents}

        return replace(self, lengths=own(self.lengths), messages=own(self.messages), checked=own(self.checked))

    def of_worker(self, shards: int, workers: int) -> Demand:
        """The most of it that one of so many workers gets, where shards are dealt out among them.

        It samples one shard after the other and keeps the messages of all its own; a problem's are in one shard. A step
        is drawn from the whole update, so that all its rows may be of one worker. What is checked is left whole.
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
    """Into how many parts rows can be cut, when the largest must have ``size`` rows, or all where there are fewer."""
    size = min(rows, size)
    return rows if size <= 1 else -(-rows // (size - 1)) - 1


@dataclass(frozen=True)
class MemoryItem:
    """One thing that takes memory."""

    what: str
    bytes: int
    why: str = ""

    @property
    def gb(self) -> float:
        return self.bytes / GB


@dataclass(frozen=True)
class MemoryPlan:
    """What is needed, and what the device has (None on a CPU). ``where``: which of several groups of workers it is
    needed in. ``servers``: what those take that sample for the team, ``taken`` of it on the same device, of which
    ``available`` is what they leave. ``lacking``: why some of them cannot start, in words. ``recomputed``: agents whose
    activations are computed again on the way back (``learner.recompute``)."""

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
        """Bytes; below 0 what is left, and all of them where nobody counts what there is."""
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
    """What a rehearsal found: the messages at a time that fit, by trainable agent, the most that was in use (None where
    nothing is counted), and the agents whose activations are recomputed."""

    micro_batch: Mapping[str, int]
    peak_bytes: int | None
    recomputed: tuple[str, ...] = ()


@runtime_checkable
class Engine(Sampler, Protocol):
    """Computes for a team: samples for all agents, trains each of them, and knows what it needs.

    An engine may live in other processes: only arrays, numbers, names and the records of ``types`` and ``ports`` cross.
    """

    agents: tuple[str, ...]
    """Every model that it holds: the agents of the team, and whoever plays other roles."""

    def publish(self, agent: str, version: str) -> None:
        """From now on the agent speaks with these weights, which its learner holds; raises when it does not."""
        ...

    def keep_scores(self, agent: str | None) -> None:
        """From now on keep what sampling computes of this agent's messages, for its next ``begin``, and forget what was
        kept before. None: keep nothing more. Once anything is published, all is forgotten: a run that goes on from a
        commit has kept nothing either, and does the same."""
        ...

    def learner(self, agent: str) -> Learner: ...

    def info(self, agent: str) -> AgentInfo: ...

    def set_precision(self, agent: str, precision: str) -> None:
        """Score and train in this arithmetic from now on."""
        ...

    def memory_plan(self, demand: Demand) -> MemoryPlan:
        """What this demand takes, before anything of it runs."""
        ...

    def rehearse(self, demand: Demand) -> Rehearsal:
        """Take the memory that the demand takes once, and leave no trace but a micro-batch that fits."""
        ...

    def peak_bytes(self) -> int | None:
        """The most that was in use since the last rehearsal; None where nothing is counted."""
        ...

    def close(self) -> None:
        """Give back what it holds elsewhere; nothing is asked of it afterwards."""
        ...


class Distiller(Learner, Protocol):
    """A learner that is measured from another model, the teacher, instead of its own frozen policy (app:align)."""

    def use_probes(self, old: AgentBatch, new: AgentBatch, *, exact: bool) -> None:
        """Measure from the teacher on these messages from now on: ``old`` as the teacher reads them, ``new`` as the
        student does. Without ``exact`` the two spell differently, and what the teacher said counts as certain."""
        ...

    def teacher_logprobs(self, batch: AgentBatch) -> Floats:
        """log p(message) under the teacher."""
        ...


class Codec(Protocol):
    """One agent's ears and mouth: text of the shared context to token ids, and back."""

    def encode(self, messages: Sequence[dict[str, str]], tools: Sequence[Schema] = ()) -> Ids:
        """Prompt ids; ``tools`` are those that the agent is told of."""
        ...

    def encode_message(self, text: str) -> Ids: ...

    def decode(self, token_ids: Ids) -> str: ...


class Environment(Protocol):
    """The other side of an interactive task. It keeps no state: a reply depends on the situation and the seed alone."""

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        """One reply to each, before every round. All episodes of a tick come at once, so that whoever plays the other
        roles can be asked in one batch."""
        ...

    def speakers(self, problem: Problem) -> Sequence[str]:
        """Every author that a reply to this problem may have: nobody else's line can pass for one of theirs."""
        ...


class Tools(Protocol):
    """What agents can call. It keeps no state: results depend on the request alone."""

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        """The tools that there are for this problem, by JSON schema; no two of a name."""
        ...

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        """One text for every call of every request, in order. All episodes of a tick come at once. Nothing that a call
        says may raise: a bad one gets a text that says what is wrong with it."""
        ...


class Task(Protocol):
    """What the loop asks of a task. ``teamtr.tasks.Task`` is the base class, with a default for all but ``grade``."""

    @property
    def reward_range(self) -> float | None:
        """Largest minus smallest reward, None when not known."""
        ...

    @property
    def environment(self) -> Environment | None:
        """The other side of an interactive task."""
        ...

    @property
    def tools(self) -> Tools | None:
        """What agents can call, where a task brings tools of its own."""
        ...

    @property
    def grades_early(self) -> bool:
        """Whether each verdict depends on its own episode alone, and ``grade`` may be called from another thread: then
        episodes are graded while others are still played."""
        ...

    @property
    def silence(self) -> str:
        """What stands for an agent's words where the plan asks what would have been without it."""
        ...

    @property
    def failures(self) -> Counter[str]:
        """How often each grader failure (crash, timeout) came up."""
        ...

    def problems(self, split: str) -> Sequence[Problem]: ...

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        """One verdict per (problem, the team's answer, all messages' texts: a ``Transcript``, where it was played)."""
        ...

    def outcome(self, problem: Problem, events: Sequence[Event]) -> str | None:
        """What is graded in the place of the team's answer where a whole dialogue counts; None where the answer is."""
        ...

    def extract(self, text: str) -> str | None:
        """The answer in a message, in a form that votes can be counted in; None when it states none."""
        ...

    def labels(self, problem: Problem) -> dict[str, str]:
        """What tables are broken down by."""
        ...

    def measures(self, problem: Problem, reply: str) -> dict[str, float]:
        """What is reported of a reply besides its verdict."""
        ...
