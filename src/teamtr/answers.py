"""What engines are asked for and what they answer: samples, divergences, the figures of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teamtr.types import Finish, Floats, Ids


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
