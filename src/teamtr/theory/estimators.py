"""Advantage estimators, as values of the plan: from the group's mean and deviation, from a critic, or custom.

An estimator is any value with the three methods of ``AdvantageEstimator``. ``CriticAdvantage`` also computes advantages
per token from a critic's values, which are known only once an update has frozen its policy. ``GroupAdvantage`` is the
paper's; a subclass may override any method::

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
    """Turns the returns of P groups of G episodes into advantages, and estimates their error."""

    def estimate(self, returns_PG: Floats, weights_PG: Floats | None = None) -> Advantages:
        """The advantages; ``weights_PG`` are trajectory weights of episodes written by another team."""
        ...

    def largest(self, group_size: int, reward_range: float) -> float:
        """A bound on the size of every advantage, estimated or true: the A_max of the paper's certificate.
        ``reward_range`` is that of returns. An estimator with larger advantages than the one that it inherits from must
        override this."""
        ...

    def error(self, returns_PG: Floats) -> float:
        """The error of the advantages due to chance in the group: the paper's zeta_norm; 0 if it is not known."""
        ...


@dataclass(frozen=True)
class GroupAdvantage:
    """clip((R - mean) / sqrt(variance + eps), -clip, clip) over each group, eq:group_adv; ``clip=inf``: no clipping."""

    normalize: bool = True
    clip: float = 3.0
    eps: float = 1e-6

    def estimate(self, returns_PG: Floats, weights_PG: Floats | None = None) -> Advantages:
        return group_advantages(
            returns_PG, a_clip=self.clip, eps_norm=self.eps, normalize=self.normalize, weights_PG=weights_PG
        )

    def largest(self, group_size: int, reward_range: float) -> float:
        """The clip, or sqrt(G - 1) if that is smaller: no normalized advantage exceeds it (Samuelson's inequality).
        Without ``normalize``, the range of returns: the true advantage is not clipped."""
        return min(self.clip, math.sqrt(group_size - 1)) if self.normalize else reward_range

    def error(self, returns_PG: Floats) -> float:
        return zeta_norm(returns_PG, a_clip=self.clip, eps_norm=self.eps, normalize=self.normalize)


@dataclass(frozen=True)
class CriticAdvantage:
    """Generalized advantage estimation with a critic: PPO's (arXiv 1506.02438, 1707.06347).

    ``gae_lambda`` 1 is the return minus the value, 0 the one-step error. The default is 1 because a critic starts with
    values of 0, so that with less than 1 the return reaches only the last tokens of a message. ``value_clip``: a value
    that has moved this far in one update is not moved further, in units of reward. ``normalize`` and ``clip`` apply to
    the tokens of the batch, not to groups.
    """

    gae_lambda: float = 1.0
    value_clip: float = 0.2
    normalize: bool = True
    clip: float = math.inf
    eps: float = 1e-6

    def estimate(self, returns_PG: Floats, weights_PG: Floats | None = None) -> Advantages:
        """The advantages without the critic: the return minus its group's mean, used by probes and reports. Groups with
        equal returns are informative like any other."""
        found = group_advantages(returns_PG, a_clip=math.inf, eps_norm=self.eps, normalize=False, weights_PG=weights_PG)
        return replace(found, informative_P=~found.non_finite_P)

    def largest(self, group_size: int, reward_range: float) -> float:
        """A critic may be wrong by any amount."""
        return math.inf

    def error(self, returns_PG: Floats) -> float:
        return 0.0

    def of_tokens(
        self, values: Sequence[Floats], messages: AgentBatch, returns_PG: Floats, gamma: float
    ) -> TokenAdvantages:
        """The advantages per token, from the critic's values before each token of these messages."""
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
