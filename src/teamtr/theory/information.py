"""Distances between two message distributions and the bounds on gains that follow (app:groupconc second half,
app:infoupper).

Laws (distributions) are along the last axis (A: messages), states and teams along the axes before it; all broadcast.
``cur`` (the paper's P) is the policy before an update, ``new`` (Q) the one after. A KL is named by the order of its
arguments; none of them is clamped, and a KL is inf where its first law has mass and its second has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats


def total_variation(p_A: ArrayLike, q_A: ArrayLike) -> Floats:
    """TV(P, Q) = 1/2 sum |p - q|: the largest difference of the probabilities of one event."""
    p, q = _laws("total_variation", p_A, q_A)
    return np.asarray(0.5 * np.abs(p - q).sum(axis=-1))


def kl(first_A: ArrayLike, second_A: ArrayLike) -> Floats:
    """KL(first || second) in nats, as a sum of non-negative terms so that small ones keep their digits."""
    p, q = _laws("kl", first_A, second_A)
    has_mass = p > 0
    with np.errstate(divide="ignore", over="ignore"):
        d = np.where(has_mass, np.log(np.where(q > 0, q, 0.0)) - np.log(np.where(has_mass, p, 1.0)), 0.0)
    # sum p (exp(d) - 1 - d) is the same number, because both laws add up to one; terms without mass count with q.
    far = q - p * (1.0 + np.where(np.isfinite(d), d, 0.0))
    terms = np.where(np.abs(d) < 1.0, p * (np.expm1(np.clip(d, -1.0, 1.0)) - np.clip(d, -1.0, 1.0)), far)
    terms = np.where(has_mass, terms, q)
    terms = np.where(has_mass & (q == 0), np.inf, terms)
    return np.maximum(terms.sum(axis=-1), 0.0)


def ratio_deviation(cur_A: ArrayLike, new_A: ArrayLike) -> Floats:
    """E_cur |1 - w| with w = new / cur, which is 2 TV(cur, new) (lem:ratio-tv).

    The identity needs new << cur. (The sentence before the lemma assumes cur << new. With only that, new may have mass
    where cur has none, which no sample shows, and E_cur|1 - w| is below 2 TV by that mass: it is 0.5 for cur = (1, 0),
    new = (0.5, 0.5), where 2 TV = 1.) So mass of new outside the support of cur raises an error.
    """
    cur, new = _laws("ratio_deviation", cur_A, new_A)
    return np.asarray((cur * np.abs(1.0 - ratio(cur, new))).sum(axis=-1))


def ratio(cur_A: ArrayLike, new_A: ArrayLike) -> Floats:
    """w = new / cur, 1 where neither has mass."""
    cur, new = _laws("ratio", cur_A, new_A)
    if ((cur == 0) & (new > 0)).any():
        raise ValueError("ratio: new has mass where cur has none (top-p sampling?): likelihood ratios do not see it")
    return np.where(cur > 0, new / np.where(cur > 0, cur, 1.0), 1.0)


@dataclass(frozen=True)
class RatioClip:
    """The bias of clipping the ratio in E_cur[w A], and the bounds on it in the order of lem:clipbias-kl.

    ``bias`` is |E w A - E clip(w) A|. ``pessimism`` is E w A - E min(w A, clip(w) A), for the objective that PPO and
    eq:ppo_obj actually use. It is never negative, so the minimum is a lower bound of the surrogate without any bias
    term; and it is at most ``by_ratio``, so the same bounds hold for it.
    """

    bias: Floats
    pessimism: Floats
    by_ratio: Floats
    by_tv: Floats
    by_kl: Floats


def ratio_clip_bias(
    cur_A: ArrayLike, new_A: ArrayLike, advantages_A: ArrayLike, clip_low: ArrayLike, clip_high: ArrayLike
) -> RatioClip:
    """|E wA - E w_clip A| <= A_max E|w - w_clip| <= A_max E|1 - w| <= A_max sqrt(2 KL(cur||new)) (lem:clipbias-kl).

    Needs new << cur. Averaged over states under the team's occupancy, Jensen moves the root outside and gives
    cor:clipbias-tr, A_clip sqrt(2 delta_i) (its last step is <=, printed as =).
    """
    cur, new = _laws("ratio_clip_bias", cur_A, new_A)
    advantages = np.asarray(advantages_A, dtype=np.float64)
    low = 1.0 - np.asarray(clip_low, dtype=np.float64)[..., None]
    high = 1.0 + np.asarray(clip_high, dtype=np.float64)[..., None]
    w = ratio(cur, new)
    clipped = np.clip(w, low, high)
    largest = np.where(cur > 0, np.abs(advantages), 0.0).max(axis=-1)
    lost = cur * (w - clipped) * advantages
    return RatioClip(
        bias=np.abs(lost.sum(axis=-1)),
        pessimism=np.maximum(lost, 0.0).sum(axis=-1),  # the minimum differs from w A only where clipping lowers it
        by_ratio=largest * (cur * np.abs(w - clipped)).sum(axis=-1),
        by_tv=largest * 2.0 * total_variation(cur, new),
        by_kl=largest * np.sqrt(2.0 * kl(cur, new)),
    )


def centred(values_A: ArrayLike, policy_A: ArrayLike) -> Floats:
    """A = Q - E_pi Q, whose mean under pi is 0 at every state (lem:centerapp)."""
    values, policy = np.asarray(values_A, dtype=np.float64), np.asarray(policy_A, dtype=np.float64)
    return values - (policy * values).sum(axis=-1, keepdims=True)


def donsker_varadhan(cur_A: ArrayLike, new_A: ArrayLike, f_A: ArrayLike, eta: ArrayLike) -> Floats:
    """(KL(new||cur) + log E_cur exp(eta f)) / eta, which is at least E_new f for every eta > 0 (lem:dv)."""
    cur, new = _laws("donsker_varadhan", cur_A, new_A)
    f, eta_ = np.asarray(f_A, dtype=np.float64), np.asarray(eta, dtype=np.float64)
    if not (eta_ > 0).all():
        raise ValueError(f"donsker_varadhan: eta must be above 0, got {eta_}")
    exponent = np.where(cur > 0, eta_[..., None] * f, -np.inf)
    top = exponent.max(axis=-1, keepdims=True)
    log_mean = top[..., 0] + np.log((cur * np.exp(exponent - top)).sum(axis=-1))
    return (kl(new, cur) + log_mean) / eta_


def centred_envelope(a_max: ArrayLike, kl_nats: ArrayLike) -> Floats:
    """A_max sqrt(2 KL), at least |E_new f| when E_cur f = 0 and |f| <= A_max (lem:dv, second half).

    The lemma has KL(new||cur) by Hoeffding's lemma. The same constant holds with KL(cur||new), and for the absolute
    value: |E_new f - E_cur f| <= 2 A_max TV, and Pinsker bounds TV by either KL.
    """
    a, nats = np.asarray(a_max, dtype=np.float64), np.asarray(kl_nats, dtype=np.float64)
    return a * np.sqrt(2.0 * nats)


def oracle_envelope(a_max: ArrayLike, kl_max: ArrayLike, weight: ArrayLike) -> Floats:
    """J(new) - J(cur) <= weight A_max sqrt(2 KL_max), KL_max the largest over states (prop:oracle).

    ``weight`` is 1/(1 - gamma), or the number of turns of the updated agent without discount. It needs the *largest*
    KL over all states; a step of the algorithm bounds a mean (eq:tr), for which it fails: see ``mean_kl_envelope``.
    Either direction of the KL may be used (``centred_envelope``).
    """
    return np.asarray(weight, dtype=np.float64) * centred_envelope(a_max, kl_max)


def mean_kl_envelope(a_max: ArrayLike, mean_kl: ArrayLike, gamma: ArrayLike) -> Floats:
    """|J(new) - J(cur)| <= A_max sqrt(2 D) / (1 - gamma)^2, D = E_{d^cur} KL(cur||new): ours, prop:oracle for eq:tr.

    Let f(s) = E_new A^cur(s, .). By centring |f(s)| <= 2 A_max TV(s), hence |E_{d^cur} f| <= 2 A_max T with
    T = E_{d^cur} TV; by lem:occexp |E_{d^new} f - E_{d^cur} f| <= 2 gamma / (1 - gamma) A_max T. So
    (1 - gamma) |J(new) - J(cur)| = |E_{d^new} f| <= 2 A_max T (1 + gamma / (1 - gamma)) = 2 A_max T / (1 - gamma),
    and Pinsker with Jensen gives 2 T <= sqrt(2 D). It bounds any change of one agent, a swap included (prop:pnp).
    """
    a, nats, g = (np.asarray(value, dtype=np.float64) for value in (a_max, mean_kl, gamma))
    return a * np.sqrt(2.0 * nats) / (1.0 - g) ** 2


def _laws(where: str, first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    p, q = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    for law in (p, q):
        if law.ndim == 0 or (law < 0).any() or not np.allclose(law.sum(axis=-1), 1.0, atol=1e-9):
            raise ValueError(f"{where}: every law along the last axis must be non-negative and add up to 1")
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(f"{where}: both laws must be on the same messages, got {p.shape[-1]} and {q.shape[-1]}")
    return p, q
