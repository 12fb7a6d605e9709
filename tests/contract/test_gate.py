"""The gate looks at some episodes of every problem first, and at all of them where those do not settle it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from small import World
from teamtr.gate import FEWEST, FIRST_DOUBT, looks_at
from teamtr.lesson import Optimisation
from teamtr.randomness import seed_of
from teamtr.theory.intervals import bootstrap_upper
from teamtr.types import Divergence, StepStats
from teamtr.update import Stakes, certify

GROUP = 64
STAKES = Stakes(turns=1, horizon=2, reward_range=1.0)


def wide_lesson(world: World, agent: str = "x"):
    """Three problems of 64 episodes."""
    return world.lesson(agent, world.collect(world.team, 0, group=GROUP))


def test_a_first_look_takes_equally_many_whole_episodes_of_every_problem():
    lesson = wide_lesson(World())
    some, everything = looks_at(lesson, 0.5, seed=0)
    assert np.bincount(lesson.batch.problem_M[some.rows]).tolist() == [32, 32, 32]
    assert some.episodes == 96
    assert everything.rows.tolist() == list(range(3 * GROUP))
    assert not np.array_equal(some.rows, looks_at(lesson, 0.5, seed=1)[0].rows)
    few, _ = looks_at(lesson, 0.01, seed=0)
    assert FEWEST <= few.episodes < FEWEST + 3
    assert len(looks_at(lesson, 1.0, seed=0)) == 1


def test_what_the_first_look_settles_is_not_looked_at_again():
    world = World()
    lesson = wide_lesson(world)
    report = world.teach("x", lesson, optimisation=replace(world.optimisation, gate_share=0.4)).report
    assert report.outcome == "accepted"
    assert report.messages == 3 * GROUP
    assert report.messages_measured == 3 * 26
    whole = World().teach("x", lesson, optimisation=replace(world.optimisation, gate_share=1.0))
    assert whole.report.messages_measured == 3 * GROUP
    assert report.tokens["scored"] < whole.report.tokens["scored"]
    assert whole.log_ratio_M is not None
    # the weights are the same, so the KL of some messages is that of all but for sampling
    assert report.kl_full == pytest.approx(whole.report.kl_full, rel=0.25)
    assert report.kl_discounted == pytest.approx(whole.report.kl_discounted, rel=0.25)


def test_a_doubtful_first_look_is_followed_by_one_at_all_messages(monkeypatch):
    """Some messages read too large, all of them do not: the second look decides."""
    world = World(radius=0.1)
    lesson = wide_lesson(world)
    learner = world.engine.learner("x")
    measure, looked = learner.measure, []

    def doubtful(rows=None):
        found = measure(rows)
        looked.append(len(found.full_M))
        many = len(found.full_M) == 3 * GROUP
        return found if many else replace(found, full_M=found.full_M + (1.0 if len(looked) > 3 else 0.0))

    monkeypatch.setattr(learner, "measure", doubtful)
    report = world.teach("x", lesson).report
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


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_steps_that_change_nothing_are_not_accepted(monkeypatch, share):
    """Also where measuring in another order shows a KL of rounding and a surrogate above zero."""
    world = World()
    lesson = wide_lesson(world)
    learner = world.engine.learner("x")
    monkeypatch.setattr(learner, "step", lambda *_, **__: StepStats(True, 0.0, 0.0, 0.0, 0.0))
    measure = learner.measure

    def rounded(rows=None):
        found = measure(rows)
        return replace(found, full_M=found.full_M + 1e-14, log_ratio_M=1e-9 * lesson.advantages_M[rows])

    monkeypatch.setattr(learner, "measure", rounded)
    report = world.teach("x", lesson, optimisation=replace(world.optimisation, gate_share=share)).report
    assert (report.outcome, report.reason) == ("restored", "the steps changed nothing")


def test_outside_by_both_looks_backs_off():
    world = World(learning_rate=3.0)
    lesson = wide_lesson(world)
    report = world.teach("x", lesson, optimisation=Optimisation(learning_rate=3.0, epochs=8)).report
    assert report.backtracks > 0
    assert report.kl_upper <= report.radius


def test_a_certificate_from_some_episodes_is_right_on_average():
    """Over many draws of the first look, the terms of the certificate average to those of all messages."""
    world = World()
    lesson = wide_lesson(world)
    rng = np.random.default_rng(0)
    ratio_M = rng.normal(scale=0.2, size=len(lesson.batch))
    kl_M = np.abs(ratio_M) / 100
    report = world.teach("x", lesson).report
    report = replace(report, kl_full=1.0, kl_upper=1.0)

    def terms(look=None):
        rows = slice(None) if look is None else look.rows
        seen = Divergence(kl_M[rows], -ratio_M[rows], kl_M[rows], ratio_M[rows])
        ours, _ = certify(report, seen, lesson, replace(STAKES, turns=2), 1.0, 3.0, look)
        return ours.terms

    drawn = [terms(looks_at(lesson, 0.25, seed)[0]) for seed in range(400)]
    values = np.array([t["surrogate"] for t in drawn])
    assert abs(values.mean() - terms()["surrogate"]) < 4 * values.std() / 20
    assert np.mean([t["occupancy"] for t in drawn]) == pytest.approx(terms()["occupancy"], rel=0.05)


def test_a_gain_that_few_messages_show_by_luck_is_looked_at_twice(monkeypatch):
    """The surrogate of the first look is above zero and uncertain, that of all messages below: nothing is kept."""
    world = World(radius=0.1)
    lesson = wide_lesson(world)
    learner = world.engine.learner("x")
    measure = learner.measure
    some, _ = looks_at(lesson, 0.25, seed_of(0, "x"))
    lucky = np.isin(np.arange(len(lesson.batch)), some.rows[: len(some.rows) // 2 + 3])
    signs_M = np.where(np.isin(np.arange(len(lesson.batch)), some.rows), np.where(lucky, 1.0, -1.0), -1.0)
    gain_M = 1e-3 * signs_M * np.sign(lesson.advantages_M + 1e-12)

    def uncertain(rows=None):
        found = measure(rows)
        chosen = slice(None) if rows is None else rows
        return replace(found, full_M=0 * found.full_M + 1e-6, log_ratio_M=gain_M[chosen])

    monkeypatch.setattr(learner, "measure", uncertain)
    report = world.teach("x", lesson, optimisation=replace(world.optimisation, max_backtracks=0)).report
    assert report.outcome == "restored"
    assert "surrogate -" in report.reason
