"""What a policy must be able to do for the learner and the sampler to drive it.

A policy maps (prompt, prefix of a message) to a vector of features, and a head maps features to logits. The
split lets the learner keep the features of the policy before an update and compute the exact KL from them in
chunks, without ever holding a whole logits tensor.
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
    """Where another process writes."""


Precision = Literal["fp32", "tf32", "fp16", "bf16"]
Recompute = Literal["auto", "always", "never"]
"""Whether a step computes its layers' activations again on the way back; as ``learner.recompute`` in a team file."""
CHEAPEST_FIRST: tuple[Precision, ...] = ("fp16", "tf32", "fp32")
"""What ``precision: auto`` tries on a GPU; the first whose noise is small enough is taken."""


class Policy(ABC):
    """One agent's distribution over messages."""

    end_ids: frozenset[int]
    """Every token that ends a message; each of them stops sampling and is trained on."""

    temperature: float
    """The temperature of the policy that is trained: ratios and KLs are those of the tempered distribution."""

    device: torch.device

    base_version: str = ""
    """A hash of what the policy needs and does not train (the frozen base of an adapter); empty when nothing."""

    config_version: str = ""
    """A hash of what is computed besides the weights: the model's configuration."""

    precision: str
    """The arithmetic of ``features``: fp64, fp32, tf32, fp16 or bf16. May be changed between calls."""

    keep: Keep | None = None
    """Told what sampling computed of each message; None: nobody asks for it."""

    def keep_features(self, keep: Keep | None) -> None:
        """Tell this one from now on; raises UserError where sampling computes nothing that scoring could use."""
        if keep is not None:
            raise UserError(f"learner.score: sampler is for transformers, and {type(self).__name__} is none: set own")

    @property
    def sampling_path(self) -> str:
        """How messages are sampled, in a few words."""
        return "plain"

    @property
    def samples_from_a_copy(self) -> bool:
        """Whether messages are sampled from other tensors than those that are trained."""
        return False

    @property
    def end_to_end(self) -> bool:
        """Whether rows that are passed together stand end to end, so that what they take goes by their tokens; else
        each takes as much as the longest beside it."""
        return False

    @property
    def positions(self) -> int | None:
        """Most tokens of a prompt and its message; None without a limit."""
        return None

    def take_up(self, version: str) -> None:  # noqa: B027 (nothing to do without a copy)
        """Fill that copy with the present weights, of this version."""

    @property
    def batch(self) -> str:
        """The same for policies whose rows are computed in one batch; empty where each has batches of its own."""
        return ""

    def paged(self, version: str, drawing: TokenSampler) -> Paged | None:
        """Where rows of this policy can join a running batch; None where it is sampled a batch at a time. ``version``
        names the present weights."""
        return None

    def require_room(self, tokens: int) -> None:  # noqa: B027 (there may be no limit)
        """Raise UserError where a prompt and its message may not have so many tokens."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters, by a stable name."""

    def initial_parameters(self) -> dict[str, Tensor]:
        """A copy of them, off the card: what a KL to the policy as it is now needs later."""
        return {name: own(tensor).detach().to("cpu", copy=True) for name, tensor in self.parameters().items()}

    @property
    def model_parameters(self) -> int:
        """How many its model has, adapters left out."""
        return sum(parameter.numel() for parameter in self.parameters().values())

    @abstractmethod
    def features(self, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        """Features at the position that predicts each message token, packed in message order: [N, H]."""

    def computing(self) -> AbstractContextManager[None]:
        """Around a forward and its backward pass: whatever the backward pass computes again is computed alike."""
        return nullcontext()

    recomputes: bool = False
    """Whether fewer activations are kept, and computed again when needed."""

    @property
    def can_recompute(self) -> bool:
        return False

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
    def value_head(self) -> ValueHead:
        """A new head that maps positions to values instead of logits, for a critic."""

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
        """One message per prompt; ``noise_BT``, ``heard`` and ``follow`` as in ``ports.Sampler``. ``version`` names the
        present weights, so that what was computed under them before may be used again; empty: nothing may."""

    @abstractmethod
    def to_write(self, *, write: bool = True) -> WriteTo:
        """What writes the present weights into a folder: it holds all that it takes off the card, and may be called
        from another thread while messages are sampled, as long as nobody changes the weights. Without ``write``, only
        give the one that writes what this process holds of them; then what is returned writes nothing."""

    def save_weights(self, folder: Path) -> None:
        self.to_write()(folder)

    @abstractmethod
    def load_weights(self, folder: Path) -> None: ...
