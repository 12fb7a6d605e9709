"""Overlong messages (DAPO, arXiv 2503.14476): masked in the loss, punished in the return, and told apart in the log."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from small import World
from teamtr.batches import RolloutBatch
from teamtr.presets import PRESETS, DynamicSampling, Overlong
from teamtr.randomness import generator
from teamtr.rollout import punishments_PG, trained_returns_PG
from teamtr.theory.advantages import group_advantages
from teamtr.training.algorithm import run_stage, schedule
from teamtr.training.batch import Optimization
from teamtr.types import Episode, Problem, Turn, Verdict

DAPO = replace(PRESETS["dapo"], dynamic_sampling=DynamicSampling())
ONE_STEP = Optimization(learning_rate=0.05, epochs=1, minibatches=1)


def turn(agent: str, tokens: int, finish="stop") -> Turn:
    ids = np.zeros(tokens, np.int32)
    return Turn(agent, 0, np.zeros(1, np.int32), ids, np.zeros(tokens, np.float32), finish, "", "")


def batch_of(*episodes: tuple[list[Turn], float]) -> RolloutBatch:
    """One problem, an episode for each (turns, reward)."""
    made = [Episode("p", g, tuple(t), "", Verdict("wrong", r), "") for g, (t, r) in enumerate(episodes)]
    return RolloutBatch((Problem("p", ""),), tuple(made), len(episodes))


# -- punishment -----------------------------------------------------------------------------------------------


def test_an_episode_is_punished_for_its_worst_message():
    """Limits 10 and 20 with caches of 5 and 10: x is punished from 6 tokens on, y from 11."""
    plan = replace(PRESETS["teamtr"], overlong=Overlong(cache=0.5), gamma=0.5)
    limits = {"x": 10, "y": 20}
    batch = batch_of(
        ([turn("x", 5), turn("y", 10)], 1.0),  # both short
        ([turn("x", 8), turn("y", 12)], 1.0),  # -0.6 and -0.2
        ([turn("x", 1), turn("y", 20, "length")], 1.0),  # cut
        ([turn("x", 7)], 0.0),  # -0.4, one turn
        ([], 0.0),
    )
    np.testing.assert_allclose(punishments_PG(batch, plan, limits), [[0, -0.6, -1, -0.4, 0]], rtol=1e-15)
    # the punishment arrives with the reward, at the last turn
    np.testing.assert_allclose(trained_returns_PG(batch, plan, limits), [[0.5, 0.2, 0.0, -0.4, 0.0]], atol=1e-15)
    np.testing.assert_array_equal(batch.returns_PG(0.5), [[0.5, 0.5, 0.5, 0.0, 0.0]], "the task's own stay")
    plain = replace(plan, overlong=Overlong(filter=True))
    np.testing.assert_array_equal(trained_returns_PG(batch, plain, limits), batch.returns_PG(0.5))


def test_the_range_of_returns_grows_by_one():
    assert DAPO.return_range(1.0) == 2.0
    assert DAPO.return_range(None) is None
    assert PRESETS["grpo"].return_range(1.0) == 1.0
    assert replace(DAPO, overlong=Overlong(filter=True)).return_range(1.0) == 1.0, "filtering changes no return"
    extremes = batch_of(([turn("x", 1)], 1.0), ([turn("x", 10, "length")], 0.0))
    assert np.ptp(trained_returns_PG(extremes, DAPO, {"x": 10})) == 2.0, "and the range is attained"


# -- filtering ------------------------------------------------------------------------------------------------


def test_a_batch_knows_which_messages_were_cut():
    world = World(plan=DAPO)
    batch = world.collect(world.team, 0)
    own = batch.of("x")
    finishes = [t.finish for e in batch.episodes for t in e.turns if t.agent == "x"]
    assert 0 < own.cut_M.sum() < len(own)
    assert own.cut_M.tolist() == [f == "length" for f in finishes]
    assert own.rows([3, 1]).cut_M.tolist() == own.cut_M[[3, 1]].tolist()


def test_filtering_is_as_if_the_cut_messages_were_not_there():
    """The same weights as from a batch without them; and the mean is over the tokens that are left."""
    world = World(plan=DAPO)
    batch = world.collect(world.team, 0)
    whole = world.training_batch("x", batch)
    kept = np.flatnonzero(~whole.messages.cut_M)
    seen = []
    for data in (replace(whole, filter_cut=True), replace(whole, messages=whole.messages.rows(kept)), whole):
        each = World(plan=DAPO)
        learner = each.engine.learner("x")
        step = learner.step

        def look(rows, advantages_M, *args, _step=step, _data=data, **options):
            stats = _step(rows, advantages_M, *args, **options)
            seen.append((stats.surrogate, _data.messages.lengths_M[rows], advantages_M))
            return stats

        learner.step = look
        assert each.update("x", data, optimization=ONE_STEP).report.accepted
        seen[-1] = (*seen[-1], learner.snapshot().parameters["logits"].numpy())
    (masked, lengths, advantages, weights), (absent, *_, expected), (everything, *_, other) = seen
    np.testing.assert_allclose(weights, expected, atol=1e-12)
    assert np.abs(weights - other).max() > 1e-3, "the cut messages would have made a difference"
    # before the first step every ratio is 1: the surrogate is the mean advantage of the unmasked tokens
    assert masked == pytest.approx((lengths * advantages).sum() / lengths.sum(), rel=1e-12)
    assert masked == pytest.approx(absent, rel=1e-12)
    assert masked != pytest.approx(everything, rel=1e-3)


def test_the_loop_filters_when_the_plan_says_so():
    for plan in (DAPO, replace(DAPO, overlong=Overlong(cache=0.2))):
        world = World(plan=plan)
        lessons = []

        def teach(agent, data, _world=world, _lessons=lessons):
            _lessons.append(data)
            return _world.update(agent, data)

        slots = schedule(plan.order, world.team.trainable, generator(0, "order"))
        list(run_stage(world.team, plan, world.collect, teach, slots))
        for data in lessons:
            gradient_M = data.gradient_M(plan.objective)
            assert gradient_M.any()
            assert gradient_M[data.messages.cut_M].any() == (not plan.overlong.filter)


def test_an_agent_whose_messages_were_all_cut_is_skipped():
    world = World(plan=DAPO)
    data = world.training_batch("x", world.collect(world.team, 0))
    all_cut = replace(data.messages, cut_M=np.ones(len(data.messages), dtype=bool))
    report = world.update("x", replace(data, messages=all_cut, filter_cut=True)).report
    assert report.outcome == "skipped_no_signal"
    assert "cut" in report.reason


def test_advantages_are_of_the_punished_returns():
    world = World(plan=DAPO)
    found = []

    def teach(agent, data):
        found.append(data)
        return world.update(agent, data)

    slots = schedule(DAPO.order, world.team.trainable, generator(0, "order"))
    step = next(iter(run_stage(world.team, DAPO, world.collect, teach, slots)))
    expected = step.batch.returns_PG(1.0) + punishments_PG(step.batch, DAPO, world.team.limits)
    assert not np.array_equal(expected, step.batch.returns_PG(1.0))
    np.testing.assert_array_equal(found[0].returns_PG, expected)
    values = group_advantages(expected, a_clip=np.inf, eps_norm=DAPO.advantage.eps).values_PG
    np.testing.assert_array_equal(found[0].advantages.values_PG, values)


# -- a reference policy ---------------------------------------------------------------------------------------


def test_groups_without_signal_pull_towards_the_reference_and_only_there():
    """GRPO's KL is on every message; without it a batch of equal rewards teaches nothing."""
    for name, outcome in (("grpo", "accepted"), ("dapo", "skipped_no_signal")):
        world = World(plan=PRESETS[name], reward=lambda k, value: 0.5)
        learner = world.engine.learner("x")
        learner.perturb(0.5, seed=1)
        world.team = world.team.replace("x", learner.version())
        data = world.training_batch("x", world.collect(world.team, 0))
        report = world.update("x", data).report
        assert report.outcome == outcome
        if name == "grpo":
            learner.begin(data.messages, reference=True)
            after = (learner.measure().reference_M / data.messages.lengths_M).mean()
            assert report.kl_reference == pytest.approx(after, rel=1e-9), "of the policy that was kept"
            before = World(plan=PRESETS[name]).engine.learner("x")
            before.perturb(0.5, seed=1)
            before.begin(data.messages, reference=True)
            assert after < (before.measure().reference_M / data.messages.lengths_M).mean()
        else:
            assert report.kl_reference is None
