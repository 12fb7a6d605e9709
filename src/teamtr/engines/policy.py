"""What a policy must be able to do for the learner and the sampler to drive it.

A policy maps (prompt, prefix of a message) to a vector of features, and a head maps features to logits. The
split lets the learner keep the features of the policy before an update and compute the exact KL from them in
chunks, without ever holding a whole logits tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from teamtr.types import Ids, Sample

Head = Callable[[Tensor], Tensor]


class Policy(ABC):
    """One agent's distribution over messages."""

    end_ids: frozenset[int]
    """Every token that ends a message; each of them stops sampling and is trained on."""

    temperature: float
    """The temperature of the policy that is trained: ratios and KLs are those of the tempered distribution."""

    device: torch.device

    base_version: str = ""
    """A hash of what the policy needs and does not train (the frozen base of an adapter); empty when nothing."""

    precision: str
    """The arithmetic of ``features``: fp64, fp32, tf32, fp16 or bf16. May be changed between calls."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters, by a stable name."""

    @abstractmethod
    def features(self, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        """Features at the position that predicts each message token, packed in message order: [N, H]."""

    @abstractmethod
    def head(self) -> Head:
        """Features [N, H] to float32 (or better) logits [N, V] of the tempered policy, at present weights."""

    @abstractmethod
    def frozen_head(self) -> Head:
        """The head as it is now, unaffected by later updates."""

    @abstractmethod
    def sample(
        self, prompts: Sequence[Ids], *, max_tokens: int, seed: int, temperature: float, top_p: float
    ) -> list[Sample]: ...

    @abstractmethod
    def save_weights(self, folder: Path) -> None: ...

    @abstractmethod
    def load_weights(self, folder: Path) -> None: ...


def draw(
    logits_BV: Tensor, *, temperature_ratio: float, top_p: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw a token per row; returns ids and the log-probability under the distribution really drawn from.

    ``temperature_ratio`` is relative to the logits given; 0 takes the most likely token (log-probability 0).
    """
    if temperature_ratio == 0.0:
        ids_B = logits_BV.argmax(-1)
        return ids_B, torch.zeros(len(ids_B), dtype=torch.float32, device=logits_BV.device)
    logp_BV = torch.log_softmax(logits_BV / temperature_ratio if temperature_ratio != 1.0 else logits_BV, dim=-1)
    if top_p < 1.0:
        sorted_BV, order_BV = logp_BV.exp().sort(dim=-1, descending=True)
        outside_BV = (sorted_BV.cumsum(-1) - sorted_BV) >= top_p
        logp_BV = logp_BV.masked_fill(outside_BV.gather(-1, order_BV.argsort(-1)), -torch.inf)
        logp_BV = torch.log_softmax(logp_BV, dim=-1)
    ids_B = torch.multinomial(logp_BV.exp(), 1, generator=generator).squeeze(-1)
    return ids_B, logp_BV.gather(-1, ids_B[:, None]).squeeze(-1).float()
