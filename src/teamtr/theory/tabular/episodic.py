"""What is trained: a few turns, the state is the whole history, a return at the end; solved by enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from teamtr.theory.tabular.messages import Ints, MessageSpace, kl, log_softmax, tv
from teamtr.types import Floats

NOBODY = -1
"""The speaker where an episode has stopped."""


@dataclass(frozen=True, eq=False)
class EpisodicTeam:
    """Teams that play H turns and are paid for the whole history.

    At turn t in history h, agent ``active[t][b, h]`` speaks with the policy row ``rows[t][h]`` of its own table
    ``logits_BnRKV[b, agent]``. Any sum of rewards along the way is a function of the last history, so ``reward_BN``
    covers dense and discounted rewards too. After an episode has stopped (``NOBODY`` speaks), message 0 follows.
    """

    space: MessageSpace
    logits_BnRKV: Floats
    rows: tuple[Ints, ...]
    active: tuple[Ints, ...]
    start_BX: Floats
    reward_BN: Floats

    @property
    def horizon(self) -> int:
        return len(self.rows)

    @property
    def agents(self) -> int:
        return self.logits_BnRKV.shape[1]

    @cached_property
    def token_logp(self) -> tuple[Floats, ...]:
        """Token log-probabilities of the speaker, (B, N, K, V) for each turn."""
        logp_BnRKV = log_softmax(self.logits_BnRKV)
        batch_B1 = np.arange(len(self.logits_BnRKV))[:, None]
        return tuple(
            logp_BnRKV[batch_B1, np.maximum(active_BN, 0), rows_N]
            for rows_N, active_BN in zip(self.rows, self.active, strict=True)
        )

    @cached_property
    def logp(self) -> tuple[Floats, ...]:
        """Message log-probabilities of the speaker, (B, N, A) for each turn; without meaning where nobody speaks."""
        return tuple(self.space.message_logprobs(logp) for logp in self.token_logp)

    @cached_property
    def policies(self) -> tuple[Floats, ...]:
        """Message probabilities, (B, N, A) for each turn; message 0 where nobody speaks."""
        silence_A = np.eye(self.space.size)[0]
        return tuple(
            np.where(active_BN[:, :, None] == NOBODY, silence_A, np.exp(logp_BNA))
            for active_BN, logp_BNA in zip(self.active, self.logp, strict=True)
        )

    @cached_property
    def visits(self) -> tuple[Floats, ...]:
        """Pr(h_t = h), (B, N) for each turn and, last, for the end."""
        visits = [self.start_BX]
        for policy_BNA in self.policies:
            visits.append((visits[-1][:, :, None] * policy_BNA).reshape(len(self.start_BX), -1))
        return tuple(visits)

    @cached_property
    def values(self) -> tuple[Floats, ...]:
        """V(h) = E(return | h), (B, N) for each turn and, last, for the end."""
        values = [self.reward_BN]
        for policy_BNA in reversed(self.policies):
            values.append((policy_BNA * values[-1].reshape(policy_BNA.shape)).sum(axis=-1))
        return tuple(reversed(values))

    @cached_property
    def advantages(self) -> tuple[Floats, ...]:
        """A(h, a) = V(h a) - V(h), (B, N, A) for each turn."""
        return tuple(
            after_BN.reshape(policy_BNA.shape) - value_BN[:, :, None]
            for policy_BNA, value_BN, after_BN in zip(self.policies, self.values[:-1], self.values[1:], strict=True)
        )

    @cached_property
    def return_B(self) -> Floats:
        return np.einsum("bx,bx->b", self.start_BX, self.values[0])

    @cached_property
    def reward_range_B(self) -> Floats:
        """Largest minus smallest return of a history."""
        return np.asarray(self.reward_BN.max(axis=1) - self.reward_BN.min(axis=1))

    def turns_before(self, agents: Sequence[int]) -> tuple[Ints, ...]:
        """How many turns these agents had before turn t in history h, (B, N) for each turn."""
        counts = [np.zeros(self.start_BX.shape, dtype=np.int64)]
        for active_BN in self.active[:-1]:
            after_BN = counts[-1] + np.isin(active_BN, agents)
            counts.append(np.repeat(after_BN, self.space.size, axis=1))
        return tuple(counts)

    def replace_agent(self, agent: int, logits_BRKV: Floats) -> EpisodicTeam:
        """The team with this agent's whole table replaced (eq:intermediate_policies)."""
        logits_BnRKV = self.logits_BnRKV.copy()
        logits_BnRKV[:, agent] = logits_BRKV
        return replace(self, logits_BnRKV=logits_BnRKV)


@dataclass(frozen=True, eq=False)
class EpisodicStep:
    """From one team to another that differs in ``agents`` only."""

    old: EpisodicTeam
    new: EpisodicTeam
    agents: tuple[int, ...]

    @cached_property
    def kl(self) -> tuple[Floats, ...]:
        """KL(cur || new) of the message in each history, (B, N) for each turn."""
        return tuple(
            np.where(active_BN == NOBODY, 0.0, kl(old_BNA, new_BNA))
            for active_BN, old_BNA, new_BNA in zip(self.old.active, self.old.logp, self.new.logp, strict=True)
        )

    @cached_property
    def tv(self) -> tuple[Floats, ...]:
        return tuple(tv(p, q) for p, q in zip(self.old.policies, self.new.policies, strict=True))

    @cached_property
    def expected_advantage(self) -> tuple[Floats, ...]:
        """f_t(h) = E over a ~ new of A^old(h, a), (B, N) for each turn; 0 where the updated agents do not speak."""
        return tuple(
            ((new_BNA - old_BNA) * advantage_BNA).sum(axis=-1)
            for old_BNA, new_BNA, advantage_BNA in zip(
                self.old.policies, self.new.policies, self.old.advantages, strict=True
            )
        )

    @cached_property
    def surrogate_B(self) -> Floats:
        """Sum over turns of E over h_t ~ old of f_t: eq:surrogate for an episode."""
        pairs = zip(self.old.visits, self.expected_advantage, strict=False)  # the last visits are of the end
        return np.asarray(sum(np.einsum("bn,bn->b", visits_BN, f_BN) for visits_BN, f_BN in pairs))

    @cached_property
    def gain_B(self) -> Floats:
        return np.asarray(self.new.return_B - self.old.return_B)

    def by_own_turn(self, values: Sequence[Floats]) -> Floats:
        """E under old of a value (B, N) per turn, at the k-th turn of the updated agents: (B, H), 0 if there is none.

        Counted by their own turns and not by the clock: 0 is the first time that any of them speaks.
        """
        result_BK = np.zeros((len(self.old.start_BX), self.old.horizon))
        before = self.old.turns_before(self.agents)
        for t, values_BN in enumerate(values):
            weighted_BN = self.old.visits[t] * values_BN * np.isin(self.old.active[t], self.agents)
            for k in range(t + 1):
                result_BK[:, k] += np.where(before[t] == k, weighted_BN, 0.0).sum(axis=1)
        return result_BK

    @cached_property
    def turns_B(self) -> Ints:
        """How many turns the updated agents may have in an episode, in any history that the router allows."""
        most_B = np.zeros(len(self.old.start_BX), dtype=np.int64)
        for active_BN, before_BN in zip(self.old.active, self.old.turns_before(self.agents), strict=True):
            most_B = np.maximum(most_B, (before_BN + np.isin(active_BN, self.agents)).max(axis=1))
        return most_B

    @cached_property
    def kl_by_turn_BK(self) -> Floats:
        return self.by_own_turn(self.kl)

    @cached_property
    def tv_by_turn_BK(self) -> Floats:
        return self.by_own_turn(self.tv)


@dataclass(frozen=True, eq=False)
class EpisodicStage:
    """A stage of episodic teams; see ``DiscountedStage``."""

    teams: tuple[EpisodicTeam, ...]
    order: tuple[int, ...]
    family: str = "random"

    @cached_property
    def steps(self) -> tuple[EpisodicStep, ...]:
        return tuple(
            EpisodicStep(a, b, (agent,))
            for a, b, agent in zip(self.teams[:-1], self.teams[1:], self.order, strict=True)
        )

    @cached_property
    def whole(self) -> EpisodicStep:
        """The stage as one step of all agents together."""
        return EpisodicStep(self.teams[0], self.teams[-1], tuple(sorted(self.order)))
