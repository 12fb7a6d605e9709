"""Finite-sample bounds against hand arithmetic and exact enumeration: no simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from teamtr.theory.concentration import (
    baseline_bias,
    bernstein_width,
    blocking_tail,
    blocking_width,
    blocks,
    clip_bias,
    empirical_correction,
    hoeffding_tail,
    hoeffding_width,
    markov_beta,
    ratio_clip_term,
    shrinkage,
    smaller_width,
    stage_high_probability,
    stationary,
    surrogate_range,
)
from teamtr.types import Floats


def two_states(p: float, q: float) -> Floats:
    return np.array([[1.0 - p, p], [q, 1.0 - q]])


# -- Hoeffding and Bernstein ------------------------------------------------------------------------------------


def test_hoeffding_by_hand() -> None:
    assert hoeffding_tail(1.0, 8, 1.0) == pytest.approx(2.0 * math.exp(-4.0), rel=1e-14)
    assert hoeffding_tail(1.0, 8, 2.0) == pytest.approx(2.0 * math.exp(-1.0), rel=1e-14)
    assert hoeffding_tail(0.1, 8, 1.0) == 1.0  # 2 exp(-0.04) says nothing
    assert hoeffding_width(50, 3.0, 2.0 / math.e) == pytest.approx(3.0 * 0.2, rel=1e-14)
    assert hoeffding_width(50, 3.0, 1.0 / math.e, two_sided=False) == pytest.approx(3.0 * 0.2, rel=1e-14)


def test_hoeffding_width_inverts_the_tail() -> None:
    delta = np.array([0.5, 0.05, 1e-6])
    width = hoeffding_width(37, 2.5, delta)
    np.testing.assert_allclose(hoeffding_tail(width, 37, 2.5), delta, rtol=1e-12)


def coin_tail(epsilon: float, count: int, p: float) -> float:
    """P(|mean - E| > epsilon) of ``count`` independent coins with values +-1, exactly."""
    k = np.arange(count + 1)
    deviation = np.abs((2.0 * k - count) / count - (2.0 * p - 1.0))
    return float(binom.pmf(k, count, p)[deviation > epsilon + 1e-12].sum())


def test_hoeffding_against_exact_binomials_and_with_half_the_range_it_fails() -> None:
    worst, worst_with_half = 0.0, 0.0
    for count, p, epsilon in itertools.product((1, 2, 5, 20, 60), (0.5, 0.2, 0.05), np.linspace(0.05, 1.9, 38)):
        exact = coin_tail(epsilon, count, p)
        worst = max(worst, exact / float(hoeffding_tail(epsilon, count, 1.0)))
        worst_with_half = max(worst_with_half, exact / float(hoeffding_tail(epsilon, count, 0.5)))
    assert 0.4 < worst <= 1.0
    assert worst_with_half > 1.0


def test_bernstein_by_hand() -> None:
    # log(4 / delta) = 2: sqrt(2 * 0.5 * 2 / 8) + 14 * 3 * 2 / (3 * 7) = 0.5 + 4
    assert bernstein_width(0.5, 8, 3.0, 4.0 / math.e**2) == pytest.approx(4.5, rel=1e-14)
    # log(2 / delta) = 1: sqrt(2 * 0.25 / 8) + 14 * 3 / (3 * 7) = 0.25 + 2
    assert bernstein_width(0.25, 8, 3.0, 2.0 / math.e, two_sided=False) == pytest.approx(2.25, rel=1e-14)
    # no variance: only the range term is left, and it falls like 1/N
    assert bernstein_width(0.0, 101, 3.0, 0.01, two_sided=False) == pytest.approx(0.14 * math.log(200.0), rel=1e-14)
    with pytest.raises(ValueError, match="at least 2"):
        bernstein_width(0.0, 1, 1.0, 0.1)


def test_bernstein_beats_hoeffding_where_the_variance_is_small() -> None:
    assert bernstein_width(0.01, 1000, 1.0, 0.05) < 0.5 * hoeffding_width(1000, 1.0, 0.05)
    assert bernstein_width(1.0, 20, 1.0, 0.05) > hoeffding_width(20, 1.0, 0.05)
    chosen = smaller_width([0.01, 1.0], [1000, 20], 1.0, 0.05)
    assert chosen[0] == bernstein_width(0.01, 1000, 1.0, 0.025)
    assert chosen[1] == hoeffding_width(20, 1.0, 0.025)


@pytest.mark.parametrize("two_sided", [True, False])
def test_bernstein_covers_by_exact_enumeration(two_sided: bool) -> None:
    """Coins: the sample variance is a function of the number of heads, so coverage is a finite sum. And with the
    range's term left out the interval fails: the exact check can see a fault."""
    worst, worst_without = 0.0, 0.0
    for count, p, delta in itertools.product((2, 5, 30, 200), (0.5, 0.1, 0.01, 0.002), (0.5, 0.1, 0.01)):
        k = np.arange(count + 1)
        mean, mass = (2.0 * k - count) / count, binom.pmf(k, count, p)
        variance = (1.0 - mean**2) * count / (count - 1)
        miss = (2.0 * p - 1.0) - mean  # the expectation above the mean
        if two_sided:
            miss = np.abs(miss)
        width = bernstein_width(variance, count, 1.0, delta, two_sided=two_sided)
        log = math.log((4.0 if two_sided else 2.0) / delta)
        worst = max(worst, mass[miss > width + 1e-12].sum() / delta)
        worst_without = max(worst_without, mass[miss > np.sqrt(2.0 * variance * log / count) + 1e-12].sum() / delta)
    assert worst <= 1.0
    assert worst_without > 1.0


def test_numbers_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="delta is a probability"):
        hoeffding_width(10, 1.0, 1.5)
    with pytest.raises(ValueError, match="count must be above 0"):
        hoeffding_tail(0.1, 0, 1.0)


# -- the empirical correction ------------------------------------------------------------------------------------


def test_empirical_correction_by_hand() -> None:
    # gamma = 0.5: weight 2; B = 1.2 * 3 * 2 = 7.2; log(2/delta) = 2, N = 16: 7.2 * sqrt(4/16) = 3.6;
    # ratio bias 2 * 3 * sqrt(2 * 0.02) = 1.2
    got = empirical_correction(10.0, 16, a_clip=3.0, eps_w=0.2, weight=2.0, radius=0.02, delta=2.0 / math.e**2)
    assert got.sampling == pytest.approx(3.6, rel=1e-14)
    assert got.ratio_bias == pytest.approx(1.2, rel=1e-14)
    assert got.lower == pytest.approx(5.2, rel=1e-14)
    bernstein = empirical_correction(
        10.0, 17, a_clip=3.0, eps_w=0.2, weight=2.0, radius=0.02, delta=4.0 / math.e**2, variance=4.25
    )
    # log(4/delta) = 2: sqrt(2 * 4.25 * 2 / 17) + 14 * 7.2 * 2 / (3 * 16) = 1 + 4.2
    assert bernstein.sampling == pytest.approx(5.2, rel=1e-14)


CUR, NEW = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.25, 0.35])
ADVANTAGES = np.array([1.0, -1.0, 0.8])


def counts_of(groups: int, kinds: int = 3) -> tuple[Floats, Floats]:
    """All ways to draw ``groups`` messages, and their probabilities under CUR."""
    counts = np.array([c for c in itertools.product(range(groups + 1), repeat=kinds) if sum(c) == groups])
    ways = np.array([math.factorial(groups) / math.prod(math.factorial(k) for k in c) for c in counts])
    return counts, ways * np.prod(CUR**counts, axis=1)


@pytest.mark.parametrize("form", ["hoeffding", "bernstein"])
def test_the_empirical_correction_holds_with_its_confidence_by_enumeration(form: str) -> None:
    """One message a group, three messages: every batch is enumerated, and the failures' probabilities added. Without
    the ratio term and with a tenth of the sampling term it fails more often than it may."""
    eps_w, groups, delta = 0.2, 24, 0.1
    w = NEW / CUR
    contribution = np.clip(w, 1 - eps_w, 1 + eps_w) * ADVANTAGES
    population = float(NEW @ ADVANTAGES)
    radius = float(np.sum(CUR * np.log(CUR / NEW)))
    counts, mass = counts_of(groups)
    assert mass.sum() == pytest.approx(1.0, rel=1e-12)
    mean = counts @ contribution / groups
    variance = (counts @ contribution**2 / groups - mean**2) * groups / (groups - 1)
    got = empirical_correction(
        mean,
        groups,
        a_clip=1.0,
        eps_w=eps_w,
        weight=1.0,
        radius=radius,
        delta=delta,
        variance=None if form == "hoeffding" else np.maximum(variance, 0.0),
        two_sided=False,
    )
    assert mass[got.lower > population].sum() <= delta
    assert mass[got.surrogate - 0.1 * got.sampling > population].sum() > delta


def test_the_minimum_of_ppo_leaves_the_range_that_hoeffding_needs() -> None:
    """eq:ppo_obj averages min(w A, clip(w) A), cor:empL bounds clip(w) A: with A = -1 and w = 5 the contribution is -5,
    below -B = -1.2."""
    w, a = 5.0, -1.0
    contribution = min(w * a, float(np.clip(w, 0.8, 1.2)) * a)
    assert contribution < -float(surrogate_range(1.0, 0.2, 1.0))


def test_the_correction_fails_for_an_update_that_was_picked_on_the_same_groups() -> None:
    """cor:empL does not say that the groups must not have chosen the update. Two hundred updates without any gain,
    their contributions independent fair coins: each fails with less than delta, the best of them almost surely."""
    groups, delta, candidates = 20, 0.1, 200
    width = float(hoeffding_width(groups, 1.0, delta, two_sided=False))
    heads = np.arange(groups + 1)
    fails = float(binom.pmf(heads, groups, 0.5)[(2.0 * heads - groups) / groups > width].sum())
    assert 0.0 < fails <= delta
    assert 1.0 - (1.0 - fails) ** candidates > 0.9


def test_the_stage_bound_by_hand_and_each_step_gets_its_share_of_the_confidence() -> None:
    # two steps, log(2 * 2 / delta) = 2 at delta = 4 e^-2; B = 1; N = 16 and 4: widths 0.5 and 1;
    # ratio terms sqrt(2 * 0.02) = 0.2 and sqrt(2 * 0.005) = 0.1
    got = stage_high_probability(
        [3.0, 4.0],
        [0.25, 0.5],
        [0.125, 0.0],
        [16, 4],
        a_clip=1.0,
        eps_w=0.0,
        weight=1.0,
        radii_I=[0.02, 0.005],
        delta_conf=4.0 / math.e**2,
    )
    np.testing.assert_allclose(got.correction.sampling, [0.5, 1.0], rtol=1e-14)
    np.testing.assert_allclose(got.correction.ratio_bias, [0.2, 0.1], rtol=1e-14)
    assert got.lower == pytest.approx(7.0 - 1.5 - 0.3 - 0.75 - 0.125, rel=1e-14)


def test_the_undiscounted_ratio_term_is_cauchy_schwarz_over_turns() -> None:
    """Three turns with KLs 0.03, 0, 0.06: the mean is 0.03, and the sum of roots is below 3 sqrt(2 * 0.03)."""
    kls = np.array([0.03, 0.0, 0.06])
    bound = float(ratio_clip_term(1.0, kls.mean(), 3.0))
    assert bound == pytest.approx(3.0 * math.sqrt(0.06), rel=1e-14)
    assert np.sqrt(2.0 * kls).sum() < bound
    assert np.sqrt(2.0 * np.full(3, 0.03)).sum() == pytest.approx(bound, rel=1e-14)  # equal turns: tight


# -- mixing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "q"), [(0.3, 0.1), (0.01, 0.01), (0.9, 0.8), (0.5, 0.5)])
def test_beta_of_two_states_in_closed_form(p: float, q: float) -> None:
    pi = np.array([q, p]) / (p + q)
    np.testing.assert_allclose(stationary(two_states(p, q)), pi, rtol=1e-13)
    for lag in range(5):
        expected = 2.0 * pi[0] * pi[1] * abs(1.0 - p - q) ** lag
        assert markov_beta(two_states(p, q), lag) == pytest.approx(expected, rel=1e-12, abs=1e-16)


def test_beta_is_the_definition_with_whole_pasts_and_futures() -> None:
    """E sup_B |P(B | past) - P(B)| with pasts of three and futures of three states of a three-state chain: the first
    of the past and the last of the future change nothing."""
    rng = np.random.default_rng(0)
    transition = rng.dirichlet(np.ones(3), size=3)
    pi, lag = stationary(transition), 2
    jump = np.linalg.matrix_power(transition, lag)
    paths = list(itertools.product(range(3), repeat=3))

    def path(first: Floats, states: tuple[int, ...]) -> float:
        return float(first[states[0]] * transition[states[0], states[1]] * transition[states[1], states[2]])

    total = 0.0
    for past in paths:
        apart = sum(abs(path(jump[past[-1]], future) - path(pi, future)) for future in paths) / 2.0
        total += path(pi, past) * apart
    assert markov_beta(transition, lag) == pytest.approx(total, rel=1e-12)


def odd_blocks(transition: Floats, count: int, block: int) -> tuple[Floats, Floats, Floats]:
    """Every sequence of ``count`` states reduced to its odd blocks: block sums of +-1, joint and product masses."""
    m = blocks(count, block)
    pi = stationary(transition)
    paths = np.array(list(itertools.product((0, 1), repeat=count)))
    mass = pi[paths[:, 0]] * np.prod(transition[paths[:, :-1], paths[:, 1:]], axis=1)
    kept = np.concatenate([paths[:, 2 * k * block : (2 * k + 1) * block] for k in range(m)], axis=1)
    codes = kept @ (1 << np.arange(m * block))
    joint = np.bincount(codes, weights=mass, minlength=1 << (m * block))
    states = (np.arange(1 << (m * block))[:, None] >> np.arange(m * block)) & 1
    by_block = states.reshape(-1, m, block)
    inside = pi[by_block[:, :, 0]]
    for t in range(block - 1):
        inside = inside * transition[by_block[:, :, t], by_block[:, :, t + 1]]
    return (2.0 * states - 1.0).mean(axis=1), joint, inside.prod(axis=1)


@pytest.mark.parametrize(("p", "q"), [(0.3, 0.1), (0.05, 0.02), (0.9, 0.8)])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_blocking_by_enumeration_of_all_sequences(p: float, q: float, block: int) -> None:
    """The distance of the blocks' joint law from the product law is at most (m - 1) beta(l + 1), and with m = 2 equal
    to it: neither the factor nor the lag can be improved, and the printed 2 (m - 1) beta(l) is twice too much."""
    transition = two_states(p, q)
    beta = float(markov_beta(transition, block + 1))
    for count in range(2 * block, 15, 2 * block):
        m = blocks(count, block)
        mean, joint, product = odd_blocks(transition, count, block)
        assert joint.sum() == pytest.approx(1.0, rel=1e-12)
        assert product.sum() == pytest.approx(1.0, rel=1e-12)
        distance = 0.5 * np.abs(joint - product).sum()
        assert distance <= (m - 1) * beta + 1e-12
        if m == 2:
            assert distance == pytest.approx(beta, rel=1e-9)
            assert distance > float(markov_beta(transition, block + 2))
        expectation = float(stationary(transition) @ np.array([-1.0, 1.0]))
        for epsilon in (0.1, 0.5, 0.9, 1.3):
            exact = joint[np.abs(mean - expectation) > epsilon + 1e-12].sum()
            assert exact <= blocking_tail(epsilon, count, block, 1.0, beta) + 1e-12


def test_without_the_mixing_term_a_sticky_chain_breaks_hoeffding() -> None:
    transition = two_states(0.005, 0.005)
    mean, joint, _ = odd_blocks(transition, 14, 1)
    exact = joint[np.abs(mean) > 0.9].sum()
    assert exact > 0.9
    assert blocking_tail(0.9, 14, 1, 1.0, 0.0) < 0.2
    assert blocking_tail(0.9, 14, 1, 1.0, markov_beta(transition, 2)) == 1.0


def test_blocking_width_inverts_the_tail_and_gives_up_when_mixing_is_too_slow() -> None:
    width = blocking_width(1000, 5, 2.0, 1e-5, 0.05)
    assert blocking_tail(width, 1000, 5, 2.0, 1e-5) == pytest.approx(0.05, rel=1e-12)
    assert blocking_width(1000, 5, 2.0, 1e-3, 0.05) == math.inf  # 99 * 1e-3 > 0.05
    assert blocking_width(1000, 5, 2.0, 0.0, 0.05) == pytest.approx(float(hoeffding_width(100, 2.0, 0.05)), rel=1e-14)
    with pytest.raises(ValueError, match="at least two blocks"):
        blocks(5, 3)


# -- biases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_shrinkage_and_baseline_bias_by_enumeration_of_groups(group_size: int) -> None:
    returns, law = np.array([0.0, 1.0, 5.0]), np.array([0.5, 0.3, 0.2])
    mu = float(returns @ law)
    for own in returns:
        mean = 0.0
        for rest in itertools.product(range(3), repeat=group_size - 1):
            group_mean = (own + returns[list(rest)].sum()) / group_size
            mean += math.prod(law[list(rest)]) * (own - group_mean)
        assert mean == pytest.approx(float(shrinkage(group_size)) * (own - mu), rel=1e-12)
        assert abs(mean - (own - mu)) == pytest.approx(float(baseline_bias(own - mu, group_size)), rel=1e-12)


def test_clip_bias_by_hand() -> None:
    # Z = -4, 1, 3 with 1/4, 1/2, 1/4, c = 2: clip moves -4 by +2 and 3 by -1
    got = clip_bias([-4.0, 1.0, 3.0], [0.25, 0.5, 0.25], 2.0)
    assert got.bias == pytest.approx(0.25)
    assert got.distance == pytest.approx(0.75)
    assert got.overflow == pytest.approx(1.75)
    assert got.by_largest == pytest.approx(2.0)
    assert got.by_second_moment == pytest.approx(math.sqrt(6.75 * 0.5))


def test_clip_bias_bounds_are_in_order_on_random_laws() -> None:
    rng = np.random.default_rng(3)
    values, law = rng.standard_normal((500, 6)) * 3.0, rng.dirichlet(np.ones(6), size=500)
    got = clip_bias(values, law, rng.uniform(0.1, 4.0, 500))
    assert (got.bias <= got.distance + 1e-12).all()
    assert (got.distance <= got.overflow + 1e-12).all()
    assert (got.overflow <= got.by_largest + 1e-12).all()
    assert (got.overflow <= got.by_second_moment + 1e-12).all()
    with pytest.raises(ValueError, match="add up to 1"):
        clip_bias([1.0, 2.0], [0.5, 0.6], 1.0)
