"""Draws a token from logits with a given random number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from teamtr.answers import Decoding


def keep_likely(logits_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Sets logits to minus infinity except for the ``top_k`` most likely tokens (0: all), and of those the smallest set
    that holds ``top_p`` of the probability. Equally likely tokens count in the order of their ids."""
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
class TokenSampler:
    """How a token is drawn from logits. A call returns the token at which each row's cumulative distribution passes its
    number in ``uniform_B`` (float64), and the log-probability under the distribution actually sampled from.

    ``temperature`` is relative to the given logits; 0 takes the most likely token (log-probability 0).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, decoding: Decoding, trained_at: float) -> Self:
        """``trained_at``: the agent's training temperature, used unless the decoding sets one."""
        warmth = trained_at if decoding.temperature is None else decoding.temperature
        return cls(warmth, decoding.top_p, decoding.top_k)

    def __call__(self, logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        if self.temperature == 0.0:
            best = logits_BV.max(-1)
            return best.indices, (best.values - best.values).float()  # 0, or NaN if the largest logit is not finite
        if logits_BV.device.type == "cuda" and self.everything:
            from teamtr.engines.paged.drawing_kernels import draw_token

            return draw_token(logits_BV, uniform_B, self.temperature)
        scaled_BV = logits_BV if self.temperature == 1.0 else logits_BV / self.temperature
        return draw(keep_likely(scaled_BV, self.top_p, self.top_k), uniform_B)

    @property
    def everything(self) -> bool:
        """Whether every token can be drawn (no top-p, no top-k)."""
        return self.top_p >= 1.0 and self.top_k == 0


PLAINLY = TokenSampler()


def draw(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draws tokens by inverting the cumulative distribution, which is summed in float64, and returns their
    log-probabilities."""
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    mass_BV = logp_BV.double().exp()
    upto_BV = mass_BV.cumsum(-1)
    target_B1 = (uniform_B.to(upto_BV) * upto_BV[:, -1])[:, None]
    # The first token whose cumulative mass exceeds the target; its own mass is positive, or it would not be the first.
    ids_B = torch.searchsorted(upto_BV, target_B1, right=True).squeeze(-1)
    last_B = mass_BV.shape[-1] - 1 - mass_BV.flip(-1).gt(0).to(torch.int8).argmax(-1)
    ids_B = torch.minimum(ids_B, last_B)
    return ids_B, logp_BV.gather(-1, ids_B[:, None]).squeeze(-1).float()
