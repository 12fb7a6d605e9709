"""The proxy of app:exp:zeta beside the true zeta of eq:bias, where the latter can be computed."""

from __future__ import annotations

import numpy as np
import pytest

from teamtr.theory.advantages import group_advantages
from teamtr.theory.zeta import true_zeta_of_binary_rewards, zeta_clip, zeta_norm, zeta_ratio

SETTINGS = {"a_clip": 3.0, "eps_norm": 1e-6}


def test_by_hand_for_groups_of_two():
    """G = 2, p = 1/2, always right under the new policy, no normalization. Given r = 1 the other return is 1 or 0 with
    1/2 each: expected estimate (0 + 1/2) / 2 = 1/4, true advantage 1/2, zeta 1/4 = half of the advantage."""
    zeta = true_zeta_of_binary_rewards(0.5, 1.0, 2, a_clip=3.0, eps_norm=1e-12, normalize=False)
    assert zeta == pytest.approx(0.25)
    # normalized, the estimate is 0 or (1 - 1/2) / (1/2) = 1, expected 1/2, and the true advantage 1/2: no gap at all
    assert true_zeta_of_binary_rewards(0.5, 1.0, 2, a_clip=3.0, eps_norm=1e-12) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("group", [2, 5, 16])
def test_without_normalisation_only_the_shrinkage_is_left(group):
    """lem:shrinkage: the estimate is (1 - 1/G) of the advantage, so zeta = |p_new - p| / G."""
    zeta = true_zeta_of_binary_rewards(0.3, 0.37, group, normalize=False, **SETTINGS)
    assert zeta == pytest.approx(0.07 / group)


def test_no_step_no_zeta_without_clipping():
    assert true_zeta_of_binary_rewards(0.3, 0.3, 8, a_clip=np.inf, eps_norm=1e-6) == pytest.approx(0.0, abs=1e-12)


def test_monte_carlo_agrees():
    rng = np.random.default_rng(0)
    p, new, group = 0.2, 0.3, 16
    returns_PG = (rng.random((40_000, group)) < p).astype(float)
    returns_PG[:, 0] = rng.random(40_000) < new
    estimates = group_advantages(returns_PG, **SETTINGS).values_PG[:, 0] - (returns_PG[:, 0] - p)
    exact = true_zeta_of_binary_rewards(p, new, group, **SETTINGS)
    assert abs(abs(estimates.mean()) - exact) < 4 * estimates.std() / np.sqrt(len(estimates))


def test_what_the_proxy_sees_and_what_it_does_not():
    """Beside each other at p = 0.2, a step to 0.22, G = 16: the proxy is dominated by the luck of the group's moments,
    the truth by the units (1 / sigma). Like with like, the truth is over a hundred times smaller than the proxy."""
    rng = np.random.default_rng(1)
    p, new, group = 0.2, 0.22, 16
    returns_PG = (rng.random((4000, group)) < p).astype(float)
    advantages = group_advantages(returns_PG, **SETTINGS)
    log_ratio_M = np.where(returns_PG.reshape(-1) == 1, np.log(new / p), np.log((1 - new) / (1 - p)))
    proxy = (
        zeta_norm(returns_PG, **SETTINGS)
        + zeta_clip(advantages.raw_PG, advantages.values_PG)
        + zeta_ratio(advantages.values_PG.reshape(-1), log_ratio_M, clip_low=0.2, clip_high=0.2)
    )
    units = true_zeta_of_binary_rewards(p, new, group, **SETTINGS)
    like_with_like = true_zeta_of_binary_rewards(p, new, group, normalize=False, **SETTINGS)
    assert like_with_like == pytest.approx(0.02 / 16)
    assert 100 * like_with_like < proxy
    assert like_with_like < units < proxy, (like_with_like, units, proxy)
