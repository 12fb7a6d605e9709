"""The gate looks at some episodes of every problem first, and at all of them where those do not settle it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from small import World
from teamtr.answers import Divergence, StepStats
from teamtr.presets import Region
from teamtr.randomness import seed_of
from teamtr.rollout import play
from teamtr.theory.intervals import bootstrap_upper
from teamtr.training.batch import Optimization
from teamtr.training.certify import CertificateInputs, certify
from teamtr.training.gate import FEWEST, FIRST_DOUBT, gate, subsamples_of

GROUP = 64
STAKES = CertificateInputs(turns=1, horizon=2, reward_range=1.0)


def wide_lesson(world: World, agent: str = "x"):
    """Three problems of 64 episodes."""
    return world.training_batch(agent, world.collect(world.team, 0, group=GROUP))


def test_a_first_look_takes_equally_many_whole_episodes_of_every_problem():
    data = wide_lesson(World())
    some, everything = subsamples_of(data, data.train_M, 0.5, seed=0)
    assert np.bincount(data.messages.problem_M[some.rows]).tolist() == [32, 32, 32]
    assert some.episodes == 96
    assert everything.rows.tolist() == list(range(3 * GROUP))
    assert not np.array_equal(some.rows, subsamples_of(data, data.train_M, 0.5, seed=1)[0].rows)
    few, _ = subsamples_of(data, data.train_M, 0.01, seed=0)
    assert FEWEST <= few.episodes < FEWEST + 3
    assert len(subsamples_of(data, data.train_M, 1.0, seed=0)) == 1


def test_what_the_first_look_settles_is_not_looked_at_again():
    world = World()
    data = wide_lesson(world)
    update = world.update("x", data, optimization=replace(world.optimization, gate_share=0.4))
    report = update.report
    assert update.log_ratio_M is None, "some messages were not measured"
    assert report.outcome == "accepted"
    assert report.messages == 3 * GROUP
    assert report.messages_measured == 3 * 26
    whole = World().update("x", data, optimization=replace(world.optimization, gate_share=1.0))
    assert whole.report.messages_measured == 3 * GROUP
    assert report.tokens["scored"] < whole.report.tokens["scored"]
    assert whole.log_ratio_M is not None
    # the weights are the same, so the KL of some messages is that of all but for sampling
    assert report.kl_full == pytest.approx(whole.report.kl_full, rel=0.25)
    assert report.kl_discounted == pytest.approx(whole.report.kl_discounted, rel=0.25)


def test_a_doubtful_first_look_is_followed_by_one_at_all_messages(monkeypatch):
    """Some messages read too large, all of them do not: the second look decides."""
    world = World(radius=0.1)
    data = wide_lesson(world)
    learner = world.engine.learner("x")
    measure, looked = learner.measure, []

    def doubtful(rows=None):
        found = measure(rows)
        looked.append(len(found.full_M))
        many = len(found.full_M) == 3 * GROUP
        return found if many else replace(found, full_M=found.full_M + (1.0 if len(looked) > 3 else 0.0))

    monkeypatch.setattr(learner, "measure", doubtful)
    report = world.update("x", data).report
    assert report.outcome == "accepted"
    assert report.backtracks == 0
    assert report.messages_measured == 3 * GROUP
    assert looked[-2:] == [3 * 22, 3 * GROUP]


@pytest.mark.long
def test_two_looks_are_hardly_easier_to_pass_than_one():
    """Mean KLs at the radius, problems and messages unequal: how often a gate accepts what it should just refuse."""
    rng = np.random.default_rng(0)
    problem_PG = np.repeat(np.arange(32), 8).reshape(32, 8)
    once = twice = 0
    for _ in range(300):
        kl_PG = np.exp(rng.normal(0, 0.5, (32, 1)) - 0.125) * np.exp(rng.normal(0, 1, (32, 8)) - 0.5)

        def bound(count, doubt, kl_PG=kl_PG):
            part = kl_PG[:, :count].reshape(-1), problem_PG[:, :count].reshape(-1)
            return bootstrap_upper(*part, confidence=1 - 0.05 * doubt, rng=np.random.default_rng(1), draws=400)

        once += bound(8, 1.0) <= 1.0
        twice += bound(2, FIRST_DOUBT) <= 1.0 or bound(8, 1.0 - FIRST_DOUBT) <= 1.0
    assert 15 < once < 60
    assert twice < 1.5 * once


@pytest.mark.long
def test_two_looks_share_one_doubt(monkeypatch):
    """What both together may be wrong about is what one look may be: a twentieth."""
    world = World(radius=1e-5)
    data = wide_lesson(world)
    asked = {}

    def watched(values_M, *_, confidence, **__):
        asked.setdefault(len(values_M), set()).add(round(1.0 - confidence, 9))
        return np.inf

    monkeypatch.setattr("teamtr.training.gate.bootstrap_upper", watched)
    world.update("x", data)
    first, second = asked[3 * 22], asked[3 * GROUP]
    assert (first, second) == ({round(0.05 * FIRST_DOUBT, 9)}, {round(0.05 * (1.0 - FIRST_DOUBT), 9)})
    asked.clear()
    world.update("x", data, optimization=replace(world.optimization, gate_share=1.0))
    assert asked == {3 * GROUP: {0.05}}


def test_weighted_messages_are_bounded_by_their_weighted_mean():
    """By hand: two problems, one of which the present team hardly visits any more."""
    kl_M, problem_M = np.array([0.1, 0.1, 0.5, 0.5]), np.array([0, 0, 1, 1])
    weights_M = np.array([1.9, 1.9, 0.1, 0.1])
    rng = np.random.default_rng
    equal = bootstrap_upper(kl_M, problem_M, weights_M=np.full(4, 7.0), rng=rng(0))
    assert equal == pytest.approx(bootstrap_upper(kl_M, problem_M, rng=rng(0)))
    assert bootstrap_upper(kl_M[:2], problem_M[:2], weights_M=weights_M[:2], rng=rng(0)) == pytest.approx(0.1)
    many_M, problems_M = np.tile(kl_M, 50), np.repeat(np.arange(100), 2)
    heavy_M = np.tile(weights_M, 50)
    upper = bootstrap_upper(many_M, problems_M, weights_M=heavy_M, rng=rng(0))
    assert 0.12 < upper < 0.14, "the weighted mean is 0.12, the plain one 0.3"
    with pytest.raises(ValueError, match="one weight of at least 0"):
        bootstrap_upper(kl_M, problem_M, weights_M=-weights_M, rng=rng(0))


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_steps_that_change_nothing_are_not_accepted(monkeypatch, share):
    """Also where measuring in another order shows a KL of rounding and a surrogate above zero."""
    world = World()
    data = wide_lesson(world)
    learner = world.engine.learner("x")
    monkeypatch.setattr(learner, "step", lambda *_, **__: StepStats(True, 0.0, 0.0, 0.0, 0.0))
    measure = learner.measure

    def rounded(rows=None):
        found = measure(rows)
        return replace(found, full_M=found.full_M + 1e-14, log_ratio_M=1e-9 * data.advantages_M[rows])

    monkeypatch.setattr(learner, "measure", rounded)
    report = world.update("x", data, optimization=replace(world.optimization, gate_share=share)).report
    assert (report.outcome, report.reason) == ("restored", "the steps changed nothing")
    assert report.backtracks == 0


def test_outside_by_both_looks_backs_off():
    world = World(learning_rate=3.0)
    data = wide_lesson(world)
    report = world.update("x", data, optimization=Optimization(learning_rate=3.0, epochs=8)).report
    assert report.backtracks > 0
    assert report.kl_upper <= report.radius


@pytest.mark.long
def test_a_certificate_from_some_episodes_is_right_on_average(monkeypatch):
    """Over many draws of the first look, the terms of the certificate average to those of all messages."""
    world = World()
    data = wide_lesson(world)
    rng = np.random.default_rng(0)
    ratio_M = rng.normal(scale=0.2, size=len(data.messages))
    kl_M = np.abs(ratio_M) / 100
    monkeypatch.setattr(
        "teamtr.training.certify.bootstrap_upper", lambda kl_M, *_, **__: kl_M.mean()
    )  # the same caution for all

    def terms(subsample=None):
        rows = slice(None) if subsample is None else subsample.rows
        seen = Divergence(kl_M[rows], -ratio_M[rows], kl_M[rows], ratio_M[rows])
        ours, _ = certify(seen, data, replace(STAKES, turns=2), gamma=1.0, a_max=3.0, zeta=0.0, subsample=subsample)
        return ours.terms

    drawn = [terms(subsamples_of(data, data.train_M, 0.25, seed)[0]) for seed in range(400)]
    values = np.array([t["surrogate"] for t in drawn])
    assert abs(values.mean() - terms()["surrogate"]) < 4 * values.std() / 20
    assert np.mean([t["occupancy"] for t in drawn]) == pytest.approx(terms()["occupancy"], rel=0.05)


def test_a_gain_that_few_messages_show_by_luck_is_looked_at_twice(monkeypatch):
    """The surrogate of the first look is above zero and uncertain, that of all messages below: nothing is kept."""
    world = World(radius=0.1)
    data = wide_lesson(world)
    learner = world.engine.learner("x")
    measure = learner.measure
    some, _ = subsamples_of(data, data.train_M, 0.25, seed_of(0, "x"))
    lucky = np.isin(np.arange(len(data.messages)), some.rows[: len(some.rows) // 2 + 3])
    signs_M = np.where(np.isin(np.arange(len(data.messages)), some.rows), np.where(lucky, 1.0, -1.0), -1.0)
    gain_M = 1e-3 * signs_M * np.sign(data.advantages_M + 1e-12)

    def uncertain(rows=None):
        found = measure(rows)
        chosen = slice(None) if rows is None else rows
        return replace(found, full_M=0 * found.full_M + 1e-6, log_ratio_M=gain_M[chosen])

    monkeypatch.setattr(learner, "measure", uncertain)
    report = world.update("x", data, optimization=replace(world.optimization, max_backtracks=0)).report
    assert report.outcome == "restored"
    assert "surrogate -" in report.reason


def test_a_step_inside_that_gains_nothing_is_halved_and_then_restored(monkeypatch):
    """Shortening by the square law would go nowhere: the KL is fine, the surrogate is not."""
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    measure, move, fractions = learner.measure, learner.move, []

    def losing(rows=None):
        found = measure(rows)
        chosen = slice(None) if rows is None else rows
        return replace(found, full_M=0 * found.full_M + 1e-6, log_ratio_M=-1e-3 * np.sign(data.advantages_M[chosen]))

    def watched(start, end, fraction):
        fractions.append(fraction)
        move(start, end, fraction)

    monkeypatch.setattr(learner, "measure", losing)
    monkeypatch.setattr(learner, "move", watched)
    report = world.update("x", data, optimization=replace(world.optimization, max_backtracks=2)).report
    assert report.outcome == "restored"
    assert fractions == [0.5, 0.25, 0.125]
    assert (report.backtracks, report.kl_rejected) == (2, None), "it never was outside"


def test_a_step_outside_goes_back_by_the_square_law(monkeypatch):
    """To nine tenths of the radius by the bound that was seen; the first bound is what was rejected."""
    world = World(learning_rate=0.3)
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    optimization = Optimization(learning_rate=0.3, epochs=1, minibatches=16)
    move, fractions = learner.move, []
    monkeypatch.setattr(learner, "move", lambda *args: (fractions.append(args[2]), move(*args)))
    report = world.update("x", data, optimization=optimization).report
    assert report.kl_rejected > report.radius
    first = np.sqrt(0.9 * report.radius / report.kl_rejected)
    assert fractions[-report.backtracks] == pytest.approx(first)
    assert report.fraction == fractions[-1] <= first


def test_a_first_look_without_a_judge_is_not_taken():
    data = wide_lesson(World())
    some, _ = subsamples_of(data, data.train_M, 0.25, seed=0)
    elsewhere = ~np.isin(np.arange(len(data.messages)), some.rows)
    assert len(subsamples_of(data, elsewhere, 0.25, seed=0)) == 1
    small = World().training_batch("x", World().collect(World().team, 0))
    assert len(subsamples_of(small, small.train_M, 0.25, seed=0)) == 1, "48 episodes are fewer than a first look takes"


# -- judged by problems that a step was not made from ------------------------------------------------------------


def many_problems(world: World, seed: int, count: int = 8):
    problems = [replace(p, id=f"{p.id}{k}") for p in world.context.task.problems("train") for k in range(count)]
    return world.training_batch("x", play(world.context, world.team, problems, 8, seed=seed))


def test_halves_judge_each_other_and_every_problem_is_learned_from():
    world = World()
    data = many_problems(world, 0).hold_out(0.25, np.random.default_rng(0))
    first, second = data.folds(world.plan.objective, cross_fit=True, rng=np.random.default_rng(0))
    assert not (first.train_M & first.judge_M).any()
    assert not (second.train_M & second.judge_M).any()
    assert ((first.train_M | second.train_M) == data.informative_M).all()
    assert ((first.judge_M | second.judge_M) == data.train_M).all(), "what is set aside judges nothing"
    for fold in (first, second):
        trained = set(data.messages.cluster_M[fold.train_M])
        assert not trained & set(data.messages.cluster_M[fold.judge_M]), "whole problems"
    assert (first.opens, second.opens) == (True, False)
    assert (first.radius_share, second.radius_share) == (0.25, 1.0), "half the way has a quarter of the KL"
    (whole,) = data.folds(world.plan.objective, cross_fit=False, rng=np.random.default_rng(0))
    assert (whole.train_M == data.informative_M).all()
    assert (whole.judge_M == data.train_M).all()
    assert (whole.opens, whole.radius_share) == (True, 1.0)


@pytest.mark.slow
def test_rewards_that_nothing_earns_are_seldom_kept_when_others_judge():
    """A coin decides the reward. On its own batch every step gains; on the other half it is as likely to lose."""
    kept = {}
    for cross_fit in (False, True):
        kept[cross_fit] = 0
        for k in range(20):
            coins = np.random.default_rng(k).integers(0, 2, 10_000)
            world = World(reward=lambda e, _, coins=coins: float(coins[e]))
            optimization = replace(world.optimization, cross_fit=cross_fit)
            kept[cross_fit] += world.update(
                "x", many_problems(world, k), seed=k, optimization=optimization
            ).report.accepted
    assert kept[False] == 20
    assert kept[True] < 17


@pytest.mark.slow
def test_a_cross_fitted_surrogate_is_what_new_problems_say():
    """The surrogate that is reported, less that of the same step on a new batch of the old team: near zero on average
    when cross-fitted, well above it when the step judges itself."""
    optimism, errors = {}, {}
    for cross_fit in (False, True):
        found = []
        for k in range(24):
            world = World(radius=0.05)
            learner = world.engine.learner("x")
            data, other, before = many_problems(world, k), many_problems(world, 1000 + k), learner.snapshot()
            optimization = replace(world.optimization, cross_fit=cross_fit)
            report = world.update("x", data, seed=k, optimization=optimization).report
            after = learner.snapshot()
            learner.restore(before)
            learner.begin(other.messages)
            learner.restore(after)
            fair = (np.expm1(learner.measure().log_ratio_M) * other.advantages_M).mean()
            found.append(report.surrogate - fair)
        optimism[cross_fit], errors[cross_fit] = np.mean(found), np.std(found, ddof=1) / np.sqrt(len(found))
    assert optimism[False] > 5 * errors[False]
    assert abs(optimism[True]) < 0.5 * optimism[False], "what remains is that only liked steps are kept"


def test_two_kept_halves_add_up(monkeypatch):
    world = World(radius=0.05)
    tried = []
    monkeypatch.setattr(
        "teamtr.training.update.gate", lambda *args, **named: (tried.append(gate(*args, **named)), tried[-1])[1]
    )
    optimization = replace(world.optimization, cross_fit=True)
    report = world.update("x", many_problems(world, 3), optimization=optimization).report
    first, second = tried
    assert first.accepted
    assert second.accepted
    assert report.surrogate == first.gain + second.gain
    assert report.backtracks == first.backtracks + second.backtracks
    assert (report.kl_upper, report.messages_measured) == (second.upper, len(second.subsample.rows))
    assert report.steps == 16


@pytest.mark.long
def test_a_second_half_that_loses_leaves_what_the_first_gained(monkeypatch):
    world = World(radius=0.05)
    learner = world.engine.learner("x")
    after_first = []

    def one_only(learner, data, start, judge_M, plan, optimization, radius, seed, *, moved):
        allowed = 1e-30 if after_first else radius
        kept = gate(learner, data, start, judge_M, plan, optimization, allowed, seed, moved=moved)
        after_first.append((learner.snapshot().parameters, kept))
        return kept

    monkeypatch.setattr("teamtr.training.update.gate", one_only)
    optimization = replace(world.optimization, cross_fit=True)
    update = world.update("x", many_problems(world, 0), optimization=optimization)
    (first, kept), (last, undone) = after_first
    assert (kept.accepted, undone.accepted) == (True, False)
    assert all(torch.equal(first[key], last[key]) for key in first)
    assert update.report.outcome == "accepted"
    assert update.report.surrogate == kept.gain
    assert update.report.kl_upper == kept.upper <= 0.25 * 0.05
    assert update.report.fraction == kept.fraction / 2
    assert undone.reached < update.report.radius
    assert update.report.kl_rejected is None, "neither fold left the radius of the whole update"
    assert update.report.version_after == learner.version() != update.report.version_before


def test_one_problem_has_no_other_to_judge_it():
    world = World()
    data = world.training_batch(
        "x", play(world.context, world.team, world.context.task.problems("train")[:1], 16, seed=0)
    )
    report = world.update("x", data, optimization=replace(world.optimization, cross_fit=True)).report
    assert (report.outcome, "one problem only" in report.reason) == ("skipped_no_signal", True)


# -- steering without a gate ---------------------------------------------------------------------------------------


def test_without_a_gate_beta_is_steered_by_the_kl_itself(monkeypatch):
    """The mean over all messages: not a bound, and not of a quarter of the episodes."""
    world = World(learning_rate=0.2)
    data = wide_lesson(world)
    steered = []

    def watched(beta, kl, target):
        steered.append(kl)
        return beta

    monkeypatch.setattr("teamtr.training.update.adapt_beta", watched)
    report = world.update("x", data, region=Region(gate=False, adapt_beta=True)).report
    assert report.messages_measured == 3 * GROUP
    assert steered == [report.kl_full]
    assert report.kl_full < report.kl_upper
    world.update("x", data, seed=1)
    assert len(steered) == 2


# -- what an update is given -----------------------------------------------------------------------------------------


def test_kls_are_charged_in_the_unit_of_the_radius():
    world = World()
    data = wide_lesson(world)
    kl_M, lengths_M = np.arange(len(data.messages), dtype=float), data.messages.lengths_M
    assert len(set(lengths_M)) > 1
    per_token = replace(world.plan.radii, per_token=True)
    rows = np.array([3, 50, 120])
    np.testing.assert_array_equal(data.kl_in_radius_units(kl_M, world.plan.radii), kl_M)
    np.testing.assert_allclose(data.kl_in_radius_units(kl_M, per_token), kl_M / lengths_M)
    np.testing.assert_allclose(data.kl_in_radius_units(kl_M[rows], per_token, rows), kl_M[rows] / lengths_M[rows])


def test_means_are_weighted_where_another_team_wrote():
    data = wide_lesson(World())
    values_M, rows = np.arange(3.0 * GROUP), np.array([0, 1])
    assert data.mean(values_M) == values_M.mean()
    assert data.mean(values_M[rows], rows) == 0.5
    weights_E = np.where(np.arange(3 * GROUP) == 0, 3.0, 1.0)
    weighed = replace(data, contexts_M=weights_E)
    assert weighed.mean(values_M[rows], rows) == pytest.approx(1 / 4), "three parts of 0 and one of 1"
    assert weighed.mean(values_M) == pytest.approx((weights_E * values_M).sum() / weights_E.sum())
    nowhere = replace(data, contexts_M=np.where(np.arange(3 * GROUP) < 2, 0.0, 1.0))
    assert nowhere.mean(values_M[rows], rows) == np.inf, "the present team never says any of these"


def test_what_is_set_aside_is_numbered_anew():
    data = wide_lesson(World())
    aside, rows = replace(data, holdout_P=np.arange(3) != 1).holdout()
    assert sorted(set(aside.messages.problem_M)) == [0, 1]
    assert (aside.messages.problem_M == (data.messages.problem_M[rows] == 2)).all()
    assert (aside.messages.episode_M == np.arange(2 * GROUP)).all()
    assert aside.fresh
    assert not replace(data, holdout_P=np.arange(3) != 1, fresh=False).holdout()[0].fresh


def test_cut_messages_are_not_climbed_on_where_the_plan_says_so():
    world = World()
    data = wide_lesson(world)
    cut_M = np.arange(len(data.messages)) % 5 == 0
    marked = replace(data, messages=replace(data.messages, cut_M=cut_M))
    objective = world.plan.objective
    np.testing.assert_array_equal(marked.gradient_M(objective), data.informative_M)
    filtered = replace(marked, filter_cut=True)
    np.testing.assert_array_equal(filtered.gradient_M(objective), data.informative_M & ~cut_M)
