"""Engine-side diagnostics: they measure what they say, and leave the agent as they found it, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_learner_memory import away_from_the_card, put_on_a_card

from conftest import make_batch, make_learner
from small import World
from teamtr.diagnostics.probe import STRETCH, log_ratios, stale_probe, token_shift
from teamtr.diagnostics.subsampling import DRAWS
from teamtr.theory.advantages import group_advantages


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
        update = world.teach(name, world.lesson(name, batch))
        world.team = world.team.replace(name, learner.version())
        seen.append((name, before, learner.snapshot(), update))
    return first, seen


def probe_all(world, first, seen):
    returns_PG = first.returns_PG(1.0)
    advantages = group_advantages(returns_PG, a_clip=world.plan.a_clip, eps_norm=world.plan.eps_norm)
    weights_E = np.zeros(len(first.episodes))
    probes = []
    for name, before, after, update in seen:
        probe, weights_E = stale_probe(
            world.engine.learner(name), before, after, first.of(name), advantages, update.report.surrogate, weights_E
        )
        probes.append(probe)
    return probes, weights_E


def test_the_first_update_of_a_stage_is_not_stale_and_the_second_is():
    world = World(radius=0.2, learning_rate=0.5)
    first, seen = one_stage(world)
    probes, weights_E = probe_all(world, first, seen)
    assert probes[0].gap == pytest.approx(0.0, abs=1e-12), "it learned from the stage's first batch itself"
    assert probes[0].weights is None
    assert probes[1].gap > 1e-6
    assert probes[1].weights is not None
    assert 0 < probes[1].weights.effective_share < 1
    # The weights carried past both updates are exactly the likelihood ratios of the whole conversations.
    expected_E = np.zeros(len(first.episodes))
    for name, _, _, _ in seen:
        own = first.of(name)
        learner = world.engine.learner(name)
        learner.begin(own)
        now_M = np.array([x.sum() for x in learner.token_logprobs()])
        learner.end()
        then_M = np.array([x.sum() for x in own.sampler_logprobs])
        expected_E += np.bincount(own.episode_M, weights=now_M - then_M, minlength=len(expected_E))
    np.testing.assert_allclose(weights_E, expected_E, atol=1e-4)  # the sampler's log-probabilities are float32


def test_probes_change_nothing():
    world = World(radius=0.2, learning_rate=0.5)
    first, seen = one_stage(world)
    before = {name: learner.fingerprint() for name, learner in world.engine.learners.items()}
    probe_all(world, first, seen)
    name, old, new, _ = seen[1]
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
    assert learner._moments
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
    monkeypatch.setattr("teamtr.diagnostics.probe.SHOWN_POSITIONS", int(lengths[:2].sum()))
    same = learner.snapshot()
    told = token_shift(learner, same, same, batch, np.random.default_rng(0)).sampled_kl
    assert [len(t.kl) for t in told.tokens] == lengths[:2].tolist()
    assert told.positions == lengths.sum()
