"""How returns become advantages, as a value of the plan: the group's own mean and deviation, or an estimator of yours.

An estimator is any value with these three methods. ``GroupAdvantage`` is the paper's; a subclass may override one of
them::

    @dataclass(frozen=True)
    class LeaveOneOut(GroupAdvantage):
        def estimate(self, returns_PG, weights_PG=None):
            ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from teamtr.theory.advantages import Advantages, group_advantages
from teamtr.theory.zeta import zeta_norm
from teamtr.types import Floats


class AdvantageEstimator(Protocol):
    """Turns the returns of P groups of G episodes into advantages, and knows what its estimates may be wrong by."""

    def estimate(self, returns_PG: Floats, weights_PG: Floats | None = None) -> Advantages:
        """The advantages; ``weights_PG`` are trajectory weights of episodes that another team wrote."""
        ...

    def largest(self, group_size: int) -> float:
        """The size that no advantage exceeds: the A_max of the paper's certificate."""
        ...

    def error(self, returns_PG: Floats) -> float:
        """How much the advantages owe to the luck of the group: the paper's zeta_norm, 0 where nothing is known."""
        ...


@dataclass(frozen=True)
class GroupAdvantage:
    """clip((R - mean) / sqrt(variance + eps), -clip, clip) over each group, eq:group_adv; inf does not clip."""

    normalize: bool = True
    clip: float = 3.0
    eps: float = 1e-6

    def estimate(self, returns_PG: Floats, weights_PG: Floats | None = None) -> Advantages:
        return group_advantages(
            returns_PG, a_clip=self.clip, eps_norm=self.eps, normalize=self.normalize, weights_PG=weights_PG
        )

    def largest(self, group_size: int) -> float:
        """A normalized advantage cannot exceed sqrt(G - 1) (Samuelson's inequality)."""
        return min(self.clip, math.sqrt(group_size - 1))

    def error(self, returns_PG: Floats) -> float:
        return zeta_norm(returns_PG, a_clip=self.clip, eps_norm=self.eps, normalize=self.normalize)
