"""Certificates, lower bounds on the gain of an update: the paper's (app:certificates) and ours.

Each certificate is computed from numbers, or from arrays with a leading axis of teams; steps of a stage (I) and turns
of an agent (K) are the last axis. Training and the exact checks of ``teamtr.lab`` use the same functions.

The paper's bounds are never positive for gamma >= 1/2 (see ``surrogate_ceiling``): they bound f = E_new A by A_max,
though f is itself of the order of the step. Ours are of second order, need only the KL that the gate has measured, and
take into account who spoke when:

    turn_aware_certificate     episodes of finitely many turns, as in training
    second_order_certificate   the discounted setting of the paper
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from teamtr.reports import Certificate
from teamtr.theory.concentration import empirical_correction
from teamtr.theory.gain import bound_log_ratio
from teamtr.theory.occupancy import change_of_measure, cumulative_shift, shift_by_kl, tv_by_kl
from teamtr.types import Floats


def _certificate(kind: str, **terms: ArrayLike) -> Certificate:
    values = {name: np.asarray(term, dtype=np.float64) for name, term in terms.items()}
    total = np.asarray(sum(values.values()))
    if total.ndim == 0:
        return Certificate(kind, {name: float(value) for name, value in values.items()}, float(total))
    return Certificate(kind, values, total)


# -- the paper's ---------------------------------------------------------------------------------------------


def step_penalty(delta: ArrayLike, gamma: ArrayLike, a_max: ArrayLike) -> Floats:
    """sqrt(2) gamma / (1 - gamma)^2 * A_max * sqrt(delta): the occupancy term of eq:single_step_cert."""
    return np.asarray(shift_by_kl(gamma, delta, a_max) / (1.0 - np.asarray(gamma, dtype=np.float64)))


def single_step_certificate(
    surrogate: ArrayLike, delta: ArrayLike, zeta: ArrayLike, gamma: ArrayLike, a_max: ArrayLike
) -> Certificate:
    """thm:single, eq:single_step_cert. ``surrogate`` is L_i^seq, ``delta`` the D_tok of eq:tr under the old team.

    A condition that the text omits: ``zeta`` must compare the true advantage with the *realized* estimate in
    ``surrogate``, because the update was computed from it; with the printed expectation over the data the bound fails
    (``tests/theory/test_certificates.py``: optimism).

    For an episode of H turns without discount, use gamma = 1 - 1/H, delta = (sum of the turns' KLs) / H and the plain
    sum over turns as ``surrogate``. The paper only says that this can be done. Proof: the law of the history at turn
    t moves by TV_t <= sqrt(KL / 2) with KL the sum over all turns, and |f_t| <= A_max, so the gain is within
    sum over t >= 1 of 2 A_max TV_t <= (H - 1) A_max sqrt(2 KL) of the surrogate. The formula gives
    (1 - 1/H) H^2 A_max sqrt(2 KL / H) = (H - 1) sqrt(H) A_max sqrt(2 KL): valid, and too large by sqrt(H).
    """
    g = np.asarray(gamma, dtype=np.float64)
    return _certificate(
        "single_step",
        surrogate=surrogate,
        occupancy=-step_penalty(delta, gamma, a_max),
        estimation=-np.asarray(zeta, dtype=np.float64) / (1.0 - g),
    )


def stage_certificate(
    surrogates_I: ArrayLike, deltas_I: ArrayLike, zetas_I: ArrayLike, gamma: ArrayLike, a_max: ArrayLike
) -> Certificate:
    """thm:stage, eq:stage_cert: the sum of the steps' certificates, for any order of the steps.

    prop:tight: it does not decrease when one surrogate grows or one delta shrinks *and all else is unchanged*. The text
    omits the condition; a better step can make later ones worse (``tests/theory/test_certificates.py``). prop:pnp:
    nothing here depends on how an agent was obtained, so the bound also holds after a swap; the swap itself is bounded
    by ``information.mean_kl_envelope``.
    """
    g = np.asarray(gamma, dtype=np.float64)
    return _certificate(
        "stage",
        surrogate=np.asarray(surrogates_I, dtype=np.float64).sum(axis=-1),
        occupancy=-cumulative_shift(gamma, deltas_I, a_max) / (1.0 - g),
        estimation=-np.asarray(zetas_I, dtype=np.float64).sum(axis=-1) / (1.0 - g),
    )


def add_up(certificates: Sequence[Certificate]) -> Certificate:
    """The certificate of a stage from those of its steps (fresh batches): gains telescope, so the bounds add up term by
    term (the proof of thm:stage). All must be of one kind."""
    kinds = {certificate.kind for certificate in certificates}
    if len(kinds) != 1:
        raise ValueError(f"certificates of one kind add up, got {sorted(kinds)}")
    # Sorted, because a sum of floats depends on its order, which may differ in a log that was read back.
    names = sorted({name for certificate in certificates for name in certificate.terms})
    return _certificate(kinds.pop(), **{n: sum(c.terms.get(n, 0.0) for c in certificates) for n in names})


def stale_stage_certificate(
    stale_surrogates_I: ArrayLike, deltas_I: ArrayLike, zetas_I: ArrayLike, gamma: ArrayLike, a_max: ArrayLike
) -> Certificate:
    """thm:stage_stale, eq:stage_cert_stale_factored: penalty sum_i (sqrt(delta_i) + sum_{k<i} sqrt(delta_k)).

    For surrogates on states of the stage-start team with advantages of the *intermediate* team. Naive sequential
    training has no such advantages; ``joint_certificate`` is the bound for what it does.
    """
    deltas = np.asarray(deltas_I, dtype=np.float64)
    g = np.asarray(gamma, dtype=np.float64)
    times_I = np.arange(deltas.shape[-1], 0, -1)  # step k occurs in its own term and in those of all later steps
    return _certificate(
        "stage_stale",
        surrogate=np.asarray(stale_surrogates_I, dtype=np.float64).sum(axis=-1),
        occupancy=-cumulative_shift(gamma, deltas * times_I**2, a_max) / (1.0 - g),
        estimation=-np.asarray(zetas_I, dtype=np.float64).sum(axis=-1) / (1.0 - g),
    )


def stage_hp_certificate(
    surrogates_I: ArrayLike,
    deltas_I: ArrayLike,
    zetas_I: ArrayLike,
    groups_I: ArrayLike,
    *,
    gamma: ArrayLike,
    a_max: ArrayLike,
    a_clip: ArrayLike,
    eps_w: float,
    delta_conf: float,
    variances_I: ArrayLike | None = None,
) -> Certificate:
    """thm:stage-hp: the stage certificate from samples, with probability at least 1 - delta_conf.

    ``surrogates_I`` are means over ``groups_I`` groups that the updates were *not* trained on (a condition that the
    text omits). With their ``variances_I``, empirical Bernstein replaces Hoeffding.
    """
    surrogates = np.asarray(surrogates_I, dtype=np.float64)
    # Add an axis of steps to numbers per team.
    g, largest, clip = (np.asarray(value, dtype=np.float64)[..., None] for value in (gamma, a_max, a_clip))
    weight = 1.0 / (1.0 - g)
    correction = empirical_correction(
        surrogates,
        groups_I,
        a_clip=clip,
        eps_w=eps_w,
        weight=weight,
        radius=deltas_I,
        delta=delta_conf / surrogates.shape[-1],
        variance=variances_I,
    )
    paid = {
        "occupancy": step_penalty(deltas_I, g, largest),
        "estimation": np.asarray(zetas_I, dtype=np.float64) * weight,
        "sampling": correction.sampling,
        "ratio_clipping": correction.ratio_bias,
    }
    terms = {name: -np.broadcast_to(cost_I, surrogates.shape).sum(axis=-1) for name, cost_I in paid.items()}
    return _certificate("stage_hp", surrogate=surrogates.sum(axis=-1), **terms)


def surrogate_ceiling(delta: ArrayLike, gamma: ArrayLike, a_max: ArrayLike) -> Floats:
    """A_max sqrt(2 delta) / (1 - gamma) bounds the true surrogate: thm:single is never positive for gamma >= 1/2.

    E_cur A = 0, hence |f(s)| = |E_new A - E_cur A| <= 2 A_max TV(s), and Pinsker with Jensen. The penalty of
    eq:single_step_cert is gamma / (1 - gamma) times this.
    """
    d, g, a = (np.asarray(value, dtype=np.float64) for value in (delta, gamma, a_max))
    return np.asarray(a * np.sqrt(2.0 * d) / (1.0 - g))


# -- ours, discounted ----------------------------------------------------------------------------------------


def joint_certificate(surrogate: ArrayLike, delta: ArrayLike, gamma: ArrayLike, a_max: ArrayLike) -> Certificate:
    """Ours: a whole stage from one batch (naive sequential, or all agents together) is one step of the team.

    ``surrogate``: the sum over agents of 1/(1 - gamma) E of their own A^cur under the stage-start team, which naive
    training maximizes; ``delta``: the sum of the agents' D_tok, all under that team. Proof: the performance
    difference lemma with f(s) = E over a ~ new of A^cur(s, a), where in each state only its speaker counts; |f| <=
    A_max; and D_tok of the team is the sum of the agents' (lem:activefactor). Then lem:occ.

    With n equal radii the penalty grows like sqrt(n), *less* than the n of thm:stage and the n^2 of thm:stage_stale:
    the comparison of growth rates in rem:quad2lin compares proofs, not algorithms. The difference between stale and
    fresh is in the second order: see ``turn_aware_certificate``.
    """
    return _certificate("joint", surrogate=surrogate, occupancy=-step_penalty(delta, gamma, a_max))


def second_order_certificate(
    surrogate: ArrayLike, delta: ArrayLike, gamma: ArrayLike, q_range: ArrayLike
) -> Certificate:
    """Ours, discounted: gain >= L - q_range * X, X <= delta / (1 - gamma) * (g + sqrt(g)) with g = gamma / (1 - gamma).

    Linear in delta, where thm:single has its root, so that it is positive for small steps along any ascent direction.
    ``q_range`` bounds max_a Q(s, a) - min_a Q(s, a): the range of r over 1 - gamma suffices, and so does 2 A_max.
    Also holds for several agents at once.

    Proof. The gain is sum_t gamma^t E' f(s_t), the surrogate sum_t gamma^t E f(s_t), where E' and E are under the
    new and the old team and f(s) = E_new Q - E_cur Q, so |f(s)| <= q_range TV(s). The laws of s_t differ by a KL of at
    most k_t = sum over u < t of kappa_u, kappa_u = E KL(s_u) (chain rule and data processing), and E f(s_t)^2 <=
    q_range^2 kappa_t / 2 (Pinsker). By ``change_of_measure``, before its z is chosen and with one z for all t,

        surrogate - gain  <=  q_range / z * sum_t gamma^t (k_t + c(z) kappa_t / 2)
                          =   q_range / z * (gamma delta / (1 - gamma)^2 + c(z) delta / (2 (1 - gamma))),

    because sum_t gamma^t kappa_t = delta / (1 - gamma) and sum_t gamma^t k_t = sum_u kappa_u gamma^(u+1) / (1 - gamma).
    The best z gives X = change_of_measure(gamma delta / (1 - gamma)^2, delta / (2 (1 - gamma))). The paper's
    first-order bound with |f| <= q_range is used instead where it is smaller (large delta).
    """
    d, g, q = (np.asarray(value, dtype=np.float64) for value in (delta, gamma, q_range))
    second = q * change_of_measure(g * d / (1.0 - g) ** 2, d / (2.0 * (1.0 - g)))
    return _certificate(
        "second_order", surrogate=surrogate, occupancy=-np.minimum(second, step_penalty(delta, gamma, q_range))
    )


# -- ours, episodes ------------------------------------------------------------------------------------------


def turn_aware_penalties(
    kl_by_turn_K: ArrayLike,
    reward_range: ArrayLike,
    *,
    turns: ArrayLike | None = None,
    tv_by_turn_K: ArrayLike | None = None,
) -> Floats:
    """The penalty of each turn of the updated agent due to its earlier turns; 0 for the first. See
    ``turn_aware_certificate``."""
    kl_K = np.asarray(kl_by_turn_K, dtype=np.float64)
    if kl_K.ndim == 0 or not (kl_K >= 0.0).all() or not (np.asarray(reward_range) >= 0.0).all():
        raise ValueError(
            "turn_aware_penalties: one expected KL per turn of the agent, none below 0 (exact or upper, not the "
            f"sampled k1), and a range of at least 0 are needed, got {kl_K} and {np.asarray(reward_range)}"
        )
    tv_K = tv_by_kl(kl_K)
    if tv_by_turn_K is not None:
        tv_K = np.minimum(tv_K, np.asarray(tv_by_turn_K, dtype=np.float64))
    before_K = _sum_before(kl_K)
    moved_K = np.minimum(_sum_before(tv_K), tv_by_kl(before_K))
    first_K = moved_K + np.minimum(moved_K, tv_K)
    second_K = change_of_measure(before_K, np.minimum(kl_K / 2.0, tv_K))
    penalties_K = np.asarray(reward_range, dtype=np.float64)[..., None] * np.minimum(first_K, second_K)
    if turns is not None:
        beyond_K = np.arange(kl_K.shape[-1]) >= np.asarray(turns)[..., None]
        if (kl_K[np.broadcast_to(beyond_K, kl_K.shape)] > 0.0).any():
            raise ValueError(f"turn_aware_penalties: the agent spoke more often than the {turns} turns it may have")
        penalties_K = np.where(beyond_K, 0.0, penalties_K)
    return np.asarray(penalties_K)


def _sum_before(values_K: Floats) -> Floats:
    """At each turn the sum over the turns before it. Not cumsum minus the value, which loses digits to large values."""
    sums_K = np.cumsum(values_K, axis=-1)
    return np.concatenate([np.zeros_like(sums_K[..., :1]), sums_K[..., :-1]], axis=-1)


def turn_aware_certificate(
    surrogate_sum: ArrayLike,
    kl_by_turn_K: ArrayLike,
    reward_range: ArrayLike,
    *,
    turns: ArrayLike | None = None,
    tv_by_turn_K: ArrayLike | None = None,
    sampling_error: ArrayLike = 0.0,
) -> Certificate:
    """Ours: gain >= L - reward_range * sum over k >= 2 of (K_k + sqrt(K_k kappa_k)), K_k = kappa_1 + ... + kappa_(k-1).

    For one update of one agent j in a team that plays finite episodes with returns within a range of ``reward_range``;
    any router, any visibility, episodes of any lengths.

    Args:
        surrogate_sum: L, the expected *sum* over the agent's messages in an episode of (w - 1) A, in units of reward:
            ``surrogate_by_problem(...).mean()``.
        kl_by_turn_K: kappa_k, the mean over *all* episodes of the old team of KL(cur || new) of the agent's k-th
            message, 0 where it has no k-th message: ``by_own_turn``. One entry for each turn that the agent may have
            in an episode, observed or not: a turn that never occurs under the old team may occur under the new one.
        reward_range: largest minus smallest return, 1 for right or wrong.
        turns: how many turns the agent may have, if fewer than the entries of ``kl_by_turn_K``.
        tv_by_turn_K: the same means of the total variation, if known (tabular teams); they sharpen the bound.
        sampling_error: the amount to subtract from an estimated L, e.g. the half-width of its interval.

    The penalty is 0 if the agent speaks once (then the gain *is* L), and of the order of the KL otherwise.

    Proof. Let h_k be the history at the agent's k-th turn (the whole episode, if there is none), V and Q of the old
    team, f(h) = E over a ~ new of Q(h, a) - V(h), and tau(h) the TV between cur and new there.

    1. gain = sum_k E' f(h_k), with E' under the new team. This is the performance difference lemma: the return is V
       at the end, V(h) changes by A(h, a) when a is said, and where another agent speaks, or nobody, A has mean 0.
    2. L = sum_k E f(h_k), under the old team. So L - gain = sum_k (E - E') f(h_k), and the term of k = 1 is 0: up to
       its first message nothing in the episode depends on j.
    3. |f(h)| <= range * tau(h) <= range, for f is the difference of two means of Q(h, .), whose values are returns.
    4. The laws p_k and p'_k of h_k differ by the factors of j's first k - 1 messages alone, so by the chain rule
       KL(p_k || p'_k) = K_k exactly.
    5. Second order. -f / range is at most 1, with second moment at most E tau^2 <= kappa_k / 2 under p_k (Pinsker).
       ``change_of_measure``: (E - E') f(h_k) <= range * X(K_k, kappa_k / 2) <= range * (K_k + sqrt(K_k kappa_k)).
    6. First order, smaller for large steps. Let m = TV(p_k, p'_k), which is at most the sum of the mean TVs of the
       turns before (couple the two teams message by message: they part at turn u with probability at most
       E tau(h_u)), and at most what KL allows. Then (E - E') f(h_k) <= range * (m + min(m, E tau(h_k))): the mass that
       p' has in excess of p is at most m, and f is at least -range there; the mass that p has in excess of p' is at
       most m, and f is at most range * tau there.
       Each turn takes the smaller of 5 and 6.

    Neither constant can be improved. K_k: one branch that the old team almost never takes, where the new policy
    always fails, reached by a step that costs KL = -log(1 - e) for mass e. The root: two branches of 1/2, moved apart
    by e, where the policy improves by tau on one and worsens by tau on the other: the loss is 2 e tau = sqrt(2
    e^2 * 2 tau^2). (``lab.verify``: "rare_branch" and "crossed".)

    A whole stage: add up the certificates of its steps (fresh batches), which counts pairs of turns *of the same
    agent*. From one stale batch: call this once, with the sum of all agents' surrogates and every turn of every agent
    in ``kl_by_turn_K``, all under the stage-start team, in the order of speaking; the proof is the same with "the
    agents" for "the agent". It counts *all* pairs of turns: with n agents that speak once, the penalty is about
    n^2 / 2 * KL, against 0 with fresh batches. This, and not rem:quad2lin, is the benefit of fresh episodes.
    """
    penalties_K = turn_aware_penalties(kl_by_turn_K, reward_range, turns=turns, tv_by_turn_K=tv_by_turn_K)
    return _certificate(
        "turn_aware",
        surrogate=surrogate_sum,
        occupancy=-penalties_K.sum(axis=-1),
        sampling=-np.asarray(sampling_error, dtype=np.float64),
    )


def turn_aware_price(turns: int, reward_range: float) -> float:
    """The second-order penalty per nat if each of the agent's ``turns`` in an episode uses the same KL.

    ``change_of_measure`` is homogeneous, so the penalty at radius delta per message is this times delta: 0, 1.75, 4.72
    times the range for one, two and three turns.
    """
    if turns < 1:
        raise ValueError(f"turn_aware_price: an agent that is updated speaks at least once, got {turns} turns")
    return float(reward_range * change_of_measure(np.arange(turns), 0.5).sum())


def by_own_turn(values_M: ArrayLike, episode_M: ArrayLike, episodes: int, turns: int) -> Floats:
    """Mean over all ``episodes`` of a value at the agent's 1st, 2nd, ... message, 0 where it has none.

    Messages in the order of ``AgentBatch``: by episode, then by turn. ``turns`` is how many the agent may have in an
    episode, whether or not it had as many in any of these episodes.
    """
    values, episode = np.asarray(values_M, dtype=np.float64), np.asarray(episode_M, dtype=np.int64)
    if values.shape != episode.shape or values.ndim != 1:
        raise ValueError(f"by_own_turn: one value and one episode per message, got {values.shape}, {episode.shape}")
    if episodes < 1 or (episode < 0).any() or (episode >= episodes).any() or (np.diff(episode) < 0).any():
        raise ValueError(f"by_own_turn: episode numbers must ascend and lie within the {episodes} of the batch")
    means_K = np.bincount(_own_turn(episode), weights=values, minlength=turns) / episodes
    if len(means_K) > turns:
        raise ValueError(f"by_own_turn: an episode holds {len(means_K)} messages of an agent that may have {turns}")
    return means_K


def surrogate_by_problem(log_ratio_M: ArrayLike, episode_M: ArrayLike, returns_PG: ArrayLike) -> Floats:
    """L of ``turn_aware_certificate``, an unbiased estimate from each problem, in units of reward.

    Mean over the group of sum over messages of (w - 1) (R_g - mean of the *other* returns): leaving the episode out
    of its baseline removes the shrinkage by 1 - 1/G (lem:shrinkage). E[(w - 1) b] = 0 for a baseline b that does
    not depend on the message. ``log_ratio_M`` is log new - log cur of each message. Unbiased for an update that was
    not trained on these episodes; optimistic on the update's own batch.
    """
    gain_M = np.expm1(bound_log_ratio(np.asarray(log_ratio_M, dtype=np.float64)))
    return _by_problem(gain_M, np.asarray(episode_M, dtype=np.int64), returns_PG)


def reweighted_gain_by_problem(log_ratio_M: ArrayLike, episode_M: ArrayLike, returns_PG: ArrayLike) -> Floats:
    """The gain itself, an unbiased estimate from each problem of the *old* team's episodes, in units of reward.

    As ``surrogate_by_problem`` with W - 1 for the sum of w - 1, W the product of the ratios of the agent's messages
    in the episode: E (W - 1) R = E' R - E R. The difference of the two estimates is what the occupancy term bounds;
    they agree episode by episode where the agent speaks once. It is limited only by the variance of W: suitable for one
    small step of one agent, not for a whole run.
    """
    episode = np.asarray(episode_M, dtype=np.int64)
    returns = _returns(returns_PG)
    sums_E = np.bincount(episode, weights=np.asarray(log_ratio_M, dtype=np.float64), minlength=returns.size)
    log_ratio_E = sums_E.astype(np.float64)
    return _by_problem(np.expm1(bound_log_ratio(log_ratio_E)), np.arange(returns.size), returns)


def measured_pair_penalty(log_ratio_M: ArrayLike, episode_M: ArrayLike, episodes: int, reward_range: float) -> float:
    """An unbiased estimate of range * sum_k E |W_(<k) - 1| tau(h_k), which bounds the occupancy term; ours.

    With W_(<k) the product of the ratios of the agent's messages before its k-th: E' f(h_k) - E f(h_k) =
    E (W_(<k) - 1) f(h_k) and |f| <= range * tau. Given h_k, |w_k - 1| / 2 has mean tau(h_k). Only these two
    inequalities are used, so it is smaller than the bound by the KL, at the price of sampling noise.
    """
    log_ratio, episode = np.asarray(log_ratio_M, dtype=np.float64), np.asarray(episode_M, dtype=np.int64)
    if log_ratio.shape != episode.shape or episodes < 1:
        raise ValueError("measured_pair_penalty: one log-ratio and one episode per message are needed")
    until_M = np.cumsum(log_ratio)
    starts_M = np.flatnonzero(_own_turn(episode) == 0)
    base_M = np.repeat((until_M - log_ratio)[starts_M], np.diff([*starts_M, len(episode)]))
    before_M = until_M - log_ratio - base_M
    pairs_M = np.expm1(bound_log_ratio(before_M)) * np.expm1(bound_log_ratio(log_ratio))
    return float(reward_range * 0.5 * np.abs(pairs_M).sum() / episodes)


def _own_turn(episode_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2, ... within each run of one episode number."""
    starts_M = np.r_[True, np.diff(episode_M) != 0][: len(episode_M)]
    position_M = np.arange(len(episode_M))
    return np.asarray(position_M - np.maximum.accumulate(np.where(starts_M, position_M, 0)))


def _returns(returns_PG: ArrayLike) -> Floats:
    returns = np.asarray(returns_PG, dtype=np.float64)
    if returns.ndim != 2 or returns.shape[1] < 2:
        raise ValueError(
            f"returns of P problems x at least two episodes are needed for a baseline, got {returns.shape}"
        )
    return returns


def _by_problem(weight_M: Floats, episode_M: NDArray[np.int64], returns_PG: ArrayLike) -> Floats:
    """Mean over each group of weight * (return - mean of the others' returns)."""
    returns = _returns(returns_PG)
    if weight_M.shape != episode_M.shape or (episode_M < 0).any() or (episode_M >= returns.size).any():
        raise ValueError(f"one log-ratio and one episode number within {returns.size} episodes per message are needed")
    size = returns.shape[1]
    centred_PG = (returns - returns.mean(axis=1, keepdims=True)) * size / (size - 1)
    weight_PG = np.bincount(episode_M, weights=weight_M, minlength=returns.size).reshape(returns.shape)
    # Without a signal the gain is exactly 0, even if a ratio is not finite.
    return np.asarray(np.where(centred_PG == 0.0, 0.0, weight_PG * centred_PG).mean(axis=1))
