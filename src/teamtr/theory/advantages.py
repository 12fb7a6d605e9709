"""Returns and group-normalized advantages, eq:group_adv and app:groupadv."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from teamtr.types import Floats


@dataclass(frozen=True)
class Advantages:
    """The advantages of P groups of G rollouts.

    ``values_PG`` is what training uses; ``raw_PG`` the same before clipping (zeta_clip compares the two).
    Groups that are not ``informative_P`` hold exact zeros in both. ``clip_rate`` is the share of rollouts of
    informative groups that clipping changed, 0 when there is none (app:diagnostics).
    """

    values_PG: Floats
    raw_PG: Floats
    clip_rate: float
    informative_P: NDArray[np.bool_]
    non_finite_P: NDArray[np.bool_]


def discounted_return(rewards_T: ArrayLike, gamma: float) -> float:
    """Sum of gamma**t * reward of turn t, the R_g of eq:group_adv; here T counts the turns of one episode."""
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"discounted_return: gamma must be in [0, 1], got {gamma}")
    rewards = np.asarray(rewards_T, dtype=np.float64)
    if rewards.ndim != 1:
        raise ValueError(f"discounted_return: rewards_T must have one axis, got shape {rewards.shape}")
    return float(np.sum(rewards * gamma ** np.arange(len(rewards))))


def group_advantages(
    returns_PG: ArrayLike,
    *,
    a_clip: float,
    eps_norm: float,
    normalize: bool = True,
    weights_PG: ArrayLike | None = None,
) -> Advantages:
    """Group-normalized, clipped advantages, eq:group_adv: clip((R - mu) / sqrt(var + eps_norm), -a_clip, a_clip).

    ``var`` is the population variance of the group and ``eps_norm`` stands inside the root. Without ``normalize``
    only the mean is subtracted, and the result is still clipped; ``a_clip`` may be inf.

    A group whose returns are all equal has no information on which rollout was better: exact zeros, not informative.
    A group with a return that is not finite (or so large that its spread is not finite in double precision)
    would corrupt the update: exact zeros, marked in ``non_finite_P``.

    A normalized advantage never exceeds sqrt(G - 1) in size (Samuelson's inequality), so clipping has no effect for
    G <= 1 + a_clip**2: with a_clip = 3, up to G = 10.

    ``weights_PG`` are trajectory weights of rollouts that another team wrote (app:exp:isdeg). Mean and variance of a
    group are then weighted, sum(w R) / sum(w), so that the baseline is the current team's too. Without weights, or with
    equal weights within each group, it is the plain mean.
    """
    returns = np.asarray(returns_PG, dtype=np.float64)
    if returns.ndim != 2 or returns.shape[1] == 0:
        raise ValueError(f"group_advantages: returns_PG must be P x G with G >= 1, got shape {returns.shape}")
    if not a_clip > 0.0:
        raise ValueError(f"group_advantages: a_clip must be positive (inf for no clipping), got {a_clip}")
    if not 0.0 <= eps_norm < np.inf:
        raise ValueError(f"group_advantages: eps_norm must be finite and at least 0, got {eps_norm}")

    weights = np.ones_like(returns) if weights_PG is None else np.asarray(weights_PG, dtype=np.float64)
    if weights.shape != returns.shape or not (weights >= 0.0).all():
        raise ValueError(f"group_advantages: one weight of at least 0 per rollout is needed, got {weights.shape}")

    # Compare the returns themselves: the mean of equal numbers can differ from them in the last bit.
    equal_P = (returns == returns[:, :1]).all(axis=1)
    with np.errstate(all="ignore"):  # overflow and 0 / 0 are detected by the finiteness test below
        shares_PG = weights / weights.mean(axis=1, keepdims=True)  # exactly 1 where all are 1
        centred_PG = returns - (shares_PG * returns).mean(axis=1, keepdims=True)
        deviation_P1 = np.sqrt((shares_PG * centred_PG**2).mean(axis=1, keepdims=True) + eps_norm)
        raw_PG = centred_PG / deviation_P1 if normalize else centred_PG
    finite_PG = np.isfinite(returns) & np.isfinite(raw_PG) & np.isfinite(deviation_P1)
    # Equal returns with eps_norm = 0 give 0 / 0, although the rewards are fine.
    non_finite_P = np.where(equal_P, ~np.isfinite(returns[:, 0]), ~finite_PG.all(axis=1))
    informative_P = ~equal_P & ~non_finite_P

    raw_PG = np.where(informative_P[:, None], raw_PG, 0.0)
    values_PG = np.clip(raw_PG, -a_clip, a_clip)
    informative_rollouts = int(informative_P.sum()) * returns.shape[1]
    clipped_rollouts = int((values_PG != raw_PG).sum())
    return Advantages(
        values_PG=values_PG,
        raw_PG=raw_PG,
        clip_rate=clipped_rollouts / informative_rollouts if informative_rollouts else 0.0,
        informative_P=informative_P,
        non_finite_P=non_finite_P,
    )
