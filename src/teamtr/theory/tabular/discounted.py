"""The paper's setting (sec:theory:setup), solved by linear algebra: teams, one step between two, a stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from teamtr.theory.tabular.messages import Ints, MessageSpace, kl, log_softmax, tv
from teamtr.types import Floats


@dataclass(frozen=True, eq=False)
class DiscountedTeam:
    """Teams of sec:theory:setup. The speaker is a function of the state, as lem:activefactor needs.

    State s is spoken in by agent ``active_BS[b, s]`` with the policy row ``row_BS[b, s]``; states that share a row
    look alike to their speaker.
    """

    space: MessageSpace
    agents: int
    logits_BSKV: Floats
    row_BS: Ints
    active_BS: Ints
    transition_BSAS: Floats
    reward_BSA: Floats
    start_BS: Floats
    gamma_B: Floats

    @cached_property
    def token_logp_BSKV(self) -> Floats:
        return log_softmax(np.take_along_axis(self.logits_BSKV, self.row_BS[:, :, None, None], axis=1))

    @cached_property
    def logp_BSA(self) -> Floats:
        return self.space.message_logprobs(self.token_logp_BSKV)

    @cached_property
    def policy_BSA(self) -> Floats:
        return np.exp(self.logp_BSA)

    @cached_property
    def kernel_BSS(self) -> Floats:
        """P_pi(s' | s)."""
        return np.einsum("bsa,bsat->bst", self.policy_BSA, self.transition_BSAS)

    @cached_property
    def _resolvent_BSS(self) -> Floats:
        """(I - gamma P_pi)^-1."""
        identity = np.eye(self.start_BS.shape[1])
        return np.asarray(np.linalg.inv(identity - self.gamma_B[:, None, None] * self.kernel_BSS), dtype=np.float64)

    @cached_property
    def value_BS(self) -> Floats:
        reward_BS = np.einsum("bsa,bsa->bs", self.policy_BSA, self.reward_BSA)
        return np.einsum("bst,bt->bs", self._resolvent_BSS, reward_BS)

    @cached_property
    def q_BSA(self) -> Floats:
        ahead_BSA = np.einsum("bsat,bt->bsa", self.transition_BSAS, self.value_BS)
        return np.asarray(self.reward_BSA + self.gamma_B[:, None, None] * ahead_BSA)

    @cached_property
    def advantage_BSA(self) -> Floats:
        return np.asarray(self.q_BSA - self.value_BS[:, :, None])

    @cached_property
    def occupancy_BS(self) -> Floats:
        """d^pi = (1 - gamma) sum_t gamma^t Pr(s_t = s)."""
        visits_BS = np.einsum("bs,bst->bt", self.start_BS, self._resolvent_BSS)
        return np.asarray((1.0 - self.gamma_B)[:, None] * visits_BS)

    @cached_property
    def return_B(self) -> Floats:
        return np.einsum("bs,bs->b", self.start_BS, self.value_BS)

    @cached_property
    def q_range_B(self) -> Floats:
        """The largest max_a Q(s, a) - min_a Q(s, a) over states."""
        return np.asarray((self.q_BSA.max(axis=2) - self.q_BSA.min(axis=2)).max(axis=1))

    @cached_property
    def a_max_B(self) -> Floats:
        """The smallest A_max: the largest |A^pi| over states and messages."""
        return np.asarray(np.abs(self.advantage_BSA).max(axis=(1, 2)))

    def expect(self, f_BS: Floats) -> Floats:
        """E over s ~ d^pi of f."""
        return np.einsum("bs,bs->b", self.occupancy_BS, f_BS)

    def replace_agent(self, agent: int, logits_BSKV: Floats) -> DiscountedTeam:
        """The team with this agent's rows taken from ``logits_BSKV`` (eq:intermediate_policies)."""
        own_BS = self.active_BS == agent
        return replace(self, logits_BSKV=np.where(own_BS[:, :, None, None], logits_BSKV, self.logits_BSKV))


@dataclass(frozen=True, eq=False)
class DiscountedStep:
    """From one team to another that differs in one agent (or in several, for a whole stage)."""

    old: DiscountedTeam
    new: DiscountedTeam

    @cached_property
    def kl_BS(self) -> Floats:
        """KL(cur || new) of the message in each state, from the enumerated messages."""
        return kl(self.old.logp_BSA, self.new.logp_BSA)

    @cached_property
    def token_kl_BSK(self) -> Floats:
        """KL(cur || new) of the next token after each prefix."""
        return kl(self.old.token_logp_BSKV, self.new.token_logp_BSKV)

    @cached_property
    def chained_kl_BSA(self) -> Floats:
        """S(m) of lem:avgvssum: the sum of the token KLs along each message; its mean under cur is lem:chainrule."""
        return self.old.space.per_message(self.token_kl_BSK)

    @cached_property
    def tv_BS(self) -> Floats:
        return tv(self.old.policy_BSA, self.new.policy_BSA)

    @cached_property
    def kl_B(self) -> Floats:
        """D_tok of eq:kltokdef with the old team as reference: the delta of eq:tr."""
        return self.old.expect(self.kl_BS)

    @cached_property
    def tv_B(self) -> Floats:
        return self.old.expect(self.tv_BS)

    @cached_property
    def expected_advantage_BS(self) -> Floats:
        """f(s) = E over a ~ new of A^old(s, a); 0 where another agent speaks (lem:centerapp)."""
        difference_BSA = self.new.policy_BSA - self.old.policy_BSA  # E_old A = 0: less rounding than E_new A
        return np.einsum("bsa,bsa->bs", difference_BSA, self.old.advantage_BSA)

    @cached_property
    def surrogate_B(self) -> Floats:
        """L^seq of eq:surrogate with the true advantage."""
        return np.asarray(self.old.expect(self.expected_advantage_BS) / (1.0 - self.old.gamma_B))

    def surrogate_of(self, estimate_BSA: Floats, states_BS: Floats | None = None) -> Floats:
        """eq:surrogate with an estimate of the advantage; eq:surrogate_stale with another occupancy of states."""
        states_BS = self.old.occupancy_BS if states_BS is None else states_BS
        mean_B = np.einsum("bs,bsa,bsa->b", states_BS, self.new.policy_BSA, estimate_BSA)
        return np.asarray(mean_B / (1.0 - self.old.gamma_B))

    def zeta_of(self, estimate_BSA: Floats) -> Floats:
        """eq:bias with the realised estimate: |E over d^old, a ~ new of (estimate - A^old)|."""
        error_B = self.surrogate_of(estimate_BSA) - self.surrogate_B
        return np.asarray(np.abs(error_B) * (1.0 - self.old.gamma_B))

    @cached_property
    def gain_B(self) -> Floats:
        return np.asarray(self.new.return_B - self.old.return_B)


@dataclass(frozen=True, eq=False)
class DiscountedStage:
    """A stage (eq:intermediate_policies): ``teams[0]`` before it, ``teams[i]`` after agent ``order[i - 1]``."""

    teams: tuple[DiscountedTeam, ...]
    order: tuple[int, ...]
    family: str = "random"

    @cached_property
    def steps(self) -> tuple[DiscountedStep, ...]:
        return tuple(DiscountedStep(a, b) for a, b in zip(self.teams[:-1], self.teams[1:], strict=True))

    @cached_property
    def whole(self) -> DiscountedStep:
        """The stage as one step of all agents together."""
        return DiscountedStep(self.teams[0], self.teams[-1])
