"""Importance weights by hand."""

from __future__ import annotations

import numpy as np
import pytest

from small import World
from teamtr.batches import Carried, RolloutBatch, Verified
from teamtr.theory.weights import (
    MOST,
    effective_sample_share,
    share_of,
    share_worth_keeping,
    truncated_weights,
)


def test_effective_sample_share_by_hand():
    assert effective_sample_share(np.zeros(5)) == pytest.approx(1.0)
    # weights 3 and 1: (3 + 1)^2 / (2 * (9 + 1)) = 0.8
    assert effective_sample_share(np.log([3.0, 1.0])) == pytest.approx(0.8)
    assert effective_sample_share(np.array([900.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert share_of(np.zeros(0)) == 1.0


def test_truncation_bounds_every_weight_and_says_what_it_cost():
    even = truncated_weights(np.zeros(9))
    assert even.cut == 0.0
    np.testing.assert_allclose(even.values_E, np.ones(9))
    found = truncated_weights(np.log([1e6, 0.5, 0.5, 0.5]))  # the first counts four times, all have mean 5.5 / 4
    np.testing.assert_allclose(found.values_E, np.array([4.0, 0.5, 0.5, 0.5]) * 4 / 5.5)
    assert found.cut == 0.0, "by chance they are more than one on average: nothing is missing"
    assert truncated_weights(np.log([0.5, 0.7])).cut == pytest.approx(0.4)
    nowhere = truncated_weights(np.full(3, -np.inf))
    assert nowhere.cut == 1.0
    assert np.isfinite(nowhere.values_E).all()


def test_the_cut_is_what_is_missing_and_bounds_the_bias():
    """Old and new law over five conversations, one of which is a thousand times likelier now: exact expectations."""
    old = np.array([1e-4, 0.2, 0.3, 0.3, 0.1999])
    new = np.array([0.1, 0.18, 0.27, 0.27, 0.18])
    bounded = np.minimum(new / old, MOST)
    missing = 1.0 - float(old @ bounded)
    assert missing == pytest.approx(float(np.maximum(new - MOST * old, 0.0).sum()), abs=1e-3)
    for values in np.eye(5):
        assert abs(float(old @ (bounded * values)) / float(old @ bounded) - float(new @ values)) <= missing + 1e-12
    drawn = np.random.default_rng(0).choice(5, size=20000, p=old)
    assert truncated_weights(np.log(new / old)[drawn]).cut == pytest.approx(missing, abs=0.01)


def test_a_batch_is_worth_keeping_until_a_new_one_is_the_better_buy():
    assert share_worth_keeping(0.0) == 1.0, "sampling costs nothing: always sample"
    assert share_worth_keeping(1.0) == 0.25, "as dear as the update: half the gain at half the cost is even"
    assert share_worth_keeping(3.0) == pytest.approx(1 / 16)
    with pytest.raises(ValueError, match="at least 0"):
        share_worth_keeping(float("nan"))


def carried(world: World) -> tuple[RolloutBatch, Carried]:
    """A batch of two rounds of two agents whose every turn has a log-ratio of its own."""
    batch = world.collect(world.team, 0, group=2)
    for name in ("x", "y"):
        own = batch.of(name)
        batch = batch.after(own, 0.1 * (own.turn_M + 1) + own.episode_M, f"after {name}")
    assert batch.carried is not None
    return batch, batch.carried


def test_an_episode_weighs_all_its_turns_and_a_context_those_before():
    batch, found = carried(World(rounds=2))
    assert found.team_version == "after y"
    assert len(found.log_ratio_U) == 6 * 4
    for e in range(6):
        assert batch.log_weights_E[e] == pytest.approx(0.1 * (1 + 2 + 3 + 4) + 4 * e)
    own = batch.of("y")
    before_M = batch.log_weights_before_M(own)
    for m, (e, t) in enumerate(zip(own.episode_M, own.turn_M, strict=True)):
        assert before_M[m] == pytest.approx(sum(0.1 * (k + 1) + e for k in range(t)))
    twice = batch.after(own, np.ones(len(own)), "later")
    np.testing.assert_allclose(twice.log_weights_E, batch.log_weights_E + 2.0), "an own update counts as well"
    fresh = World().collect(World().team, 0, group=2)
    assert fresh.log_weights_E is None
    assert fresh.log_weights_before_M(fresh.of("x")) is None


def test_what_was_verified_stands_beside_the_turns_it_is_about():
    world = World(rounds=2)
    batch = world.collect(world.team, 0, group=2)
    own = batch.of("y")
    verified = Verified(np.arange(len(own)), np.arange(len(own)) + 100)
    after = batch.after(own, np.zeros(len(own)), "v", verified)
    again = after.after(batch.of("x"), np.zeros(len(batch.of("x"))), "w")
    for found in (after.carried, again.carried):
        assert (found.kept_U[batch.place_M(own)] == verified.kept_M).all()
        assert (found.next_U[batch.place_M(own)] == verified.next_M).all()
        assert (found.kept_U[batch.place_M(batch.of("x"))] == -1).all()


def test_episodes_of_problems_and_of_an_earlier_stage():
    world = World(rounds=2)
    batch, _ = carried(world)
    part = batch.of_problems([2, 0])
    assert [p.id for p in part.problems] == ["c", "a"]
    np.testing.assert_allclose(part.log_weights_E, batch.log_weights_E[[4, 5, 0, 1]])
    fresh = world.collect(world.team, 1, group=2)
    both = fresh.joined(part)
    assert (len(both.problems), both.past, len(both.present)) == (5, 2, 6)
    np.testing.assert_allclose(both.log_weights_E, [*np.zeros(6), *part.log_weights_E])
    assert both.present == fresh.episodes
    own = both.of("x")
    assert set(own.cluster_M[own.problem_M == 3]) == set(own.cluster_M[own.problem_M == 2]), "one problem, played twice"
