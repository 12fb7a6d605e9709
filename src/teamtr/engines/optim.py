"""Adam whose whole state is named tensors, so that it can be stored as safetensors, hashed and restored bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from teamtr.engines.slices import own

FIRST_LOSS_SCALE = 2.0**16
STEPS_BEFORE_RAISING = 200
"""Steps without overflow after which the loss scale of float16 is doubled."""

MOMENTS = ("first", "second")


def weight_of(moment: str) -> str:
    """The name of the parameter that this moment belongs to."""
    return moment.partition(".")[2]


class Adam:
    """Adam with bias correction: two moments per parameter, and the loss scale for float16."""

    def __init__(self, betas: tuple[float, float]) -> None:
        self.betas = betas
        self.moments: dict[str, Tensor] = {}
        self.steps = 0
        self.loss_scale = FIRST_LOSS_SCALE
        self._clean_steps = 0

    @torch.no_grad()
    def step(self, parameters: Mapping[str, nn.Parameter], shrink: float, learning_rate: float) -> None:
        """One step from the parameters' gradients, each multiplied by ``shrink`` first."""
        self.steps += 1
        b1, b2 = self.betas
        correction = learning_rate * (1 - b2**self.steps) ** 0.5 / (1 - b1**self.steps)
        moved = {name: p for name, p in parameters.items() if p.grad is not None}
        if moved:
            weights = [own(p) for p in moved.values()]
            # One call for all parameters: an adapter has hundreds of small ones.
            gradients = torch._foreach_mul([own(p.grad) for p in moved.values() if p.grad is not None], shrink)
            first, second = ([self._moment(kind, name, p) for name, p in moved.items()] for kind in MOMENTS)
            torch._foreach_lerp_(first, gradients, 1 - b1)
            torch._foreach_mul_(second, b2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - b2)
            spread = torch._foreach_sqrt(second)
            torch._foreach_add_(spread, 1e-8)
            torch._foreach_addcdiv_(weights, first, spread, -correction)
        self._clean_steps += 1
        if self._clean_steps % STEPS_BEFORE_RAISING == 0:
            self.loss_scale *= 2

    def _moment(self, kind: str, name: str, parameter: nn.Parameter) -> Tensor:
        """A moment of a parameter, zero in its first step."""
        key = f"{kind}.{name}"
        if key not in self.moments:
            self.moments[key] = torch.zeros_like(own(parameter))
        return self.moments[key]

    def lower_scale(self, scale: float) -> None:
        """Sets the scale at which a step succeeded after overflows."""
        self.loss_scale, self._clean_steps = scale, 0

    def begin_at(self, scale: float) -> None:
        """Sets the loss scale of the first step, if none was taken yet."""
        if not self.steps:
            self.loss_scale = scale

    def to(self, device: torch.device) -> None:
        self.moments = {name: moment.to(device) for name, moment in self.moments.items()}

    def leave_the_card(self) -> None:
        self.moments = {name: moment.cpu() for name, moment in self.moments.items()}

    def counters(self) -> dict[str, Tensor]:
        return {
            "steps": torch.tensor(self.steps),
            "loss_scale": torch.tensor(self.loss_scale, dtype=torch.float64),
            "clean_steps": torch.tensor(self._clean_steps),
        }

    def state(self) -> dict[str, Tensor]:
        """Moments and counters, cloned."""
        return {name: moment.clone() for name, moment in self.moments.items()} | self.counters()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores what ``state`` returned; its tensors become the optimizer's own."""
        moments = dict(state)
        self.steps = int(moments.pop("steps"))
        self.loss_scale = float(moments.pop("loss_scale"))
        self._clean_steps = int(moments.pop("clean_steps"))
        self.moments = moments
