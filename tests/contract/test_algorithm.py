"""Algorithm 1: the order of things, freshness, and every preset as a value."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from small import World
from teamtr.presets import PRESETS, DynamicSampling, Order, Overlong, Region, Resample
from teamtr.randomness import generator, seed_of
from teamtr.rollout import StaleBatch, StaleWeights, play, stale_agents
from teamtr.team import Schedule
from teamtr.theory.estimators import CriticAdvantage, GroupAdvantage
from teamtr.theory.intervals import bootstrap_upper
from teamtr.theory.weights import effective_sample_share, normalized_weights, truncated_weights
from teamtr.training.algorithm import gain_of_episode, run_stage, schedule


def stage(world: World, plan=None, *, done=0, batch=None, seed=0):
    plan = plan or world.plan
    slots = slots_of(world, plan, seed)
    teach = partial(world.update, seed=seed)
    return list(run_stage(world.team, plan, world.collect, teach, slots, done=done, batch=batch))


def slots_of(world: World, plan=None, seed=0):
    return schedule((plan or world.plan).order, world.team.trainable, generator(seed, "order"))


def test_every_agent_learns_from_the_intermediate_team():
    world = World()
    steps = stage(world)
    assert [s.report.agent for s in steps] == ["x", "y"]
    assert [step for _, step in world.collected] == [0, 1]
    assert world.collected[0][0] == world.team.version
    assert world.collected[1][0] == steps[0].team.version, "y must learn under the team after x's update"
    assert steps[1].batch.team_version == steps[0].team.version
    assert steps[0].team.versions["y"] == world.team.versions["y"]
    assert steps[1].team.versions == {n: world.engine.version(n) for n in ("x", "y")}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs(name):
    world = World(plan=PRESETS[name])
    steps = stage(world)
    assert len(steps) == 2
    assert all(np.isfinite(s.report.kl_full) for s in steps)
    gated = PRESETS[name].region.gate
    assert all(s.report.kl_upper <= s.report.radius for s in steps) or not gated


def test_presets_are_what_they_say():
    p = PRESETS
    assert not p["teamtr"].resample.may_be_stale
    for name in ("naive_sequential", "resample_every_2", "reweighted", "auto", "partial"):
        assert p[name].resample.may_be_stale
        assert p[name].resample.reweight == (name in ("reweighted", "auto", "partial"))
    assert p["reweighted"].resample == Resample(every=0, reweight=True)
    assert not p["no_trust_region"].region.gate
    assert p["no_trust_region"].region.beta == 0
    assert p["kl_penalty_fixed"].region.beta > 0
    assert not p["kl_penalty_fixed"].region.adapt_beta
    assert p["kl_penalty_adaptive"].region.adapt_beta
    assert p["adaptive_radius"].radii.adapt
    assert not p["no_normalization"].advantage.normalize
    assert p["no_clipping"].advantage.clip == float("inf")
    assert (p["dapo"].objective.clip_low, p["dapo"].objective.clip_high) == (0.2, 0.28)
    assert p["dapo"].objective.average_over == "tokens"
    assert p["dapo"].overlong == Overlong(filter=True, cache=0.2)
    assert p["dapo"].dynamic_sampling == DynamicSampling(on=True, limit=0)
    assert (p["grpo"].objective.clip_low, p["grpo"].objective.clip_high) == (0.2, 0.2)
    assert p["grpo"].objective.average_over == "messages"
    assert (p["grpo"].objective.reference_kl, p["dapo"].objective.reference_kl) == (0.04, 0.0)
    for name in ("ppo", "grpo", "dapo"):
        sequential = p[f"sequential_{name}"]
        assert sequential == replace(p[name], resample=Resample(every=0)), "it differs in reusing rollouts alone"
    assert p["ppo"].advantage == CriticAdvantage(gae_lambda=1.0, value_clip=0.2)
    assert p["ppo"].critic is p["ppo"].advantage
    assert p["grpo"].critic is None
    assert p["ppo"].objective.average_over == "tokens"
    assert (p["ppo"].objective.clip_low, p["ppo"].objective.clip_high) == (0.2, 0.2)
    for name in ("ppo", "grpo", "dapo"):
        assert p[name].objective.ratio == "token"
        assert p[name].advantage.normalize
        assert p[name].advantage.clip == float("inf")
        assert p[name].region == Region(gate=False, beta=0.0, adapt_beta=False)


def test_orders():
    rng = np.random.default_rng(0)
    names = ("a", "b", "c")
    order = lambda kind: [s.agent for s in schedule(Order(kind), names, rng)]  # noqa: E731
    assert order("fixed") == ["a", "b", "c"]
    assert order("reverse") == ["c", "b", "a"]
    assert {tuple(order("random")) for _ in range(60)} == {
        ("a", "b", "c"), ("a", "c", "b"), ("b", "a", "c"), ("b", "c", "a"), ("c", "a", "b"), ("c", "b", "a")
    }  # fmt: skip
    by_gain = schedule(Order("largest_gain"), names, rng, {"a": 0.1, "b": -1.0, "c": 0.3})
    assert [s.agent for s in by_gain] == ["c", "a", "b"]
    unknown = schedule(Order("largest_gain"), names, rng, {"a": 0.5, "b": -0.5})
    assert [s.agent for s in unknown] == ["a", "c", "b"], "who has no update yet counts as having gained nothing"
    assert [(s.step, s.opens) for s in schedule(Order("together"), names, rng)] == [(0, True), (0, False), (0, False)]


def test_who_gains_most_counts_all_messages_of_an_episode():
    """The second agent has two messages in every episode: its surrogate is a mean over both."""
    world = World()
    world.context = replace(world.context, router=Schedule((("x", "y"), ("y",))))
    data = world.training_batch("y", world.collect(world.team, 0))
    update = world.update("y", data, optimization=replace(world.optimization, gate_share=1.0))
    by_hand = float((np.expm1(update.log_ratio_M) * data.advantages_M).sum() / 48)
    assert gain_of_episode(update.report, 16) == pytest.approx(by_hand)
    assert update.report.surrogate == pytest.approx(by_hand / 2)

    once = replace(update.report, agent="x", surrogate=1.5 * update.report.surrogate, messages=48)
    gains = {report.agent: gain_of_episode(report, 16) for report in (once, update.report)}
    by_gain = schedule(Order("largest_gain"), ("x", "y"), np.random.default_rng(0), gains)
    assert [slot.agent for slot in by_gain] == ["y", "x"]
    assert gain_of_episode(replace(once, messages=0, surrogate=0.0), 16) == 0.0


def test_a_stale_batch_is_an_error():
    """A collector that hands out the stage-start batch again is found out."""
    world = World()
    cached = world.collect(world.team, 0)
    stages = run_stage(world.team, world.plan, lambda team, step, worn: cached, world.update, slots_of(world))
    next(stages)
    with pytest.raises(StaleBatch, match="older weights of x"):
        next(stages)


def test_naive_sequential_may_be_stale_and_knows_it():
    world = World(plan=PRESETS["naive_sequential"])
    steps = stage(world)
    assert len(world.collected) == 1
    assert steps[1].batch.team_version == world.team.version
    assert stale_agents(steps[1].batch, steps[0].team) == ("x",)


def test_playing_with_other_weights_than_the_team_names_is_an_error():
    world = World()
    lying = world.team.replace("x", "0" * 32)
    with pytest.raises(StaleWeights, match="'x'"):
        play(world.context, lying, world.context.task.problems("train"), 2, seed=0)


@pytest.mark.long
def test_joint_equals_naive_sequential_bit_for_bit():
    """With separate parameters and one batch, together or in turn is the same mathematics; the docs say so."""
    together, in_turn = World(plan=PRESETS["joint"]), World(plan=PRESETS["naive_sequential"])
    stage(together), stage(in_turn)
    for name in together.team.names:
        assert together.engine.version(name) == in_turn.engine.version(name)
    fresh = World()
    stage(fresh)
    assert fresh.engine.version("y") != in_turn.engine.version("y"), "fresh rollouts must make a difference"


@pytest.mark.long
def test_a_lesson_knows_whether_the_present_team_wrote_it():
    for name, fresh in (("teamtr", [True, True]), ("naive_sequential", [True, False]), ("joint", [True, False])):
        world, given = World(plan=PRESETS[name]), []

        def watched(agent, data, world=world, given=given):
            given.append(data.fresh)
            return world.update(agent, data)

        steps = list(run_stage(world.team, world.plan, world.collect, watched, slots_of(world)))
        assert given == fresh
        carried = [step.batch.log_weights_E is not None for step in steps]
        assert carried == [name == "naive_sequential"] * 2, "only a batch that is used again is carried on"


def test_a_stage_takes_advantages_as_the_plan_says():
    plan = replace(PRESETS["no_normalization"], advantage=GroupAdvantage(normalize=False, clip=0.3))
    world, given = World(plan=plan), []

    def watched(agent, data):
        given.append(data)
        return world.update(agent, data)

    list(run_stage(world.team, plan, world.collect, watched, slots_of(world)))
    for data in given:
        centred_PG = data.returns_PG - data.returns_PG.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(data.advantages.values_PG, np.clip(centred_PG, -0.3, 0.3), atol=1e-15)


def test_a_stage_that_lost_its_batch_does_not_go_on():
    world = World(plan=PRESETS["naive_sequential"])
    with pytest.raises(AssertionError, match="needs the batch it held"):
        stage(world, done=1)

    def half_measured(agent, data):
        return replace(world.update(agent, data), log_ratio_M=None)

    with pytest.raises(AssertionError, match="measures every message"):
        list(run_stage(world.team, world.plan, world.collect, half_measured, slots_of(world)))


@pytest.mark.long
def test_a_stage_goes_on_in_the_middle():
    for name in ("teamtr", "naive_sequential", "reweighted", "joint"):
        whole = World(plan=PRESETS[name])
        expected = stage(whole)
        world = World(plan=PRESETS[name])
        (first, *_) = [next(iter(run_stage(world.team, world.plan, world.collect, world.update, slots_of(world))))]
        world.team = first.team
        held = first.batch if name != "teamtr" else None
        rest = stage(world, done=1, batch=held)
        assert [s.index for s in rest] == [1]
        assert rest[0].team.versions == expected[1].team.versions, name


def test_frozen_agents_are_never_updated():
    world = World()
    world.team = replace(world.team, agents=tuple(replace(a, frozen=a.name == "x") for a in world.team))
    steps = stage(world)
    assert [s.report.agent for s in steps] == ["y"]


def test_trajectory_weights_are_the_exact_likelihood_ratios():
    """After x's update, each episode's weight is new(m) / old(m) of x's message, computed here from the table."""
    world = World(plan=PRESETS["reweighted"])
    learner = world.engine.learner("x")
    old = learner.policy.logits.detach().clone()
    steps = stage(world)
    batch = steps[0].batch
    for e in (0, 7, 20):
        turn = batch.episodes[e].turns[0]
        log_ratio = 0.0
        for u, token in enumerate(turn.token_ids):
            row = learner.policy.row(turn.context_ids, turn.token_ids[:u])
            new = torch.log_softmax(learner.policy.logits.detach()[row], -1)[token]
            log_ratio += float(new - torch.log_softmax(old[row], -1)[token])
        assert batch.log_weights_E[e] == pytest.approx(log_ratio, abs=1e-12)
    weights = normalized_weights(steps[1].batch.log_weights_E)
    assert weights.mean() == pytest.approx(1.0)
    assert 0 < effective_sample_share(batch.log_weights_E) <= 1


def test_weights_add_up_over_the_updates_before():
    """Three agents: the third learns from episodes reweighted past both updates before it, not the last alone."""
    world = World(plan=PRESETS["reweighted"], names=("x", "y", "z"), radius=0.2, learning_rate=0.5)
    old = {name: world.engine.learner(name).snapshot() for name in "xy"}
    given = {}

    def watched(agent, data):
        given[agent] = data
        return world.update(agent, data)

    slots = slots_of(world)
    steps = list(run_stage(world.team, world.plan, world.collect, watched, slots))
    batch = steps[0].batch
    expected_E = np.zeros(len(batch.episodes))
    for name in "xy":
        learner, own = world.engine.learner(name), batch.of(name)
        new = learner.snapshot()
        learner.restore(old[name])
        learner.begin(own)
        learner.restore(new)
        ratio_M = learner.measure().log_ratio_M
        learner.end()
        assert np.abs(ratio_M).max() > 1e-3
        expected_E += np.bincount(own.episode_M, weights=ratio_M, minlength=len(expected_E))
    np.testing.assert_allclose(steps[1].batch.log_weights_E, expected_E, atol=1e-12)
    assert given["x"].weights_E is None
    np.testing.assert_allclose(given["z"].weights_E, truncated_weights(expected_E).values_E)
    np.testing.assert_allclose(given["z"].contexts_M, given["z"].weights_E), "z speaks last"


def test_reused_episodes_are_weighed_in_advantages_surrogate_and_kl():
    """Every average of a weighted data is one over the present team: baseline, surrogate, KL and its bound."""
    world = World(plan=PRESETS["reweighted"], radius=0.5, learning_rate=0.5)
    given = {}

    def watched(agent, data):
        given[agent] = (data, world.engine.learner(agent).snapshot(), world.update(agent, data))
        return given[agent][2]

    steps = list(run_stage(world.team, world.plan, world.collect, watched, slots_of(world)))
    data, before, update = given["y"]
    weights_E = data.weights_E
    assert np.ptp(weights_E) > 0.1
    weights_PG, returns_PG = weights_E.reshape(3, 16), data.returns_PG
    mean_P = (weights_PG * returns_PG).sum(axis=1) / weights_PG.sum(axis=1)
    variance_P = (weights_PG * (returns_PG - mean_P[:, None]) ** 2).sum(axis=1) / weights_PG.sum(axis=1)
    expected_PG = (returns_PG - mean_P[:, None]) / np.sqrt(variance_P + 1e-6)[:, None]
    np.testing.assert_allclose(data.advantages.values_PG, np.clip(expected_PG, -3, 3))
    np.testing.assert_allclose(data.advantages_M, (np.clip(expected_PG, -3, 3) * weights_PG).ravel())
    learner = world.engine.learner("y")
    after = learner.snapshot()
    learner.restore(before)
    learner.begin(data.messages)
    learner.restore(after)
    full_M, log_ratio_M = learner.measure().full_M, update.log_ratio_M
    weights_M = data.contexts_M
    np.testing.assert_allclose(weights_M, truncated_weights(steps[0].batch.log_weights_E).values_E)
    assert update.report.kl_full == pytest.approx((weights_M * full_M).sum() / weights_M.sum())
    per_token_M = full_M / data.messages.lengths_M
    assert update.report.kl_per_token == pytest.approx((weights_M * per_token_M).sum() / weights_M.sum())
    assert update.report.kl_discounted == pytest.approx((weights_M * full_M).mean()), (
        "no discount: the KL of an episode"
    )
    bound = partial(bootstrap_upper, full_M, data.messages.cluster_M, confidence=0.95)
    rng = generator(seed_of(0, "y"), "bootstrap")
    assert update.report.kl_upper == pytest.approx(bound(weights_M=data.contexts_M, rng=rng))
    assert update.report.surrogate == pytest.approx((np.expm1(log_ratio_M) * data.advantages_M).mean())
    assert update.report.kl_k1 == pytest.approx(-(weights_M * log_ratio_M).sum() / weights_M.sum())
    assert update.report.kl_k1 != pytest.approx(-log_ratio_M.mean(), rel=1e-3)
    assert update.report.kl_upper <= update.report.radius
    assert len(steps) == 2


@pytest.mark.long
def test_training_improves_the_team():
    """Thirty stages of the whole loop on the tabular world: the reward rises from chance."""
    world = World(radius=0.02)
    start = world.collect(world.team, 99, group=64).returns_PG(1.0).mean()
    for k in range(30):
        plan_steps = run_stage(
            world.team,
            world.plan,
            partial(world.collect, stage=k),
            partial(world.update, seed=k),
            slots_of(world, seed=k),
        )
        for step in plan_steps:
            assert step.report.kl_upper <= step.report.radius
            world.team = step.team
    end = world.collect(world.team, 99, group=64).returns_PG(1.0).mean()
    assert end > start + 0.3, (start, end)
