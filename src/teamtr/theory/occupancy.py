"""Bounds on occupancy shift, how far a change of policy moves a team's contexts: the paper's (app:occshift) and ours.

Ours needs only the KL. Inputs and outputs are numbers, or arrays with a leading team axis. ``kl`` is always an expected
KL(cur || new) under the team before the change, ``f_max`` a bound on |f|.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from teamtr.types import Floats


def shift_by_max_tv(gamma: ArrayLike, tv_max: ArrayLike, f_max: ArrayLike = 1.0) -> Floats:
    """lem:occmax: |E_d' f - E_d f| <= 2 gamma / (1 - gamma) * (largest TV over states) * |f|_max."""
    g, distance, bound = _floats("shift_by_max_tv", gamma, tv_max, f_max)
    return np.asarray(2.0 * g / (1.0 - g) * distance * bound)


def shift_by_tv(gamma: ArrayLike, tv: ArrayLike, f_max: ArrayLike = 1.0) -> Floats:
    """lem:occexp, eq:occexp_tv: the same with the expected TV under d^cur. Attained (see ``lab.verify``: "fork")."""
    g, distance, bound = _floats("shift_by_tv", gamma, tv, f_max)
    return np.asarray(2.0 * g / (1.0 - g) * distance * bound)


def shift_by_kl(gamma: ArrayLike, kl: ArrayLike, f_max: ArrayLike = 1.0) -> Floats:
    """lem:occ, eq:occ_shift_bound, lem:expectedklpenalty: sqrt(2) gamma / (1 - gamma) * sqrt(kl) * |f|_max.

    The left side never exceeds 2 |f|_max, so the bound is vacuous from sqrt(kl) = sqrt(2) (1 - gamma) / gamma on.
    """
    g, divergence, bound = _floats("shift_by_kl", gamma, kl, f_max)
    return np.asarray(np.sqrt(2.0) * g / (1.0 - g) * np.sqrt(divergence) * bound)


def cumulative_shift(gamma: ArrayLike, kl_I: ArrayLike, f_max: ArrayLike = 1.0) -> Floats:
    """lem:cumocc, eq:stale_occ_general, eq:tri_cumocc: the shifts of the steps so far (last axis) add up.

    Step k's ``kl`` is measured under the team before step k. With no step the shift is 0.
    """
    g, bound = _floats("cumulative_shift", gamma, f_max)
    (divergence_I,) = _floats("cumulative_shift", kl_I)
    if divergence_I.ndim == 0:
        raise ValueError("cumulative_shift: kl_I needs an axis of steps, got a single number")
    return np.asarray(np.sqrt(2.0) * g / (1.0 - g) * np.sqrt(divergence_I).sum(axis=-1) * bound)


def stale_gap(gamma: ArrayLike, kl_before_I: ArrayLike, a_max: ArrayLike) -> Floats:
    """rem:quad2lin, eq:stale_surrogate_gap: |L_i^seq - L_i^stale|, from the KLs of the steps before i.

    ``a_max`` must bound the advantage estimate that both surrogates use.
    """
    (g,) = _floats("stale_gap", gamma)
    return np.asarray(cumulative_shift(gamma, kl_before_I, a_max) / (1.0 - g))


def discounted_sum(kernel_BSS: Floats, start_BS: Floats, gamma_B: Floats, g_BS: Floats) -> Floats:
    """(1 - gamma) sum_t gamma^t E g(s_t), summed as a series (def:kltok, eq:occ_measure_identity, lem:kltokequals).

    Summed by doubling, 2**12 terms, and not computed from d^pi: the lemma states that the two agree.
    """
    step_BSS = gamma_B[:, None, None] * kernel_BSS  # (gamma P)^k, after k terms
    total_BS = g_BS
    for _ in range(12):
        total_BS = total_BS + np.einsum("bst,bt->bs", step_BSS, total_BS)
        step_BSS = step_BSS @ step_BSS
    return np.asarray((1.0 - gamma_B) * np.einsum("bs,bs->b", start_BS, total_BS))


def tv_by_kl(kl: ArrayLike) -> Floats:
    """The better of Pinsker, sqrt(kl / 2), and Bretagnolle-Huber, sqrt(1 - exp(-kl)), on the total variation."""
    (divergence,) = _floats("tv_by_kl", kl)
    return np.asarray(np.minimum(np.sqrt(divergence / 2.0), np.sqrt(-np.expm1(-divergence))))


def change_of_measure(kl: ArrayLike, second_moment: ArrayLike) -> Floats:
    """Ours. The largest increase of E f from p to p', if KL(p || p') <= kl, f <= 1 and E_p f^2 <= second_moment.

    The result X is of the order of kl, not of its root: X = s e, where s is the second moment and e >= 0 solves
    e - log(1 + e) = kl / s. Simpler, and never more than 16 % larger: X <= kl + sqrt(2 s kl).

    Proof. Take 0 < z < 1. Since 1 - z f > 0, and by Jensen for the concave logarithm,

        1 - z E_p' f  =  E_p' [1 - z f]  >=  E_p [(dp'/dp) (1 - z f)]  >=  exp(E_p log(dp'/dp) + E_p log(1 - z f))
                      >=  exp(-kl + E_p log(1 - z f))  >=  1 - kl + E_p log(1 - z f).

    Now x -> (-log(1 - x) - x) / x^2 increases for x < 1, so -log(1 - x) <= x + x^2 c(z) / z^2 for x <= z, with
    c(z) = -log(1 - z) - z. With x = z f this gives -E_p log(1 - z f) <= z E_p f + s c(z), hence

        E_p' f - E_p f  <=  (kl + s c(z)) / z            for every z in (0, 1).

    The right side is least where s (z / (1 - z) + log(1 - z)) = kl; with e = z / (1 - z) this reads
    e - log(1 + e) = kl / s, and the value there is s c'(z) = s z / (1 - z) = s e. Last, exp(y) >= 1 + y + y^2 / 2
    with y = sqrt(2 x) shows that e = x + sqrt(2 x) already has e - log(1 + e) >= x.

    Both terms are needed: p' may put mass kl where p has none and f is 1; and within the support of p, moving by a
    relative amount a with E a^2 = 2 kl along f gains sqrt(2 s kl).
    """
    divergence, moment = np.broadcast_arrays(*_floats("change_of_measure", kl, second_moment))
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where(divergence > 0.0, divergence / moment, 0.0)
        closed = divergence + np.sqrt(2.0 * moment * divergence)
        e = x + np.sqrt(2.0 * x)
        # Newton's method on a convex, increasing function from the right: every iterate is an upper bound.
        for _ in range(6):
            e = e - np.where(e > 0.0, (e - np.log1p(e) - x) * (1.0 + e) / np.where(e > 0.0, e, 1.0), 0.0)
        sharp = moment * e
    # At the ends of the range the difference e - log(1 + e) loses all digits; the closed form does not.
    usable = (x > 1e-6) & (x < 1e6)
    return np.asarray(np.where(usable, np.minimum(sharp, closed), closed))


def _floats(what: str, *values: ArrayLike) -> tuple[Floats, ...]:
    """Converts to float64 and rejects negative values: a sampled KL below 0 is an estimate, not a bound."""
    arrays = tuple(np.asarray(value, dtype=np.float64) for value in values)
    for array in arrays:
        if not (array >= 0.0).all():  # also rejects nan
            raise ValueError(
                f"{what}: gamma, distances and bounds must be at least 0, got {array.min():g}; use an exact or an "
                "upper KL, not the sampled k1"
            )
    return arrays
