"""The surrogate that an update maximizes, as a serializable value; ``surrogate.py`` computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ratio = Literal["message", "token", "length_normalized"]
AverageOver = Literal["messages", "tokens"]


@dataclass(frozen=True)
class Objective:
    """The surrogate that an update maximizes: eq:ppo_obj and its variants.

    ``ratio``: "message" is the paper's product over tokens; "token" clips each token's ratio (PPO, GRPO, DAPO);
    "length_normalized" is the geometric mean over the message's tokens.
    ``average_over``: "messages" weights every message equally; "tokens" every token (DAPO).
    ``reference_kl``: weight of KL(new || reference) per token, where the reference is the policy that the run began
    with (GRPO, arXiv 2402.03300); with 0 there is no reference.
    """

    ratio: Ratio = "message"
    clip_low: float = 0.2
    clip_high: float = 0.2
    average_over: AverageOver = "messages"
    reference_kl: float = 0.0

    @property
    def has_reference(self) -> bool:
        return self.reference_kl > 0.0
