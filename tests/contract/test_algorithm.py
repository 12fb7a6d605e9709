"""Algorithm 1: the order of things, freshness, and every preset as a value."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from small import World
from teamtr.algorithm import run_stage, schedule
from teamtr.presets import PRESETS, Order, Resample
from teamtr.randomness import generator
from teamtr.rollout import StaleBatch, StaleWeights, play, stale_agents
from teamtr.theory.weights import effective_sample_share, normalised_weights


def stage(world: World, plan=None, *, done=0, batch=None, seed=0):
    plan = plan or world.plan
    slots = slots_of(world, plan, seed)
    teach = partial(world.teach, seed=seed)
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
    assert [p["teamtr"].resample.due(i) for i in range(4)] == [True] * 4
    assert [p["naive_sequential"].resample.due(i) for i in range(4)] == [True, False, False, False]
    assert [p["resample_every_2"].resample.due(i) for i in range(4)] == [True, False, True, False]
    assert p["importance_weighted"].resample == Resample(every=0, importance_weighted=True)
    assert not p["no_trust_region"].region.gate
    assert p["no_trust_region"].region.beta == 0
    assert p["kl_penalty_fixed"].region.beta > 0
    assert not p["kl_penalty_fixed"].region.adapt_beta
    assert p["kl_penalty_adaptive"].region.adapt_beta
    assert p["adaptive_radius"].radii.adapt
    assert not p["no_normalisation"].normalise
    assert p["no_clipping"].a_clip == float("inf")
    assert (p["dapo"].objective.clip_low, p["dapo"].objective.clip_high) == (0.2, 0.28)
    assert p["dapo"].objective.average_over == "tokens"
    assert p["dapo"].dynamic_sampling_rounds > 0
    assert p["grpo"].objective.ratio == "token"


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
    assert [(s.step, s.opens) for s in schedule(Order("together"), names, rng)] == [(0, True), (0, False), (0, False)]


def test_a_stale_batch_is_an_error():
    """A collector that hands out the stage-start batch again is found out."""
    world = World()
    cached = world.collect(world.team, 0)
    stages = run_stage(world.team, world.plan, lambda team, step: cached, world.teach, slots_of(world))
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
        play(world.arena, lying, world.arena.task.problems("train"), 2, seed=0)


def test_joint_equals_naive_sequential_bit_for_bit():
    """With separate parameters and one batch, together or in turn is the same mathematics; the docs say so."""
    together, in_turn = World(plan=PRESETS["joint"]), World(plan=PRESETS["naive_sequential"])
    stage(together), stage(in_turn)
    for name in together.team.names:
        assert together.engine.version(name) == in_turn.engine.version(name)
    fresh = World()
    stage(fresh)
    assert fresh.engine.version("y") != in_turn.engine.version("y"), "fresh rollouts must make a difference"


def test_a_stage_goes_on_in_the_middle():
    for name in ("teamtr", "naive_sequential", "importance_weighted", "joint"):
        whole = World(plan=PRESETS[name])
        expected = stage(whole)
        world = World(plan=PRESETS[name])
        (first, *_) = [next(iter(run_stage(world.team, world.plan, world.collect, world.teach, slots_of(world))))]
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
    world = World(plan=PRESETS["importance_weighted"])
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
    weights = normalised_weights(steps[1].batch.log_weights_E)
    assert weights.mean() == pytest.approx(1.0)
    assert 0 < effective_sample_share(batch.log_weights_E) <= 1


def test_effective_sample_share_by_hand():
    assert effective_sample_share(np.zeros(5)) == pytest.approx(1.0)
    # weights 3 and 1: (3 + 1)^2 / (2 * (9 + 1)) = 0.8
    assert effective_sample_share(np.log([3.0, 1.0])) == pytest.approx(0.8)
    assert effective_sample_share(np.array([900.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)


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
            partial(world.teach, seed=k),
            slots_of(world, seed=k),
        )
        for step in plan_steps:
            assert step.report.kl_upper <= step.report.radius
            world.team = step.team
    end = world.collect(world.team, 99, group=64).returns_PG(1.0).mean()
    assert end > start + 0.3, (start, end)
