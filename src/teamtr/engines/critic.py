"""The critic of one agent: a value before every message token, with its own parameters and optimizer.

It reads the features of the frozen policy and passes no gradient back to them: an update moves the policy by its
surrogate alone, and its KL is the policy's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from teamtr.engines.hashing import hash_tensors
from teamtr.engines.optim import Adam
from teamtr.types import Ids

WEIGHTS, MOMENTS = "weights.", "adam."
"""Prefixes of the names under which a critic's tensors are stored."""


class ValueHead(ABC):
    """Maps positions to values; initially zero everywhere."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]: ...

    @abstractmethod
    def values(self, features_NH: Tensor, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        """The value before each message token, packed in message order: [N]. ``features_NH`` is as in
        ``Policy.features``."""


class LinearHead(ValueHead):
    """Linear in the direction of the last hidden state, in float32. The norms of hidden states differ a hundredfold
    between models, and one learning rate should work for all."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.weight = nn.Parameter(torch.zeros(width, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))

    def parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight, "bias": self.bias}

    def values(self, features_NH: Tensor, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        return torch.nn.functional.normalize(features_NH.float(), dim=-1) @ self.weight + self.bias


class TableHead(ValueHead):
    """One value per row of a tabular policy, so that values can be exact."""

    def __init__(self, rows: int, row: Callable[[Ids, Ids], int]) -> None:
        self.table = nn.Parameter(torch.zeros(rows, dtype=torch.float64))
        self.row = row

    def parameters(self) -> dict[str, nn.Parameter]:
        return {"table": self.table}

    def values(self, features_NH: Tensor, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        rows = [self.row(p, m[:u]) for p, m in zip(prompts, messages, strict=True) for u in range(len(m))]
        return self.table[torch.tensor(rows, dtype=torch.long)]


class Critic:
    """A value head and its optimizer, which are stored, restored and hashed together."""

    def __init__(self, head: ValueHead, betas: tuple[float, float]) -> None:
        self.head = head
        self.optimizer = Adam(betas)

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and counters, cloned."""
        weights = {f"{WEIGHTS}{name}": p.detach().clone() for name, p in self.head.parameters().items()}
        return weights | {f"{MOMENTS}{name}": tensor for name, tensor in self.optimizer.state().items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores what ``state`` returned."""
        for name, parameter in self.head.parameters().items():
            parameter.copy_(state[f"{WEIGHTS}{name}"])
        device = next(iter(self.head.parameters().values())).device
        moments = {k.removeprefix(MOMENTS): t.clone() for k, t in state.items() if k.startswith(MOMENTS)}
        self.optimizer.restore({k: t.to(device) for k, t in moments.items()})

    def fingerprint(self) -> str:
        return hash_tensors(self.state())

    def forget_gradients(self) -> None:
        for parameter in self.head.parameters().values():
            parameter.grad = None
