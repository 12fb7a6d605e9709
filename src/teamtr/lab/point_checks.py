"""Checks of the statements about samples, distributions, parameters and budgets (app:group, app:extras).

Failure probabilities are summed exactly over all outcomes of small random experiments, not simulated. Statements about
teams are checked on the random teams of the batch; the other cases are drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from teamtr.lab.checks import Check, Draw, Outcome
from teamtr.theory import allocation, concentration, geometry, information, tabular
from teamtr.theory.certificates import step_penalty
from teamtr.theory.occupancy import tv_by_kl
from teamtr.types import Floats

Rng = np.random.Generator

ROUNDING = 1e-12
"""An event must exceed its threshold by this to count, so that equality up to rounding is not a failure."""


# -- samples (app:groupconc) ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Coins:
    """B experiments of N_b coins with a low and a high value: every number k = 0..N_b of high values, with its
    probability."""

    count_B: Floats
    mass_BK: Floats
    mean_BK: Floats
    variance_BK: Floats
    expectation_B: Floats
    bound_B: Floats


def _coins(rng: Rng, size: int, most: int = 40) -> _Coins:
    count_B = rng.integers(2, most + 1, size=size).astype(np.float64)
    p_B = rng.choice([0.5, 0.2, 0.05, 0.01], size=size)
    # Values at the ends of the range, where Hoeffding is tightest, or anywhere inside it.
    inside_B2 = np.sort(rng.uniform(-1.0, 1.0, size=(size, 2)), axis=1)
    value_B2 = np.where(rng.random((size, 1)) < 0.5, [[-1.0, 1.0]], inside_B2)
    bound_B = 10.0 ** rng.uniform(-1.0, 1.0, size=size)
    low_B, high_B = (value_B2 * bound_B[:, None]).T
    k = np.arange(most + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
    within_BK = k <= count_B[:, None]
    rest_BK = np.where(within_BK, count_B[:, None] - k, 0.0)
    n_B = count_B.astype(np.int64)
    log_mass_BK = (
        log_factorial[n_B][:, None]
        - log_factorial[k]
        - log_factorial[rest_BK.astype(np.int64)]
        + k * np.log(p_B)[:, None]
        + rest_BK * np.log1p(-p_B)[:, None]
    )
    share_BK = np.minimum(k / count_B[:, None], 1.0)
    spread_B = high_B - low_B
    return _Coins(
        count_B=count_B,
        mass_BK=np.where(within_BK, np.exp(log_mass_BK), 0.0),
        mean_BK=low_B[:, None] + spread_B[:, None] * share_BK,
        variance_BK=spread_B[:, None] ** 2 * share_BK * (1.0 - share_BK) * (count_B / (count_B - 1.0))[:, None],
        expectation_B=low_B + spread_B * p_B,
        bound_B=bound_B,
    )


def _probability(mass_BK: Floats, event_BK: Floats | np.ndarray) -> Floats:
    return np.asarray(np.where(event_BK, mass_BK, 0.0).sum(axis=-1))


def hoeffding(draw: Draw) -> Iterator[Outcome]:
    """lem:grouphoeffding: the exact tail of a mean of coins against its bound."""
    coins = _coins(draw.rng, draw.size)
    away_BK = np.abs(coins.mean_BK - coins.expectation_B[:, None])
    # Just below the deviation of one of the outcomes, where the tail is largest for its epsilon.
    picked_B = draw.rng.integers(0, coins.count_B.astype(np.int64) + 1)
    epsilon_B = np.take_along_axis(away_BK, picked_B[:, None], axis=1)[:, 0] * (1.0 - 1e-9)
    tail_B = _probability(coins.mass_BK, away_BK > epsilon_B[:, None])
    yield Outcome("lem:grouphoeffding", concentration.hoeffding_tail(epsilon_B, coins.count_B, coins.bound_B), tail_B)


def bernstein(draw: Draw) -> Iterator[Outcome]:
    """Empirical Bernstein, one- and two-sided: the exact probability that the interval misses, against delta."""
    coins = _coins(draw.rng, draw.size)
    delta_B = 10.0 ** draw.rng.uniform(-3.0, -0.1, size=draw.size)
    miss_BK = coins.expectation_B[:, None] - coins.mean_BK
    for two_sided in (False, True):
        width_BK = concentration.bernstein_width(
            coins.variance_BK, coins.count_B[:, None], coins.bound_B[:, None], delta_B[:, None], two_sided=two_sided
        )
        miss = np.abs(miss_BK) if two_sided else miss_BK
        name = "ours:bernstein_two_sided" if two_sided else "ours:bernstein"
        yield Outcome(name, delta_B, _probability(coins.mass_BK, miss > width_BK + ROUNDING))
    width_BK = concentration.smaller_width(
        coins.variance_BK, coins.count_B[:, None], coins.bound_B[:, None], delta_B[:, None], two_sided=False
    )
    yield Outcome("ours:smaller_width", delta_B, _probability(coins.mass_BK, miss_BK > width_BK + ROUNDING))


def _compositions(groups: int) -> Floats:
    """All (i, j, k) that add up to ``groups``."""
    pairs = [(i, j, groups - i - j) for i in range(groups + 1) for j in range(groups + 1 - i)]
    return np.array(pairs, dtype=np.float64)


def empirical_surrogate(draw: Draw) -> Iterator[Outcome]:
    """cor:empL with one message per group, out of three messages: every batch is enumerated, and failure probabilities
    are summed.

    Also with Bernstein's term, and one-sided.
    """
    rng, size = draw.rng, draw.size
    groups = int(rng.integers(4, 17))
    cur, new = _laws(rng, size, 3)
    advantages = rng.uniform(-1.0, 1.0, size=(size, 3))
    eps_B, delta_B = rng.uniform(0.05, 0.5, size=size), 10.0 ** rng.uniform(-2.0, -0.1, size=size)
    w = information.ratio(cur, new)
    contribution_BX = np.clip(w, 1.0 - eps_B[:, None], 1.0 + eps_B[:, None]) * advantages
    counts_C3 = _compositions(groups)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, groups + 1)))])
    ways_C = log_factorial[groups] - log_factorial[counts_C3.astype(np.int64)].sum(axis=1)
    mass_BC = np.exp(ways_C + np.log(cur) @ counts_C3.T)
    mean_BC = contribution_BX @ counts_C3.T / groups
    variance_BC = np.maximum((contribution_BX**2 @ counts_C3.T / groups - mean_BC**2) * groups / (groups - 1), 0.0)
    population_B = (new * advantages).sum(axis=1)
    forms = {
        "cor:empL": (None, True),
        "ours:empL_one_sided": (None, False),
        "ours:empL_bernstein": (variance_BC, False),
    }
    for name, (variance, two_sided) in forms.items():
        lower_BC = concentration.empirical_correction(
            mean_BC,
            groups,
            a_clip=1.0,
            eps_w=eps_B[:, None],
            weight=1.0,
            radius=information.kl(cur, new)[:, None],
            delta=delta_B[:, None],
            variance=variance,
            two_sided=two_sided,
        ).lower
        yield Outcome(name, delta_B, _probability(mass_BC, lower_BC > population_B[:, None] + ROUNDING))


def stage_confidence(draw: Draw) -> Iterator[Outcome]:
    """thm:stage-hp, the random part: with delta_conf / n for each step, all n bounds hold with probability
    1 - delta_conf."""
    steps = int(draw.rng.integers(2, 6))
    delta_B = 10.0 ** draw.rng.uniform(-2.0, -0.1, size=draw.size)
    all_hold_B = np.ones(draw.size)
    for _ in range(steps):
        coins = _coins(draw.rng, draw.size)
        width_B = concentration.hoeffding_width(coins.count_B, coins.bound_B, delta_B / steps)
        above_BK = coins.mean_BK - coins.expectation_B[:, None] > width_B[:, None] + ROUNDING
        all_hold_B *= 1.0 - _probability(coins.mass_BK, above_BK)
    yield Outcome("thm:stage-hp (chance)", delta_B, 1.0 - all_hold_B)


def stage_population(draw: Draw) -> Iterator[Outcome]:
    """thm:stage-hp, the deterministic part: the expected clipped surrogates of a stage, minus the occupancy and ratio
    terms, never exceed its gain. Advantages are true, so zeta is 0."""
    stage = draw.discounted
    eps_B = draw.rng.uniform(0.05, 0.5, size=draw.size)
    weight_B = 1.0 / (1.0 - stage.teams[0].gamma_B)
    promised_B, price_B = np.zeros(draw.size), np.zeros(draw.size)
    for step in stage.steps:
        a_max_B = step.old.a_max_B
        clipped_BSA = _clipped(step, eps_B)
        promised_B = promised_B + weight_B * step.old.expect(
            (step.old.policy_BSA * clipped_BSA * step.old.advantage_BSA).sum(axis=-1)
        )
        price_B = price_B + step_penalty(step.kl_B, step.old.gamma_B, a_max_B)
        price_B = price_B + concentration.ratio_clip_term(a_max_B, step.kl_B, weight_B)
    yield Outcome("thm:stage-hp", price_B, promised_B - stage.whole.gain_B)


def _clipped(step: tabular.DiscountedStep, eps_B: Floats) -> Floats:
    w = np.exp(step.new.logp_BSA - step.old.logp_BSA)
    return np.clip(w, (1.0 - eps_B)[:, None, None], (1.0 + eps_B)[:, None, None])


def mixing(draw: Draw) -> Iterator[Outcome]:
    """lem:beta-block on stationary two-state chains: exact tails of the odd-block mean, by dynamic programming."""
    rng, size = draw.rng, draw.size
    block = int(rng.integers(1, 4))
    m = int(rng.integers(2, 7))
    count = 2 * block * m
    p_B, q_B = 10.0 ** rng.uniform(-3.0, -0.02, size=(2, size))
    transition = np.stack([np.stack([1 - p_B, p_B], -1), np.stack([q_B, 1 - q_B], -1)], -2)
    kept = block * m
    # law_BXK[b, x, k]: probability that the state is x and k of the kept values were ones
    law_BXK = np.zeros((size, 2, kept + 1))
    law_BXK[:, :, 0] = concentration.stationary(transition)
    for t in range(count):
        if t > 0:
            law_BXK = np.einsum("bxk,bxy->byk", law_BXK, transition)
        if (t // block) % 2 == 0:  # odd blocks, counted from one
            law_BXK[:, 1, 1:] = law_BXK[:, 1, :-1].copy()
            law_BXK[:, 1, 0] = 0.0
    mass_BK = law_BXK.sum(axis=1)
    mean_K = 2.0 * np.arange(kept + 1) / kept - 1.0
    expectation_B = concentration.stationary(transition) @ np.array([-1.0, 1.0])
    epsilon_B = rng.uniform(0.05, 1.9, size=size)
    tail_B = _probability(mass_BK, np.abs(mean_K - expectation_B[:, None]) > epsilon_B[:, None] + ROUNDING)
    beta_B = concentration.markov_beta(transition, block + 1)
    yield Outcome("ours:beta_block", concentration.blocking_tail(epsilon_B, count, block, 1.0, beta_B), tail_B)
    printed_B = concentration.blocking_tail(
        epsilon_B, count, block, 1.0, 2.0 * concentration.markov_beta(transition, block)
    )
    yield Outcome("lem:beta-block", printed_B, tail_B)


# -- biases (app:groupadv) -------------------------------------------------------------------------------------


def baseline(draw: Draw) -> Iterator[Outcome]:
    """lem:shrinkage and cor:baselinebias, by enumerating all groups of one rollout and G - 1 others."""
    rng, size = draw.rng, draw.size
    group_size = int(rng.integers(2, 6))
    returns_BX = rng.standard_normal((size, 3)) * 10.0 ** rng.uniform(-2.0, 2.0, size=(size, 1))
    law_BX = rng.dirichlet(np.ones(3), size=size)
    others_C3 = _compositions(group_size - 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, group_size)))])
    ways_C = log_factorial[group_size - 1] - log_factorial[others_C3.astype(np.int64)].sum(axis=1)
    mass_BC = np.exp(ways_C + np.log(law_BX) @ others_C3.T)
    own_B = returns_BX[np.arange(size), rng.integers(3, size=size)]
    group_mean_BC = (own_B[:, None] + returns_BX @ others_C3.T) / group_size
    centred_B = (mass_BC * (own_B[:, None] - group_mean_BC)).sum(axis=1)
    a_ret_B = own_B - (law_BX * returns_BX).sum(axis=1)
    yield Outcome("lem:shrinkage", concentration.shrinkage(group_size) * a_ret_B, centred_B, equal=True)
    bias_B = np.abs(centred_B - a_ret_B)
    yield Outcome("cor:baselinebias", concentration.baseline_bias(a_ret_B, group_size), bias_B, equal=True)
    largest_B = np.abs(returns_BX - (law_BX * returns_BX).sum(axis=1, keepdims=True)).max(axis=1)
    yield Outcome("cor:baselinebias (largest)", concentration.baseline_bias(largest_B, group_size), bias_B)


def clipping(draw: Draw) -> Iterator[Outcome]:
    """lem:clipbias and cor:clipbias-prob on random finite distributions."""
    rng, size = draw.rng, draw.size
    values = rng.standard_normal((size, 6)) * 10.0 ** rng.uniform(-1.0, 1.0, size=(size, 1))
    got = concentration.clip_bias(values, rng.dirichlet(np.ones(6), size=size), rng.uniform(0.1, 4.0, size=size))
    yield Outcome("ours:clipbias_distance", got.distance, got.bias)
    yield Outcome("lem:clipbias", got.overflow, got.bias)
    yield Outcome("lem:clipbias (distance)", got.overflow, got.distance)
    yield Outcome("cor:clipbias-prob (largest)", got.by_largest, got.overflow)
    yield Outcome("cor:clipbias-prob (second moment)", got.by_second_moment, got.overflow)


# -- distributions of messages (app:groupconc, app:infoupper) ---------------------------------------------------


def _laws(rng: Rng, size: int, messages: int) -> tuple[Floats, Floats]:
    """Pairs of distributions with full support, from almost equal to far apart."""
    logits = rng.standard_normal((size, messages)) * rng.choice([0.1, 1.0, 3.0], size=(size, 1))
    tilt = rng.standard_normal((size, messages)) * 10.0 ** rng.uniform(-3.0, 0.5, size=(size, 1))
    return geometry.softmax(logits), geometry.softmax(logits + tilt)


def ratios(draw: Draw) -> Iterator[Outcome]:
    """lem:ratio-tv and lem:clipbias-kl step by step, and two statements about PPO's minimum."""
    rng, size = draw.rng, draw.size
    cur, new = _laws(rng, size, int(rng.integers(2, 7)))
    yield Outcome(
        "lem:ratio-tv",
        2.0 * information.total_variation(cur, new),
        information.ratio_deviation(cur, new),
        equal=True,
    )
    # In half of the cases all weights have size 1, which can make the first inequality tight.
    weights = rng.uniform(-1.0, 1.0, size=cur.shape)
    signs = np.where(rng.random((size, 1)) < 0.5, np.sign(weights), weights)
    low, high = rng.uniform(0.0, 0.9, size=size), rng.uniform(0.0, 1.0, size=size)
    got = information.ratio_clip_bias(cur, new, signs, low, high)
    yield Outcome("lem:clipbias-kl (first)", got.by_ratio, got.bias)
    yield Outcome("lem:clipbias-kl (second)", got.by_tv, got.by_ratio)
    yield Outcome("lem:clipbias-kl (third)", got.by_kl, got.by_tv)
    yield Outcome("lem:clipbias-kl", got.by_kl, got.bias)
    w = information.ratio(cur, new)
    clipped = np.clip(w, 1.0 - low[:, None], 1.0 + high[:, None])
    unclipped, minimum = (new * signs).sum(axis=1), (cur * np.minimum(w * signs, clipped * signs)).sum(axis=1)
    yield Outcome("ours:ppo_minimum_is_lower", unclipped, minimum)
    yield Outcome("ours:ppo_minimum_bias", got.by_ratio, unclipped - minimum)


def ratio_clip_in_region(draw: Draw) -> Iterator[Outcome]:
    """cor:clipbias-tr on every step of the random discounted stages."""
    eps_B = draw.rng.uniform(0.0, 0.5, size=draw.size)
    for step in draw.discounted.steps:
        w = np.exp(step.new.logp_BSA - step.old.logp_BSA)
        lost_BSA = step.old.policy_BSA * (w - _clipped(step, eps_B)) * step.old.advantage_BSA
        bias_B = np.abs(step.old.expect(lost_BSA.sum(axis=-1)))
        yield Outcome("cor:clipbias-tr", step.old.a_max_B * np.sqrt(2.0 * step.kl_B), bias_B)


def centring(draw: Draw) -> Iterator[Outcome]:
    """lem:centerapp on both kinds of teams."""
    team = draw.discounted.teams[-1]
    scale_BS = np.abs(team.q_BSA).max(axis=2)
    mean_BS = (team.policy_BSA * team.advantage_BSA).sum(axis=-1)
    yield Outcome("lem:centerapp", scale_BS, scale_BS + mean_BS, equal=True)
    last = draw.episodic.teams[-1]
    for policy, advantage, value in zip(last.policies, last.advantages, last.values[:-1], strict=True):
        yield Outcome("lem:centerapp", value, value + (policy * advantage).sum(axis=-1), equal=True)


def variational(draw: Draw) -> Iterator[Outcome]:
    """lem:dv for any eta, with equality at the tilted distribution, and its square-root form."""
    rng, size = draw.rng, draw.size
    cur, new = _laws(rng, size, int(rng.integers(2, 7)))
    f = rng.standard_normal(cur.shape) * 10.0 ** rng.uniform(-1.0, 1.0, size=(size, 1))
    eta = 10.0 ** rng.uniform(-2.0, 1.0, size=size)
    # minus the lowest f: both sides are then positive, so that their ratio is meaningful
    lowest = f.min(axis=1)
    mean = (new * f).sum(axis=1)
    yield Outcome("lem:dv", information.donsker_varadhan(cur, new, f, eta) - lowest, mean - lowest)
    tilted = geometry.softmax(np.log(cur) + eta[:, None] * f)
    reached = (tilted * f).sum(axis=1)
    with np.errstate(under="ignore"):
        usable = tilted.min(axis=1) > 1e-250
    best = information.donsker_varadhan(cur, tilted, f, eta)
    yield Outcome("lem:dv (attained)", np.where(usable, best, reached), reached, equal=True)
    a = information.centred(f, cur)
    size_A = np.abs(a).max(axis=1)
    gain = (new * a).sum(axis=1)
    yield Outcome("lem:dv (centred)", information.centred_envelope(size_A, information.kl(new, cur)), gain)
    yield Outcome(
        "ours:centred_cur_to_new", information.centred_envelope(size_A, information.kl(cur, new)), np.abs(gain)
    )


def oracle(draw: Draw) -> Iterator[Outcome]:
    """prop:oracle with the largest KL(new||cur), and ours with the mean KL(cur||new) that eq:tr constrains."""
    for step in draw.discounted.steps:
        team = step.old
        largest_B = tabular.kl(step.new.logp_BSA, step.old.logp_BSA).max(axis=1)
        weight_B = 1.0 / (1.0 - team.gamma_B)
        yield Outcome("prop:oracle", information.oracle_envelope(team.a_max_B, largest_B, weight_B), step.gain_B)
        yield Outcome(
            "ours:mean_kl_envelope",
            information.mean_kl_envelope(team.a_max_B, step.kl_B, team.gamma_B),
            np.abs(step.gain_B),
        )


def episode_shift(draw: Draw) -> Iterator[Outcome]:
    """A whole stage moves an episode's distribution by at most what the *sum* of its KLs under the stage-start team
    allows.

    This is the root of a sum, where lem:cumocc has a sum of roots: over a stage it grows like n^(3/2), not like n^2.
    """
    whole = draw.episodic.whole
    total_B = whole.kl_by_turn_BK.sum(axis=1)
    moved_B = tabular.tv(whole.old.visits[-1], whole.new.visits[-1])
    yield Outcome("ours:episode_shift", tv_by_kl(total_B), moved_B)


# -- budgets (app:tightness) ----------------------------------------------------------------------------------------


def budgets(draw: Draw) -> Iterator[Outcome]:
    """The best radii certify at least as much as random ones, equal ones and small perturbations of the best, within
    the same budget."""
    rng, size, steps = draw.rng, draw.size, int(draw.rng.integers(1, 7))
    kappa = rng.uniform(0.0, 2.0, size=(size, steps))
    curvature = rng.uniform(0.0, 5.0, size=kappa.shape) * rng.integers(2, size=(size, 1))
    penalty = rng.uniform(0.0, 1.5, size=kappa.shape) * rng.integers(2, size=(size, 1))
    cubic = rng.uniform(0.0, 5.0, size=kappa.shape) * rng.integers(2, size=(size, 1))
    total = 10.0 ** rng.uniform(-4.0, 0.5, size=size)
    best = allocation.best_radii(kappa, total, curvature_I=curvature, penalty_I=penalty, cubic_I=cubic)
    shares = rng.dirichlet(np.full(steps, 0.7), size=size) * rng.uniform(0.3, 1.0, size=(size, 1))
    near = best.radii_I * np.exp(0.1 * rng.standard_normal(kappa.shape))
    near *= np.minimum(1.0, total / np.maximum(near.sum(axis=1), 1e-300))[:, None]
    for radii in (shares * total[:, None], near, np.repeat(total[:, None] / steps, steps, axis=1)):
        parts = allocation.certified_parts(radii, kappa, curvature, penalty, cubic)
        yield Outcome("ours:best_radii", best.bound, parts.sum(axis=1))
    yield Outcome("ours:best_radii (budget)", total, best.radii_I.sum(axis=1))
    roots = np.sqrt(shares * total[:, None]).sum(axis=1)
    yield Outcome("app:tightness", np.sqrt(steps * total), roots)


CHECKS: tuple[Check, ...] = (
    hoeffding,
    bernstein,
    empirical_surrogate,
    stage_confidence,
    stage_population,
    mixing,
    baseline,
    clipping,
    ratios,
    ratio_clip_in_region,
    centring,
    variational,
    oracle,
    episode_shift,
    budgets,
)
