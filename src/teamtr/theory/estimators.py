"""How returns become advantages, as a value of the plan: from the group's mean and deviation, a critic, or your way.

An estimator is any value with these three methods. One with a critic (``CriticAdvantage``) also says what the values of
its tokens make of them: those are known only once an update has frozen its policy. ``GroupAdvantage`` is the paper's; a
subclass may override one of them::

    @dataclass(frozen=True)
    class LeaveOneOut(GroupAdvantage):
        def estimate(self, returns_PG, weights_PG=None):
            ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from teamtr.batches import AgentBatch
from teamtr.theory.advantages import Advantages, group_advantages
from teamtr.theory.gae import TokenAdvantages, token_advantages
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


@dataclass(frozen=True)
class CriticAdvantage:
    """Generalized advantage estimation with a critic: PPO's (arXiv 1506.02438, 1707.06347).

    ``gae_lambda`` 1 is the return less the value, 0 the one-step error. It is 1 unless it is set: a critic begins with
    values of 0, and below 1 the return then reaches the last tokens of a message alone. ``value_clip``: a value that
    has moved this far in one update is drawn no further, in units of reward. ``normalize`` and ``clip`` are over the
    tokens of the batch, not over groups.
    """

    gae_lambda: float = 1.0
    value_clip: float = 0.2
    normalize: bool = True
    clip: float = math.inf
    eps: float = 1e-6

    def estimate(self, returns_PG: Floats, weights_PG: Floats | None = None) -> Advantages:
        """Without the values: the return less its group's mean, which probes and pages show. A group of equal returns
        teaches as well as any other."""
        found = group_advantages(returns_PG, a_clip=math.inf, eps_norm=self.eps, normalize=False, weights_PG=weights_PG)
        return replace(found, informative_P=~found.non_finite_P)

    def largest(self, group_size: int) -> float:
        """A critic may be wrong by any amount."""
        return math.inf

    def error(self, returns_PG: Floats) -> float:
        return 0.0

    def of_tokens(
        self, values: Sequence[Floats], messages: AgentBatch, returns_PG: Floats, gamma: float
    ) -> TokenAdvantages:
        """With the values that the critic gives before each token of these messages."""
        return token_advantages(
            values,
            messages.episode_M,
            messages.turn_M,
            returns_PG.reshape(-1),
            gamma=gamma,
            lam=self.gae_lambda,
            normalize=self.normalize,
            clip=self.clip,
            eps=self.eps,
        )
