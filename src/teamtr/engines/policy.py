"""What a policy must be able to do for the learner and the sampler to drive it.

A policy maps (prompt, prefix of a message) to a vector of features, and a head maps features to logits. The
split lets the learner keep the features of the policy before an update and compute the exact KL from them in
chunks, without ever holding a whole logits tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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

    @property
    def sampling_path(self) -> str:
        """How messages are sampled, in a few words."""
        return "plain"

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters, by a stable name."""

    @abstractmethod
    def features(self, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        """Features at the position that predicts each message token, packed in message order: [N, H]."""

    def computing(self) -> AbstractContextManager[None]:
        """Around a forward and its backward pass: whatever the backward pass computes again is computed alike."""
        return nullcontext()

    def recompute_activations(self) -> bool:
        """From now on keep fewer activations and compute them again when needed; False when that is not possible
        or already so."""
        return False

    @abstractmethod
    def head(self) -> Head:
        """Features [N, H] to float32 (or better) logits [N, V] of the tempered policy, at present weights."""

    @abstractmethod
    def frozen_head(self) -> Head:
        """The head as it is now, unaffected by later updates."""

    @abstractmethod
    def sample(
        self,
        prompts: Sequence[Ids],
        *,
        max_tokens: int,
        seed: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        version: str = "",
    ) -> list[Sample]:
        """One message per prompt. ``version`` names the present weights, so that what was computed under them
        before may be used again; empty: nothing may."""

    @abstractmethod
    def save_weights(self, folder: Path) -> None: ...

    @abstractmethod
    def load_weights(self, folder: Path) -> None: ...


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on the device; a GPU is not waited for, so that the next work can be prepared meanwhile."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def uniforms(seed: int, rows: int, tokens: int) -> NDArray[np.float64]:
    """The noise of a call to ``sample``: one number in [0, 1) per row and token.

    Row i's numbers depend on the seed, i and the number of tokens alone, so that rows may be computed in any company
    and order and still say the same.
    """
    return np.random.default_rng(seed).random((rows, tokens))


def keep_likely(logits_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits with all but the ``top_k`` most likely tokens (0: all), and of those all but the smallest set that holds
    ``top_p`` of the probability, at minus infinity. Equally likely tokens count in the order of their ids."""
    if top_p >= 1.0 and not 0 < top_k < logits_BV.shape[-1]:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    outside_BV = torch.zeros_like(sorted_BV, dtype=torch.bool)
    if top_k > 0:
        outside_BV[:, top_k:] = True
    if top_p < 1.0:
        share_BV = torch.softmax(sorted_BV.masked_fill(outside_BV, -torch.inf), dim=-1)
        outside_BV |= (share_BV.cumsum(-1) - share_BV) >= top_p
    return logits_BV.masked_fill(torch.zeros_like(outside_BV).scatter(-1, order_BV, outside_BV), -torch.inf)


@dataclass(frozen=True)
class Drawing:
    """How a token is drawn from logits: calling it gives the token at which each row's cumulative distribution passes
    its number in ``uniform_B`` (float64), and the log-probability under the distribution really drawn from.

    ``temperature`` is relative to the logits given; 0 takes the most likely token (log-probability 0).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __call__(self, logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        if self.temperature == 0.0:
            best = logits_BV.max(-1)
            return best.indices, (best.values - best.values).float()  # 0, or nan where nothing is the most likely
        if logits_BV.device.type == "cuda" and self.everything:
            from teamtr.engines.paged.kernels import draw_token

            return draw_token(logits_BV, uniform_B, self.temperature)
        scaled_BV = logits_BV if self.temperature == 1.0 else logits_BV / self.temperature
        return draw(keep_likely(scaled_BV, self.top_p, self.top_k), uniform_B)

    @property
    def everything(self) -> bool:
        """Whether no token is left out."""
        return self.top_p >= 1.0 and self.top_k == 0


def draw(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens by inverting the cumulative distribution, and their log-probabilities; masses are added in float64."""
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    mass_BV = logp_BV.double().exp()
    upto_BV = mass_BV.cumsum(-1)
    target_B1 = (uniform_B.to(upto_BV) * upto_BV[:, -1])[:, None]
    # The first token whose cumulated mass exceeds the target; it has mass of its own, or it would not exceed.
    ids_B = torch.searchsorted(upto_BV, target_B1, right=True).squeeze(-1)
    last_B = mass_BV.shape[-1] - 1 - mass_BV.flip(-1).gt(0).to(torch.int8).argmax(-1)
    ids_B = torch.minimum(ids_B, last_B)
    return ids_B, logp_BV.gather(-1, ids_B[:, None]).squeeze(-1).float()
