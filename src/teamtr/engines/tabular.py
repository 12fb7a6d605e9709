"""A language model that is a table: one row of logits per (hashed) prefix. Exact, small, float64.

A prefix is the prompt's ids followed by the message so far, wherever the prompt ends; its hash picks a row. Prefixes
that share a row share their logits. That gives a different policy, not a wrong one: every probability stays exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from teamtr.answers import Sample
from teamtr.engines.critic import TableHead, ValueHead
from teamtr.engines.policy import Head, Policy, WriteTo
from teamtr.engines.sampling import PLAINLY, TokenSampler
from teamtr.ports import Follow, Heard, unfollowed, unheard
from teamtr.types import Finish, Floats, Ids

UNLIKELY = 12.0


class TabularPolicy(Policy):
    """A table of ``rows`` x ``vocabulary`` logits. ``spread`` is the standard deviation of the initial logits; tokens
    that are not ``favoured`` start e^12 times less likely."""

    def __init__(
        self,
        vocabulary: int,
        *,
        end_ids: frozenset[int],
        rows: int = 4096,
        spread: float = 0.0,
        favoured: Sequence[int] | None = None,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> None:
        self.end_ids = end_ids
        self.temperature = temperature
        self.device = torch.device("cpu")
        self.precision = "fp64"
        generator = torch.Generator().manual_seed(seed)
        logits = spread * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
        if favoured is not None:
            unlikely = torch.ones(vocabulary, dtype=torch.bool)
            unlikely[list(favoured)] = False
            logits[:, unlikely] -= UNLIKELY
        self.logits = nn.Parameter(logits)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {"logits": self.logits}

    def row(self, prompt: Ids, prefix: Ids) -> int:
        key = np.concatenate([prompt, prefix]).astype(np.int64).tobytes()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % len(self.logits)

    def features(self, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        rows = [self.row(p, m[:u]) for p, m in zip(prompts, messages, strict=True) for u in range(len(m))]
        return self.logits[torch.tensor(rows, dtype=torch.long)]

    def head(self) -> Head:
        return lambda features_NV: features_NV / self.temperature

    frozen_head = head

    def value_head(self) -> ValueHead:
        return TableHead(len(self.logits), self.row)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Ids],
        noise_BT: Floats,
        drawing: TokenSampler = PLAINLY,
        *,
        version: str = "",
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        uniform_BT = torch.as_tensor(np.nan_to_num(noise_BT))
        ids: list[list[int]] = [[] for _ in prompts]
        logp: list[list[float]] = [[] for _ in prompts]
        stopped, unwanted = [False] * len(prompts), [False] * len(prompts)
        for u in range(noise_BT.shape[1]):
            rows = [self.row(p, np.array(x, dtype=np.int32)) for p, x in zip(prompts, ids, strict=True)]
            tokens, scores = drawing(self.logits[torch.tensor(rows, dtype=torch.long)], uniform_BT[:, u])
            for i, (token, score) in enumerate(zip(tokens.tolist(), scores.tolist(), strict=True)):
                if not stopped[i] and not unwanted[i]:
                    ids[i].append(token)
                    logp[i].append(score)
                    stopped[i] = token in self.end_ids
                    unwanted[i] = not follow(i, u, np.array([token], dtype=np.int32))
                    if stopped[i] or unwanted[i] or u + 1 == noise_BT.shape[1]:
                        heard(i, _sample(ids[i], logp[i], stopped[i]))
            if all(done or left for done, left in zip(stopped, unwanted, strict=True)):
                break
        return [_sample(x, s, done) for x, s, done in zip(ids, logp, stopped, strict=True)]

    def to_write(self, *, write: bool = True) -> WriteTo:
        logits = self.logits.detach().contiguous()
        return lambda folder: save_file({"logits": logits}, folder / "model.safetensors") if write else None

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        self.logits.copy_(load_file(folder / "model.safetensors")["logits"])


def _sample(ids: list[int], logprobs: list[float], stopped: bool) -> Sample:
    finish: Finish = "stop" if stopped else "length"
    return Sample(np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32), finish)
