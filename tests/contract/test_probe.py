"""Engine-side diagnostics: they measure what they say, and leave the agent as they found it, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_learner_memory import away_from_the_card, put_on_a_card

from conftest import make_batch, make_learner
from small import World
from teamtr.randomness import seed_of
from teamtr.rollout import play
from teamtr.theory.intervals import mean_interval
from teamtr.training.probe import DRAWS, STRETCH, Rollouts, log_ratios, stale_probe, token_shift


def one_stage(world: World):
    """Two updates of a stage with the stage's first batch kept, as a run with probes sees them."""
    first = world.collect(world.team, 0)
    seen = []
    batch = first
    for step, name in enumerate(("x", "y")):
        if step:
            batch = world.collect(world.team, step)
        learner = world.engine.learner(name)
        before = learner.snapshot()
        update = world.update(name, world.training_batch(name, batch))
        world.team = world.team.replace(name, learner.version())
        seen.append((name, before, learner.snapshot(), update))
    return first, seen


def rollouts(world: World, batch, name: str) -> Rollouts:
    advantages = world.plan.advantage.estimate(batch.returns_PG(1.0))
    return Rollouts(batch.of(name), advantages)


def test_the_gap_is_the_difference_of_two_surrogates_by_hand():
    world = World(radius=0.2, learning_rate=0.5)
    stale, fresh = world.collect(world.team, 5), world.collect(world.team, 6)
    _, seen = one_stage(world)
    name, before, after, _ = seen[1]
    learner = world.engine.learner(name)
    weights_E = np.linspace(-0.1, 0.1, len(stale.episodes))
    probe = stale_probe(learner, before, after, rollouts(world, fresh, name), rollouts(world, stale, name), weights_E)
    by_problem = []
    for batch in (fresh, stale):
        own = batch.of(name)
        ratio_M = log_ratios(learner, before, after, own)
        advantages_M = rollouts(world, batch, name).advantages.values_PG.reshape(-1)[own.episode_M]
        gain_M = np.expm1(ratio_M) * advantages_M
        by_problem.append(np.array([gain_M[own.problem_M == p].mean() for p in range(3)]))  # equally many of each
    fresh_P, stale_P = by_problem
    assert probe.fresh == pytest.approx(fresh_P.mean())
    assert probe.stale == pytest.approx(stale_P.mean())
    assert probe.gap.estimate == pytest.approx((fresh_P - stale_P).mean())
    assert probe.gap.upper == pytest.approx(mean_interval(fresh_P - stale_P).upper)
    assert 0 < probe.weights.effective_share < 1


@pytest.mark.slow
def test_without_staleness_the_gap_is_noise_and_an_own_batch_is_optimistic():
    """Fresh and stale are two batches of one team: their difference is zero on average, and its intervals hold zero
    as often as they say. The surrogate on the batch that was climbed on is far above either."""
    world = World(radius=0.05, learning_rate=0.3)
    gaps, holds, optimism = [], [], []
    problems = [replace(p, id=f"{p.id}{k}") for p in world.context.task.problems("train") for k in range(5)]
    for k in range(40):
        learner = world.engine.learner("x")
        own, fresh, stale = (play(world.context, world.team, problems, 8, seed=seed_of(k, part)) for part in range(3))
        before = learner.snapshot()
        update = world.update("x", world.training_batch("x", own), seed=k)
        if update.report.accepted:
            both = (rollouts(world, batch, "x") for batch in (fresh, stale))
            probe = stale_probe(learner, before, learner.snapshot(), *both, np.zeros(len(stale.episodes)))
            gaps.append(probe.gap.estimate)
            holds.append(probe.gap.lower <= 0.0 <= probe.gap.upper)
            optimism.append(update.report.surrogate - probe.stale)
        learner.restore(before)
    error = np.std(gaps, ddof=1) / np.sqrt(len(gaps))
    assert len(gaps) > 30
    assert abs(np.mean(gaps)) < 4 * error
    assert np.mean(holds) > 0.8
    assert np.mean(optimism) > 10 * error, "what used to be logged as the gap"


def test_a_silent_agent_has_no_gap():
    world = World()
    batch = world.collect(world.team, 0)
    one = rollouts(world, batch, "x")
    silent = replace(one, messages=batch.of("nobody"))
    snapshot = world.engine.learner("x").snapshot()
    for fresh, stale in ((one, silent), (silent, one)):
        assert stale_probe(world.engine.learner("x"), snapshot, snapshot, fresh, stale, np.zeros(48)) is None


def test_probes_change_nothing():
    world = World(radius=0.2, learning_rate=0.5)
    first, seen = one_stage(world)
    before = {name: learner.fingerprint() for name, learner in world.engine.learners.items()}
    name, old, new, _ = seen[1]
    own = rollouts(world, first, name)
    stale_probe(world.engine.learner(name), old, new, own, own, np.zeros(len(first.episodes)))
    token_shift(world.engine.learner(name), old, new, first.of(name), np.random.default_rng(0))
    assert before == {name: learner.fingerprint() for name, learner in world.engine.learners.items()}


def test_a_probe_that_fails_leaves_the_new_weights(monkeypatch):
    world = World(radius=0.2, learning_rate=0.5)
    first, seen = one_stage(world)
    name, old, new, _ = seen[0]
    learner, own = world.engine.learner(name), first.of(name)
    kept = learner.fingerprint()

    def broken(*_):
        raise RuntimeError("injected")

    rng = np.random.default_rng(0)
    for probe in (lambda: log_ratios(learner, old, new, own), lambda: token_shift(learner, old, new, own, rng)):
        for method in ("begin", "measure"):
            with monkeypatch.context() as patched:
                patched.setattr(learner, method, broken)
                with pytest.raises(RuntimeError, match="injected"):
                    probe()
            assert learner.fingerprint() == kept


def test_a_probe_leaves_no_moments_on_the_card(monkeypatch):
    world = World(radius=0.2, learning_rate=0.5)
    first, seen = one_stage(world)
    name, old, new, _ = seen[0]
    learner, own = world.engine.learner(name), first.of(name)
    assert learner.optimizer.moments
    put_on_a_card(learner, monkeypatch)
    log_ratios(learner, old, new, own)
    assert away_from_the_card(learner)
    token_shift(learner, old, new, own, np.random.default_rng(0))
    assert away_from_the_card(learner)


@pytest.mark.parametrize("kind", ["tabular", "full", "lora"])
def test_token_shift_is_what_the_logits_say(kind):
    learner = make_learner(kind, micro_batch=3)
    batch = make_batch(learner)
    before = learner.snapshot()
    learner.perturb(0.2, seed=1)
    after = learner.snapshot()
    shift = token_shift(learner, before, after, batch, np.random.default_rng(0))

    def logp(snapshot) -> torch.Tensor:
        learner.restore(snapshot)
        with torch.no_grad(), learner.policy.computing():
            return learner.policy.head()(learner.policy.features(batch.prompts, batch.messages)).log_softmax(-1)

    cur, new = logp(before), logp(after)
    assert shift.positions == len(cur)
    order = cur.sort(dim=-1, descending=True, stable=True).indices[:, : len(shift.before_R) - 1]
    np.testing.assert_allclose(shift.before_R[:-1], cur.gather(-1, order).exp().mean(0), rtol=1e-4)
    np.testing.assert_allclose(shift.after_R[:-1], new.gather(-1, order).exp().mean(0), rtol=1e-4)
    moved = (new - cur).gather(-1, order).abs().mean(0)
    np.testing.assert_allclose(shift.moved_R[:-1], moved, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose([shift.before_R.sum(), shift.after_R.sum()], 1.0, atol=1e-5)
    assert shift.flipped == pytest.approx(float((new.argmax(-1) != cur.argmax(-1)).float().mean()))


def test_no_change_is_no_shift():
    learner = make_learner("full")
    batch = make_batch(learner)
    same = learner.snapshot()
    shift = token_shift(learner, same, same, batch, np.random.default_rng(0))
    assert shift.flipped == 0.0
    assert not shift.moved_R.any()


@pytest.mark.parametrize("kind", ["tabular", "full", "lora"])
def test_sampled_kl_of_positions(kind):
    """Single values from the two policies' own log-probabilities, and the sums that the gate's measure gives."""
    learner = make_learner(kind, micro_batch=3)
    batch = make_batch(learner)
    before = learner.snapshot()
    learner.begin(batch)
    learner.perturb(0.2, seed=1)
    after, measured = learner.snapshot(), learner.measure()
    learner.end()
    found = token_shift(learner, before, after, batch, np.random.default_rng(0))
    told = found.sampled_kl
    assert (told.messages, told.positions) == (len(batch), found.positions)
    assert told.exact == pytest.approx(measured.full_M.mean(), rel=1e-4)
    assert told.k1 == pytest.approx(measured.k1_M.mean(), rel=1e-4, abs=1e-6)
    assert told.k3 == pytest.approx(measured.k3_M.mean(), rel=1e-3)
    assert [(t.episode, t.turn) for t in told.tokens] == list(zip(batch.episode_M, batch.turn_M, strict=True))
    np.testing.assert_allclose([sum(t.kl) for t in told.tokens], measured.full_M, rtol=1e-3)
    assert [len(t.kl) for t in told.tokens] == batch.lengths_M.tolist()
    assert [len(d.k1) for d in told.draws] == [DRAWS, DRAWS]
    assert np.std(told.draws[0].k1) > np.std(told.draws[1].k1) > 0  # a quarter of the positions, then half


def test_a_step_made_longer_moves_more_and_is_not_kept():
    learner = make_learner("tabular", micro_batch=3)
    batch = make_batch(learner)
    before = learner.snapshot()
    learner.perturb(0.05, seed=1)
    after, kept = learner.snapshot(), learner.fingerprint()
    found = token_shift(learner, before, after, batch, np.random.default_rng(0))
    assert learner.fingerprint() == kept
    assert found.stretched.kl == pytest.approx(STRETCH**2 * found.sampled_kl.exact, rel=0.1)  # KL grows with the square
    assert found.stretched.moved_R[0] == pytest.approx(STRETCH * found.moved_R[0], rel=0.1)


def test_only_whole_messages_are_logged_token_by_token(monkeypatch):
    learner = make_learner("tabular")
    batch = make_batch(learner)
    lengths = batch.lengths_M
    monkeypatch.setattr("teamtr.training.probe.SHOWN_POSITIONS", int(lengths[:2].sum()))
    same = learner.snapshot()
    told = token_shift(learner, same, same, batch, np.random.default_rng(0)).sampled_kl
    assert [len(t.kl) for t in told.tokens] == lengths[:2].tolist()
    assert told.positions == lengths.sum()
