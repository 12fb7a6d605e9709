"""The interface of a policy, as the learner and the sampler use it.

A policy maps (prompt, prefix of a message) to a vector of features, and a head maps features to logits. This split lets
the learner keep the features of the policy before an update and compute the exact KL from them in chunks, without ever
holding a full logits tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from teamtr.answers import Sample
from teamtr.engines.critic import ValueHead
from teamtr.engines.kept import Keep
from teamtr.engines.paged.place import Paged
from teamtr.engines.sampling import PLAINLY, TokenSampler
from teamtr.engines.slices import own
from teamtr.errors import UserError
from teamtr.ports import Follow, Heard, unfollowed, unheard
from teamtr.types import Floats, Ids

Head = Callable[[Tensor], Tensor]
WriteTo = Callable[[Path], None]


def write_nothing(folder: Path) -> None:
    """Writes nothing, for processes that leave writing to another one."""


Precision = Literal["fp32", "tf32", "fp16", "bf16"]
Recompute = Literal["auto", "always", "never"]
"""Whether a step recomputes its layers' activations in the backward pass; ``learner.recompute`` in a team file."""
CHEAPEST_FIRST: tuple[Precision, ...] = ("fp16", "tf32", "fp32")
"""Precisions that ``precision: auto`` tries on a GPU; the first one whose noise is small enough is used."""


class Policy(ABC):
    """One agent's distribution over messages."""

    end_ids: frozenset[int]
    """Every token that ends a message; each of them stops sampling and is trained on."""

    temperature: float
    """The temperature of the policy that is trained: ratios and KLs are those of the tempered distribution."""

    device: torch.device

    base_version: str = ""
    """A hash of what the policy uses but does not train (the frozen base of an adapter); empty if there is nothing."""

    config_version: str = ""
    """A hash of the model's configuration, which determines what is computed besides the weights."""

    precision: str
    """The arithmetic of ``features``: fp64, fp32, tf32, fp16 or bf16. May be changed between calls."""

    keep: Keep | None = None
    """Called with the features that sampling computed of each message; None if they are not needed."""

    def keep_features(self, keep: Keep | None) -> None:
        """Sets ``keep``; raises UserError if sampling computes nothing that scoring could use."""
        if keep is not None:
            raise UserError(f"learner.score: sampler is for transformers, and {type(self).__name__} is none: set own")

    @property
    def sampling_path(self) -> str:
        """How messages are sampled, in a few words."""
        return "plain"

    @property
    def samples_from_a_copy(self) -> bool:
        """Whether messages are sampled from a copy of the weights instead of the tensors that are trained."""
        return False

    @property
    def end_to_end(self) -> bool:
        """Whether rows that are passed together are packed end to end, so that memory depends on their tokens.
        Otherwise each row takes as much as the longest one."""
        return False

    @property
    def positions(self) -> int | None:
        """Most tokens of a prompt and its message together; None without a limit."""
        return None

    def take_up(self, version: str) -> None:  # noqa: B027 (nothing to do without a copy)
        """Fills the sampling copy with the current weights, which have this version."""

    @property
    def batch(self) -> str:
        """Identifies the batch that rows are computed in: equal for policies that share one, empty for a policy that
        has batches of its own."""
        return ""

    def paged(self, version: str, drawing: TokenSampler) -> Paged | None:
        """The paged sampler whose running batch rows of this policy can join; None if it is sampled one batch at a
        time. ``version`` names the current weights."""
        return None

    def require_room(self, tokens: int) -> None:  # noqa: B027 (there may be no limit)
        """Raises UserError if a prompt and its message may not have this many tokens."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters, by stable names."""

    def initial_parameters(self) -> dict[str, Tensor]:
        """A copy of the trainable parameters in host memory, for a later KL to the current policy."""
        return {name: own(tensor).detach().to("cpu", copy=True) for name, tensor in self.parameters().items()}

    @property
    def model_parameters(self) -> int:
        """The number of parameters of its model, without adapters."""
        return sum(parameter.numel() for parameter in self.parameters().values())

    @abstractmethod
    def features(self, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        """Features at the position that predicts each message token, packed in message order: [N, H]."""

    def computing(self) -> AbstractContextManager[None]:
        """Context of a forward pass and its backward pass, so that whatever the backward pass recomputes is computed
        alike."""
        return nullcontext()

    recomputes: bool = False
    """Whether fewer activations are kept, and recomputed when needed."""

    @property
    def can_recompute(self) -> bool:
        return False

    def recompute_activations(self) -> bool:
        """Keeps fewer activations from now on and recomputes them when needed; returns False if that is not possible or
        already so."""
        return False

    @abstractmethod
    def head(self) -> Head:
        """Maps features [N, H] to float32 (or better) logits [N, V] of the tempered policy, with the current
        weights."""

    @abstractmethod
    def frozen_head(self) -> Head:
        """The head with the current weights, unaffected by later updates."""

    @abstractmethod
    def value_head(self) -> ValueHead:
        """A new head for a critic, which maps positions to values instead of logits."""

    @abstractmethod
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
        """One message per prompt; ``noise_BT``, ``heard`` and ``follow`` are as in ``ports.Sampler``. ``version`` names
        the current weights, so that what was computed with them before can be reused; if empty, nothing is."""

    @abstractmethod
    def to_write(self, *, write: bool = True) -> WriteTo:
        """Returns a function that writes the current weights into a folder. It holds copies of everything that is on
        the GPU, and another thread may call it while messages are sampled, as long as the weights do not change.
        Without ``write``, this process only contributes its parts to the one that writes, and the function writes
        nothing."""

    def save_weights(self, folder: Path) -> None:
        self.to_write()(folder)

    @abstractmethod
    def load_weights(self, folder: Path) -> None: ...
