"""The narrow Protocols between the loop and whoever computes.

The loop, the advantages and the gate live on one side; weights live on the other. Only ids, numbers and names
cross. Every implementation passes the one suite in ``tests/contract``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from teamtr.theory.objective import Objective
from teamtr.types import (
    AgentBatch,
    Divergence,
    Floats,
    Ids,
    Problem,
    Reply,
    Sample,
    Situation,
    StepStats,
    TokenShift,
    Verdict,
)


@runtime_checkable
class Sampler(Protocol):
    """Samples messages for any agent of the team."""

    def version(self, agent: str) -> str:
        """A hash of the weights that would write the next message of this agent."""
        ...

    def sample(
        self,
        agent: str,
        prompts: Sequence[Ids],
        *,
        max_tokens: int,
        seed: int,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> list[Sample]:
        """One message per prompt. Without a temperature, the agent's training temperature; 0 is greedy.

        Log-probabilities are those of the distribution really sampled from, end token included. The same seed
        and the same prompts give the same tokens.
        """
        ...


@runtime_checkable
class Learner(Protocol):
    """Trains one agent. ``begin`` freezes the current policy on a batch; all later measures refer to it."""

    agent: str
    tokens: dict[str, int]
    """Tokens scored without and with a gradient since the start: {"scored": n, "trained": n}."""

    def version(self) -> str:
        """A hash of the weights."""
        ...

    def fingerprint(self) -> str:
        """A hash of everything that ``save`` writes: weights and optimizer."""
        ...

    def begin(self, batch: AgentBatch, *, reference: bool = False) -> Floats:
        """Freeze the policy on this batch; returns log p(message) under it, one per message.

        ``reference``: score the batch also under the policy that the learner began with, which steps with
        ``objective.reference_kl`` need. Weights end as they were, to the bit.
        """
        ...

    def token_logprobs(self) -> list[Floats]:
        """Token log-probabilities of the frozen policy, per message."""
        ...

    def step(
        self,
        rows: NDArray[np.int64],
        advantages_M: Floats,
        objective: Objective,
        *,
        beta: float,
        learning_rate: float,
    ) -> StepStats:
        """One optimizer step on these rows of the batch: maximise surrogate - beta * KL(old || new) -
        objective.reference_kl * KL(new || reference). Never applies a non-finite loss or gradient."""
        ...

    def measure(self, rows: NDArray[np.int64] | None = None) -> Divergence:
        """From the frozen policy to the present one, on these rows (all when None)."""
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

    def snapshot(self) -> Any:
        """Weights and optimizer state, to be restored bit for bit."""
        ...

    def restore(self, snapshot: Any) -> None: ...

    def move(self, start: Any, end: Any, fraction: float) -> None:
        """Put the weights at start + fraction * (end - start), keeping the present optimizer state."""
        ...

    def perturb(self, relative: float, seed: int) -> None:
        """Add noise of this relative size to the trainable weights (to measure the floor of scoring)."""
        ...

    def save(self, folder: Path) -> None:
        """Weights in Hugging Face form, and the optimizer's state beside them; no pickle."""
        ...

    def load(self, folder: Path) -> None: ...


class Codec(Protocol):
    """One agent's ears and mouth: text of the shared context to token ids, and back."""

    def encode(self, messages: Sequence[dict[str, str]]) -> Ids: ...

    def encode_message(self, text: str) -> Ids: ...

    def decode(self, token_ids: Ids) -> str: ...


class Environment(Protocol):
    """The other side of an interactive task. It keeps no state: a reply depends on the situation and the seed alone."""

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        """One reply to each, before every round. All episodes of a tick come at once, so that whoever plays the other
        roles can be asked in one batch."""
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

    def problems(self, split: str) -> Sequence[Problem]: ...

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        """One verdict per (problem, the team's answer, all messages' texts)."""
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
