"""Teams small enough to solve: exact values, occupancies and KLs, for many teams of one shape at once.

Two kinds, both with messages that are token sequences, so that the token chain rule is real:

    DiscountedTeam   the paper's setting (sec:theory:setup): S states, one speaker per state, discount gamma.
    EpisodicTeam     what is trained: H turns, the state is the whole history, a return at the end. Routers may
                     depend on the history, episodes may stop early, agents may be blind to the current round.

Axis letters, besides those of ``types``:

    B  teams in a batch            S  states              A  messages that an agent can say
    K  prefixes of a message       V  vocabulary          T  token positions
    R  rows of an agent's policy   X  problems            H  turns of an episode
    N  histories at a turn, N = X * A**t: history h followed by message a is history h * A + a of the next turn

A policy is token logits per prefix; everything else follows. Logits are finite, so every message has mass.

A worked example::

    stage = random_discounted_stage(rng, size=100, agents=3, states=5, space=MessageSpace(2, 2))
    old, new = stage.teams[0], stage.teams[1]          # the first agent in stage.order was updated
    new.return_B - old.return_B                        # exact gains, one per team
    stage.steps[0].surrogate_B, stage.steps[0].kl_B    # L_1^seq and D_tok of eq:tr
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from teamtr.types import Floats

Ints = NDArray[np.int64]
Visibility = Literal["everything", "blind_round", "nothing"]
Router = Literal["cyclic", "addressed", "table"]
Rewards = Literal["sparse", "dense", "signed"]

NOBODY = -1
"""The speaker where an episode has stopped."""

LOGIT_BOUND = 300.0
"""No update moves a logit further than this: beyond it a probability leaves the range of float64."""


# -- messages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MessageSpace:
    """All messages over a vocabulary: of exactly ``length`` tokens, or, if ``ends``, up to ``length``.

    With ``ends``, symbol 0 is the end token; a message that reaches ``length`` without it is cut there and counts as
    it stands. ``MessageSpace(2, 2, ends=True)`` has the three messages (0), (1, 0) and (1, 1).
    """

    vocabulary: int
    length: int
    ends: bool = False

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.length < 1:
            raise ValueError(f"a message needs two symbols and one token at least, got {self}")

    @cached_property
    def words(self) -> tuple[tuple[int, ...], ...]:
        """The messages, in the order of their numbers."""

        def finish(prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
            if len(prefix) == self.length or (self.ends and prefix[-1:] == (0,)):
                return [prefix]
            return [word for token in range(self.vocabulary) for word in finish((*prefix, token))]

        return tuple(finish(()))

    @cached_property
    def prefixes(self) -> tuple[tuple[int, ...], ...]:
        """What may stand before a token; one row of logits each."""
        return tuple(sorted({word[:u] for word in self.words for u in range(len(word))}, key=lambda p: (len(p), p)))

    @cached_property
    def lengths_A(self) -> Ints:
        return np.array([len(word) for word in self.words], dtype=np.int64)

    @cached_property
    def path_AKV(self) -> Floats:
        """1 where message a says token v after prefix k."""
        index = {prefix: k for k, prefix in enumerate(self.prefixes)}
        path = np.zeros((len(self.words), len(self.prefixes), self.vocabulary))
        for a, word in enumerate(self.words):
            for u, token in enumerate(word):
                path[a, index[word[:u]], token] = 1.0
        return path

    @property
    def size(self) -> int:
        return len(self.words)

    def message_logprobs(self, token_logp: Floats) -> Floats:
        """log pi(m) of every message from token log-probabilities (..., K, V): the sum along its tokens."""
        path = self.path_AKV.reshape(self.size, -1)
        return np.asarray(token_logp.reshape(*token_logp.shape[:-2], -1) @ path.T)

    def token_mass(self, per_message: Floats) -> Floats:
        """Sum of (..., A) over the messages that pass through each prefix and token: (..., K, V)."""
        flat = per_message @ self.path_AKV.reshape(self.size, -1)
        return np.asarray(flat.reshape(*per_message.shape[:-1], len(self.prefixes), self.vocabulary))

    def per_message(self, per_prefix: Floats) -> Floats:
        """Sum of (..., K) over the prefixes of each message: (..., A); with token KLs, S(m) of lem:avgvssum."""
        return np.asarray(per_prefix @ self.path_AKV.sum(axis=-1).T)


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def kl(logp: Floats, logq: Floats) -> Floats:
    """KL(p || q) over the last axis, as a sum of terms p (exp(d) - 1 - d) >= 0 with d = log q - log p.

    The textbook sum loses all digits for small steps; see ``theory.kl.kl_cur_to_new``.
    """
    d, p = logq - logp, np.exp(logp)
    far = np.exp(logq) - p * (1.0 + d)  # p exp(d) is q, which cannot overflow
    terms = np.where(np.abs(d) < 1.0, p * (np.expm1(np.clip(d, -1.0, 1.0)) - d), far)
    return np.asarray(np.maximum(terms, 0.0).sum(axis=-1))


def tv(p: Floats, q: Floats) -> Floats:
    """Total variation over the last axis."""
    return np.asarray(0.5 * np.abs(p - q).sum(axis=-1))


# -- discounted teams ----------------------------------------------------------------------------------------


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


# -- episodic teams ------------------------------------------------------------------------------------------


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


# -- updates -------------------------------------------------------------------------------------------------


def scale_to_radius(logits: Floats, direction: Floats, weight: Floats, radius_B: Floats) -> Floats:
    """The step length c_B at which the expected KL from ``logits`` to ``logits + c * direction`` is the radius.

    ``logits`` and ``direction`` are (B, ..., V), ``weight`` (B, ...) holds how often each row of tokens is used. The
    expected KL is D(c) = sum of weight * (lse(l + c u) - lse(l) - c p.u), convex and increasing in c >= 0: bisection
    of log c encloses the answer, and a few secant steps of log D against log c, almost a straight line, finish it to
    twelve digits. At most the length that moves some logit by ``LOGIT_BOUND``, where the radius is out of reach.
    """
    batch, vocabulary = len(logits), logits.shape[-1]
    logp, u = log_softmax(logits).reshape(batch, -1, vocabulary), direction.reshape(batch, -1, vocabulary)
    w = weight.reshape(batch, -1)
    mean_u = np.einsum("brv,brv->br", np.exp(logp), u)

    def excess(x_B: Floats) -> Floats:
        """log D(exp(x)) - log radius."""
        c_B = np.exp(x_B)
        exponent = logp + c_B[:, None, None] * u
        top = exponent.max(axis=-1)
        lse = top + np.log(np.exp(exponent - top[..., None]).sum(axis=-1))
        kl_B = np.einsum("br,br->b", w, np.maximum(lse - c_B[:, None] * mean_u, 0.0))
        return np.asarray(np.log(np.maximum(kl_B, 1e-300)) - np.log(radius_B))

    longest_B = np.log(LOGIT_BOUND) - np.log(np.maximum(np.abs(u).max(axis=(1, 2)), 1e-100))
    low_B, high_B = longest_B - 28.0, longest_B
    for _ in range(12):
        middle_B = 0.5 * (low_B + high_B)
        inside_B = excess(middle_B) <= 0.0
        low_B, high_B = np.where(inside_B, middle_B, low_B), np.where(inside_B, high_B, middle_B)
    x_B, y_B = low_B, excess(low_B)
    next_B, next_y_B = high_B, excess(high_B)
    for _ in range(3):
        slope_B = np.where(
            np.abs(next_B - x_B) > 1e-15, (next_y_B - y_B) / np.where(next_B == x_B, 1.0, next_B - x_B), 2
        )
        better_B = np.clip(next_B - next_y_B / np.maximum(slope_B, 0.1), low_B, high_B)
        x_B, y_B, next_B = next_B, next_y_B, better_B
        next_y_B = excess(next_B)
    return np.exp(next_B)


UPDATES = ("random", "natural", "gradient", "against", "flip", "unseen")
"""Kinds of update: a random direction; the natural and the plain policy gradient; down the natural gradient; towards
one message everywhere, by 5 to 40 in the logits, whatever the KL; a random direction that is stronger the rarer the
state, so that the radius does not see most of it."""


def _update_directions(
    rng: np.random.Generator, kind_B: Ints, token_advantage: Floats, reach: Floats, row_weight: Floats
) -> Floats:
    """One direction (B, rows, K, V) per team by its kind. ``row_weight`` (B, rows) is how often a row is used."""
    noise = rng.standard_normal(token_advantage.shape)
    target = rng.integers(token_advantage.shape[-1], size=token_advantage.shape[:-1])
    flip = np.eye(token_advantage.shape[-1])[target]
    weight = (row_weight[:, :, None] * reach)[..., None]
    rare = noise / (row_weight[:, :, None, None] + 1e-3)
    return np.asarray(
        np.select(
            [kind_B[:, None, None, None] == k for k in range(len(UPDATES))],
            [noise, token_advantage, token_advantage * weight, -token_advantage, flip, rare],
        )
    )


def _step_length(
    rng: np.random.Generator, kind_B: Ints, logits: Floats, direction: Floats, weight: Floats, radius_B: Floats | None
) -> Floats:
    if radius_B is None:
        drawn_B = 10.0 ** rng.uniform(-5.0, 0.5, size=len(logits))
        far_B = rng.uniform(5.0, 40.0, size=len(logits))
        exact_B = scale_to_radius(logits, direction, weight, drawn_B)
        return np.where(kind_B == UPDATES.index("flip"), far_B, exact_B)
    return scale_to_radius(logits, direction, weight, radius_B)


def update_discounted(
    rng: np.random.Generator,
    team: DiscountedTeam,
    agent: int,
    *,
    kinds: Sequence[str] = UPDATES,
    radius_B: Floats | None = None,
) -> DiscountedTeam:
    """One agent moved along a direction of a random kind per team.

    With ``radius_B``, exactly to that D_tok (eq:tr); without, to a radius between 1e-5 and 3, or, for flips, by a
    length that ignores the radius.
    """
    space, size = team.space, len(team.gamma_B)
    kind_B = np.array([UPDATES.index(kind) for kind in kinds])[rng.integers(len(kinds), size=size)]
    own_BS = team.active_BS == agent
    used_BS = team.occupancy_BS * own_BS
    # Sums over the states that share a row.
    row_BSR = np.eye(used_BS.shape[1])[team.row_BS]
    mass_BRKV = np.einsum("bsr,bskv->brkv", row_BSR, space.token_mass(used_BS[..., None] * team.policy_BSA))
    earned_BSA = used_BS[..., None] * team.policy_BSA * team.advantage_BSA
    earned_BRKV = np.einsum("bsr,bskv->brkv", row_BSR, space.token_mass(earned_BSA))
    token_advantage = earned_BRKV / np.maximum(mass_BRKV, 1e-300)
    weight_BRK = mass_BRKV.sum(axis=-1)
    row_weight_BR = np.einsum("bsr,bs->br", row_BSR, used_BS)
    reach_BRK = weight_BRK / np.maximum(row_weight_BR[:, :, None], 1e-300)
    direction = _update_directions(rng, kind_B, token_advantage, reach_BRK, row_weight_BR)
    direction *= own_BS[:, :, None, None]
    length_B = _step_length(rng, kind_B, team.logits_BSKV, direction, weight_BRK, radius_B)
    return team.replace_agent(agent, team.logits_BSKV + length_B[:, None, None, None] * direction)


def update_episodic(
    rng: np.random.Generator,
    team: EpisodicTeam,
    agent: int,
    *,
    kinds: Sequence[str] = UPDATES,
    radius_B: Floats | None = None,
) -> EpisodicTeam:
    """One agent moved along a direction of a random kind per team; see ``update_discounted``.

    The radius is the mean KL of a message of this agent: nats per message, as in training.
    """
    space, size = team.space, len(team.start_BX)
    kind_B = np.array([UPDATES.index(kind) for kind in kinds])[rng.integers(len(kinds), size=size)]
    logits_BRKV = team.logits_BnRKV[:, agent]
    mass_BRA, earned_BRA = np.zeros((2, *logits_BRKV.shape[:2], space.size))
    for t in range(team.horizon):
        used_BNA = (team.visits[t] * (team.active[t] == agent))[..., None] * team.policies[t]
        _add_to_rows(mass_BRA, team.rows[t], used_BNA)
        _add_to_rows(earned_BRA, team.rows[t], used_BNA * team.advantages[t])
    mass_BRKV = space.token_mass(mass_BRA)
    token_advantage = space.token_mass(earned_BRA) / np.maximum(mass_BRKV, 1e-300)
    messages_B = np.maximum(mass_BRA.sum(axis=(1, 2)), 1e-300)  # expected messages of the agent in an episode
    weight_BRK = mass_BRKV.sum(axis=-1) / messages_B[:, None, None]
    row_weight_BR = mass_BRA.sum(axis=-1)
    reach_BRK = mass_BRKV.sum(axis=-1) / np.maximum(row_weight_BR[:, :, None], 1e-300)
    direction = _update_directions(rng, kind_B, token_advantage, reach_BRK, row_weight_BR)
    length_B = _step_length(rng, kind_B, logits_BRKV, direction, weight_BRK, radius_B)
    return team.replace_agent(agent, logits_BRKV + length_B[:, None, None, None] * direction)


def _add_to_rows(total_BRA: Floats, rows_N: Ints, values_BNA: Floats) -> None:
    """Add each history's values to its policy row, in place."""
    first, count = int(rows_N.min()), int(rows_N.max() - rows_N.min()) + 1
    if count == len(rows_N):  # every history has its own row, in order
        total_BRA[:, first : first + count] += values_BNA
    else:
        total_BRA[:, first : first + count] += np.eye(count)[rows_N - first].T @ values_BNA


# -- random teams --------------------------------------------------------------------------------------------


def random_discounted_team(
    rng: np.random.Generator,
    size: int,
    *,
    agents: int,
    states: int,
    space: MessageSpace,
    router: Literal["cyclic", "table"] = "table",
    rewards: Rewards = "dense",
    aliased: bool = False,
    gamma_B: Floats | None = None,
) -> DiscountedTeam:
    """Random teams. Sharpness of the policies, sparsity of the transitions and gamma vary from team to team.

    ``router``: "table" draws a speaker per state; "cyclic" makes agents speak in turn (states of agent j lead to
    states of agent j + 1). ``aliased``: each agent tells its states apart only in pairs.
    """
    if router == "cyclic":
        active_BS = np.broadcast_to(np.arange(states) % agents, (size, states)).astype(np.int64)
    else:
        active_BS = rng.integers(agents, size=(size, states))
    concentration_B = rng.choice([0.05, 0.3, 1.0], size=size)
    transition = rng.gamma(concentration_B[:, None, None, None], size=(size, states, space.size, states)) + 1e-12
    if router == "cyclic":
        follows_BSS = active_BS[:, None, :] == (active_BS[:, :, None] + 1) % agents
        transition = transition * (follows_BSS | ~follows_BSS.any(axis=2, keepdims=True))[:, :, None, :]
    start = rng.gamma(rng.choice([0.1, 1.0], size=size)[:, None], size=(size, states)) + 1e-12
    row_BS = np.broadcast_to(np.arange(states), (size, states)).astype(np.int64)
    if aliased:
        same_BSS = active_BS[:, :, None] == active_BS[:, None, :]
        near_SS = np.arange(states)[:, None] // 2 == np.arange(states)[None, :] // 2
        row_BS = (same_BSS & near_SS).argmax(axis=2)
    return DiscountedTeam(
        space=space,
        agents=agents,
        logits_BSKV=_random_logits(rng, size, (states,), space),
        row_BS=row_BS,
        active_BS=active_BS,
        transition_BSAS=transition / transition.sum(axis=-1, keepdims=True),
        reward_BSA=_random_rewards(rng, (size, states, space.size), rewards),
        start_BS=start / start.sum(axis=-1, keepdims=True),
        gamma_B=rng.choice([0.05, 0.3, 0.5, 0.7, 0.9, 0.97], size=size) if gamma_B is None else gamma_B,
    )


def random_discounted_stage(
    rng: np.random.Generator,
    size: int,
    *,
    agents: int,
    states: int,
    space: MessageSpace,
    router: Literal["cyclic", "table"] = "table",
    rewards: Rewards = "dense",
    aliased: bool = False,
    kinds: Sequence[str] = UPDATES,
    radius: float | None = None,
) -> DiscountedStage:
    """A random team and one random update of each agent, in a random order."""
    team = random_discounted_team(
        rng, size, agents=agents, states=states, space=space, router=router, rewards=rewards, aliased=aliased
    )
    order = tuple(int(j) for j in rng.permutation(agents))
    radius_B = None if radius is None else np.full(size, radius)
    teams = [team]
    for agent in order:
        teams.append(update_discounted(rng, teams[-1], agent, kinds=kinds, radius_B=radius_B))
    return DiscountedStage(tuple(teams), order)


def random_episodic_team(
    rng: np.random.Generator,
    size: int,
    *,
    agents: int,
    horizon: int,
    space: MessageSpace,
    problems: int = 1,
    router: Router = "cyclic",
    visibility: Visibility = "everything",
    rewards: Rewards = "dense",
    stops: bool = False,
) -> EpisodicTeam:
    """Random teams of one shape.

    ``router``: "cyclic"; "addressed" (the last message names the next speaker); "table" (a speaker per history).
    ``visibility``: agents see the whole history, or not the current round of ``agents`` turns, or not even which
    turn it is. ``stops``: from the second turn on, some messages end the episode.
    """
    rows, active = _policy_rows(agents, horizon, space.size, problems, visibility), []
    address_BA = rng.integers(agents, size=(size, space.size))
    stopping_BA = rng.random((size, space.size)) < 0.3
    stopped_BN = np.zeros((size, problems), dtype=bool)
    for t in range(horizon):
        histories = problems * space.size**t
        if router == "cyclic":
            speaker_BN = np.full((size, histories), t % agents)
        elif router == "addressed" and t > 0:
            speaker_BN = np.tile(address_BA, (1, histories // space.size))
        else:
            speaker_BN = rng.integers(agents, size=(size, histories))
        active.append(np.where(stopped_BN, NOBODY, speaker_BN))
        stopped_BN = np.repeat(stopped_BN, space.size, axis=1)
        if stops and t >= 1:
            stopped_BN = stopped_BN | np.tile(stopping_BA, (1, histories))
    total_rows = 1 + max(int(rows_N.max()) for rows_N in rows)
    start = rng.gamma(1.0, size=(size, problems)) + 1e-12
    return EpisodicTeam(
        space=space,
        logits_BnRKV=_random_logits(rng, size, (agents, total_rows), space),
        rows=rows,
        active=tuple(active),
        start_BX=start / start.sum(axis=-1, keepdims=True),
        reward_BN=_random_rewards(rng, (size, problems * space.size**horizon), rewards),
    )


def random_episodic_stage(
    rng: np.random.Generator,
    size: int,
    *,
    agents: int,
    horizon: int,
    space: MessageSpace,
    problems: int = 1,
    router: Router = "cyclic",
    visibility: Visibility = "everything",
    rewards: Rewards = "dense",
    stops: bool = False,
    kinds: Sequence[str] = UPDATES,
    radius: float | None = None,
) -> EpisodicStage:
    """A random team and one random update of each agent, in a random order; ``radius`` in nats per message."""
    team = random_episodic_team(
        rng,
        size,
        agents=agents,
        horizon=horizon,
        space=space,
        problems=problems,
        router=router,
        visibility=visibility,
        rewards=rewards,
        stops=stops,
    )
    order = tuple(int(j) for j in rng.permutation(agents))
    radius_B = None if radius is None else np.full(size, radius)
    teams = [team]
    for agent in order:
        teams.append(update_episodic(rng, teams[-1], agent, kinds=kinds, radius_B=radius_B))
    return EpisodicStage(tuple(teams), order)


def _policy_rows(agents: int, horizon: int, messages: int, problems: int, visibility: Visibility) -> tuple[Ints, ...]:
    """Which row of its table the speaker uses in each history: one per thing that it can tell apart."""
    rows, used = [], 0
    for t in range(horizon):
        history_N = np.arange(problems * messages**t)
        if visibility == "nothing":
            rows.append(np.zeros_like(history_N))
            continue
        hidden = t % agents if visibility == "blind_round" else 0  # messages of the current round
        seen_N = history_N // messages**hidden
        rows.append(used + seen_N)
        used += int(seen_N.max()) + 1
    return tuple(rows)


def _random_logits(rng: np.random.Generator, size: int, rows: tuple[int, ...], space: MessageSpace) -> Floats:
    """Normal logits; their deviation, the sharpness, is one per team, from almost uniform to almost deterministic."""
    sharpness_B = rng.choice([0.1, 1.0, 2.5, 6.0], size=size)
    shape = (size, *rows, len(space.prefixes), space.vocabulary)
    return np.asarray(rng.standard_normal(shape) * sharpness_B.reshape(-1, *[1] * (len(shape) - 1)))


def _random_rewards(rng: np.random.Generator, shape: tuple[int, ...], rewards: Rewards) -> Floats:
    """Sparse: 1 with probability 0.15, at least once, else 0. Dense: uniform in [0, 1]. Signed: normal, any scale."""
    if rewards == "sparse":
        drawn = rng.random(shape)
        least = drawn.min(axis=tuple(range(1, len(shape))), keepdims=True)
        return np.asarray(((drawn < 0.15) | (drawn == least)).astype(np.float64))
    if rewards == "dense":
        return rng.random(shape)
    scale_B = 10.0 ** rng.uniform(-1.0, 1.0, size=shape[0])
    return np.asarray(rng.standard_normal(shape) * scale_B.reshape(-1, *[1] * (len(shape) - 1)))
