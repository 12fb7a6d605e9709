"""Requests to engines and their results: samples, divergences, and the statistics of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teamtr.types import Finish, Floats, Ids


@dataclass(frozen=True)
class Decoding:
    """How tokens are sampled. ``temperature`` None: the agent's training temperature; 0: greedy."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0


AS_TRAINED = Decoding()


@dataclass(frozen=True)
class Sample:
    """A sampled message for one prompt. ``version`` identifies the weights that wrote it."""

    token_ids: Ids
    logprobs: NDArray[np.float32]
    finish: Finish
    version: str = ""


@dataclass(frozen=True)
class Wanted:
    """A request for one message of at most ``len(noise_T)`` tokens."""

    agent: str
    prompt: Ids
    noise_T: Floats
    decoding: Decoding = AS_TRAINED


@dataclass(frozen=True)
class Ended:
    """A finished message of a stream. ``row`` is the index of its request in the stream, from 0."""

    row: int
    sample: Sample


@dataclass(frozen=True)
class AgentInfo:
    """An engine's description of one of its models.

    ``precision`` is that of scoring and training; ``precisions`` are this one and all finer ones that ``set_precision``
    accepts, in order. ``sampling`` describes briefly how messages are sampled. ``end_ids`` end a message.
    ``reference_version`` identifies the policy that a reference KL is taken to; None without one. ``config_version``
    identifies the computation apart from the weights, ``base_version`` the frozen weights under an adapter.
    ``trained_parameters`` counts the policy's trained parameters without a critic's, ``parameters`` those of its model
    without adapters. ``samples_from_a_copy``: messages are sampled from a copy of the weights, not from the trained
    weights themselves. ``positions``: maximum tokens of a prompt with its message; None if there is no known limit.
    ``batch``: equal for agents that are sampled in one batch; empty if each agent has batches of its own.
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
    """The effect of an update on tokens by their rank before it, averaged over positions (fig:logit-vocab).

    Entry r belongs to the token that was the (r+1)-th most likely; the last entry is all other tokens together.
    """

    before_R: Floats
    """Probability before the update."""
    after_R: Floats
    """Probability of the same token after it."""
    moved_R: Floats
    """Mean absolute change of the log-probability; in the last entry, of the other tokens' total probability."""
    flipped: float
    """Share of positions whose most likely token changed."""
    positions: int


@dataclass(frozen=True)
class Divergence:
    """Per-message distances from the policy before an update (cur) to the one after (new), in nats per message.

    ``full_M`` is exact given the prefixes (app:impl); ``k1_M`` is the paper's estimate (eq:emp_tok_kl);
    ``k3_M`` its non-negative variant; ``log_ratio_M`` is log new(m) - log cur(m), so ``k1_M == -log_ratio_M``.
    ``reference_M`` is the k3 estimate of KL(new || reference), if the batch was scored under the reference.
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
    """One optimizer step. ``applied`` is False if a non-finite loss or gradient was discarded. ``kl_reference`` is the
    mean that ``Objective.reference_kl`` multiplies; None without a reference."""

    applied: bool
    surrogate: float
    kl_full: float
    grad_norm: float
    ratio_clip_rate: float
    kl_reference: float | None = None


@dataclass(frozen=True)
class ValueStats:
    """One step of a critic: its mean loss over tokens before the step, and the share of tokens whose value had moved by
    more than the clip range. ``applied`` is False if a non-finite loss or gradient was discarded."""

    applied: bool
    loss: float
    clip_rate: float
