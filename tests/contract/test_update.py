"""What one update promises: inside its region or undone, and a report of what was kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from small import World
from teamtr.answers import Divergence
from teamtr.presets import PRESETS, Region
from teamtr.theory.estimators import GroupAdvantage
from teamtr.theory.zeta import zeta_norm
from teamtr.training.batch import Optimization
from teamtr.training.update import _subsample, messages_measured


def weights(world: World, agent: str = "x") -> dict[str, torch.Tensor]:
    return world.engine.learner(agent).snapshot().parameters


def test_an_accepted_update_is_inside_and_reports_what_was_kept():
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    before = world.engine.version("x")
    report = world.update("x", data).report
    assert report.outcome == "accepted"
    assert 0 < report.kl_full <= report.kl_upper <= report.radius == 0.01
    assert report.surrogate > 0
    assert (report.version_before, report.version_after) == (before, world.engine.version("x"))
    assert report.steps == 8
    assert report.tokens["trained"] > 0
    assert report.tokens["scored"] > 0
    assert set(report.seconds) == {"score", "train", "gate"}


def test_the_reported_kl_is_that_of_the_weights_that_stayed():
    """Freeze the old weights again and measure: the same number to the last digit."""
    world = World(learning_rate=3.0)  # far too large, so that the kept policy is not the tried one
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    old = learner.snapshot()
    report = world.update("x", data, optimization=Optimization(learning_rate=3.0, epochs=8)).report
    kept = learner.snapshot()
    learner.restore(old)
    learner.begin(data.messages)
    learner.restore(kept)
    assert learner.measure().full_M.mean() == report.kl_full
    assert -learner.measure().log_ratio_M.mean() == report.kl_k1


@pytest.mark.parametrize(("tokens", "measured"), [(1, 64), (64, 64), (65, 63), (256, 16), (600, 8), (16_000, 8)])
def test_few_long_messages_or_many_short_ones_size_the_first_step(tokens, measured):
    """Of 100 messages; and all of five."""
    lengths_M, rows = np.full(200, tokens), np.arange(100, 200)
    some = _subsample(rows, lengths_M, np.random.default_rng(0))
    assert len(some) == messages_measured(tokens) == measured
    assert set(some) <= set(np.random.default_rng(0).permutation(rows)[:64].tolist())
    assert list(some) == sorted(some)
    assert len(_subsample(rows[:5], lengths_M, np.random.default_rng(0))) == 5


def test_messages_of_different_lengths_are_measured_until_their_tokens_are_enough():
    lengths_M, rows = np.arange(1000), np.arange(100, 1000)
    order = np.random.default_rng(3).permutation(rows)
    taken, tokens = 0, 0
    while tokens + lengths_M[order[taken]] <= 4096:
        tokens += lengths_M[order[taken]]
        taken += 1
    expected = order[: max(8, taken)]
    assert _subsample(rows, lengths_M, np.random.default_rng(3)).tolist() == sorted(expected.tolist())
    short_M = lengths_M // 4
    some = _subsample(rows, short_M, np.random.default_rng(3))
    assert 8 < len(some) < 64
    assert short_M[some].sum() <= 4096


@pytest.mark.long
def test_twenty_updates_with_learning_rate_zero_change_nothing():
    world = World(learning_rate=0.0)
    before = {n: weights(world, n) for n in world.team.names}
    for k in range(20):
        batch = world.collect(world.team, k)
        for name in world.team.names:
            report = world.update(name, world.training_batch(name, batch), seed=k).report
            assert (report.kl_full, report.kl_upper, report.kl_k1, report.kl_k3) == (0.0, 0.0, 0.0, 0.0)
            assert report.version_before == report.version_after
    for name, parameters in before.items():
        for key, value in parameters.items():
            assert torch.equal(value, weights(world, name)[key])
    assert world.states["x"].step_scale == 1.0, "nothing moved, so nothing may be rescaled"


@pytest.mark.long
def test_a_step_far_too_long_is_scaled_then_backed_off():
    world = World(learning_rate=50.0)
    data = world.training_batch("x", world.collect(world.team, 0))
    first = world.update("x", data).report
    assert first.kl_upper <= first.radius
    assert world.states["x"].step_scale < 0.1, "the scale must be remembered"
    later = [world.update("x", world.training_batch("x", _current(world, k)), seed=k).report for k in range(1, 8)]
    assert all(r.kl_upper <= r.radius for r in later)
    assert np.mean([r.backtracks for r in later]) <= 2


def _current(world: World, k: int):
    team = world.team
    for name in team.names:
        team = team.replace(name, world.engine.version(name))
    return world.collect(team, k)


def test_back_off_lands_inside_after_one_or_two_tries():
    """Without the first-step fit (minibatches large, many epochs) the candidate is outside; the square law brings
    it back quickly, and the report says how far out the first candidate was."""
    world = World(learning_rate=0.3)
    data = world.training_batch("x", world.collect(world.team, 0))
    report = world.update("x", data, optimization=Optimization(learning_rate=0.3, epochs=1, minibatches=16)).report
    assert report.kl_rejected is not None
    assert report.kl_rejected > report.radius
    assert 1 <= report.backtracks <= 3
    assert 0 < report.fraction < 1
    assert report.kl_upper <= report.radius


def test_restore_is_bit_for_bit_when_nothing_is_left():
    world = World(learning_rate=0.3)
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    before = learner.snapshot()
    optimization = Optimization(learning_rate=0.3, epochs=1, minibatches=16, max_backtracks=0)
    update = world.update("x", data, optimization=optimization)
    assert update.report.outcome == "restored"
    assert (update.report.kl_full, update.report.kl_upper, update.report.surrogate) == (0.0, 0.0, 0.0)
    assert update.report.kl_rejected > update.report.radius
    assert not update.log_ratio_M.any()
    after = learner.snapshot()
    for key, value in before.parameters.items():
        assert torch.equal(value, after.parameters[key])
    for key, value in before.moments.items():
        assert torch.equal(value, after.moments[key])
    assert update.state.step_scale < world.plan.first_state().step_scale, "the next try must be shorter"


def test_without_a_gate_anything_finite_is_kept():
    world = World(learning_rate=0.5)
    data = world.training_batch("x", world.collect(world.team, 0))
    report = world.update("x", data, region=Region(gate=False, beta=0.0, adapt_beta=False)).report
    assert report.outcome == "accepted"
    assert report.kl_upper > report.radius


def test_a_silent_agent_is_skipped_and_says_so():
    world = World()
    batch = world.collect(world.team, 0)
    empty = replace(world.training_batch("x", batch), messages=batch.of("nobody"))
    report = world.update("x", empty).report
    assert report.outcome == "skipped_silent"
    assert "never spoke" in report.reason
    assert report.version_before == report.version_after


def test_groups_without_variance_are_counted_and_a_batch_of_only_those_is_skipped():
    world = World(reward=lambda k, value: 0.5)
    report = world.update("x", world.training_batch("x", world.collect(world.team, 0))).report
    assert report.outcome == "skipped_no_signal"
    assert (report.groups, report.groups_without_signal) == (3, 3)

    world = World(reward=lambda k, value: 0.5 if k < 16 else value)  # the first group of 16 only
    before = weights(world)
    report = world.update("x", world.training_batch("x", world.collect(world.team, 0))).report
    assert report.accepted
    assert (report.groups, report.groups_without_signal) == (3, 1)
    assert not torch.equal(before["logits"], weights(world)["logits"])


def test_a_non_finite_reward_takes_its_group_out():
    world = World(reward=lambda k, value: float("nan") if k == 3 else value)
    batch = world.collect(world.team, 0)
    report = world.update("x", world.training_batch("x", batch)).report
    assert report.accepted
    assert (report.groups, report.groups_non_finite) == (3, 1)
    assert torch.isfinite(weights(world)["logits"]).all()
    world = World(reward=lambda k, value: float("inf"))
    report = world.update("x", world.training_batch("x", world.collect(world.team, 0))).report
    assert report.outcome == "skipped_non_finite"


def test_a_non_finite_log_probability_never_reaches_the_weights():
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    row = learner.policy.row(data.messages.prompts[0], np.zeros(0, dtype=np.int32))
    with torch.no_grad():
        learner.policy.logits[row, 2] = float("nan")
    learner._touched()
    before = learner.version()
    report = world.update("x", data).report
    assert report.outcome == "skipped_non_finite"
    assert learner.version() == before


def test_an_exploding_step_is_undone(monkeypatch):
    """A step that leaves nan in the weights is not kept: the gate finds nothing finite and restores."""
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    before = learner.snapshot()
    step = type(learner).step

    def explode(self, *args, **kwargs):
        stats = step(self, *args, **kwargs)
        with torch.no_grad():
            self.policy.logits.fill_(float("nan"))
        self._touched()
        return stats

    monkeypatch.setattr(type(learner), "step", explode)
    report = world.update("x", data).report
    assert report.outcome == "restored"
    assert torch.equal(before.parameters["logits"], weights(world)["logits"])


def test_an_interrupt_in_the_middle_leaves_the_old_weights(monkeypatch):
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    fingerprint = learner.fingerprint()
    calls = []
    step = type(learner).step

    def interrupt(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(type(learner), "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.update("x", data)
    assert learner.fingerprint() == fingerprint


def test_an_update_below_the_noise_is_reported_as_unverifiable(monkeypatch):
    """A scoring pass that rounds as coarsely as bf16: what it says of a tenth of the radius is noise."""
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    measure = type(learner).measure

    def coarse(self, rows=None):
        d = measure(self, rows)
        return Divergence(d.full_M + 0.002, d.k1_M, d.k3_M, d.log_ratio_M)

    monkeypatch.setattr(type(learner), "measure", coarse)
    report = world.update("x", data).report
    assert report.noise_floor == pytest.approx(0.002, rel=1e-3)
    assert report.outcome == "accepted_unverifiable"
    assert "noise floor" in report.reason


def test_the_noise_floor_leaves_no_trace():
    world = World()
    batch = world.collect(world.team, 0)
    learner = world.engine.learner("x")
    from teamtr.training.scoring import noise_floor

    before, fingerprint = learner.snapshot(), learner.fingerprint()
    learner.begin(batch.of("x"))
    floor = noise_floor(learner, world.training_batch("x", batch), before, world.plan.radii, seed=0)
    assert 0 <= floor < 1e-10, "float64 has next to no floor"
    assert learner.fingerprint() == fingerprint


def test_beta_and_radius_are_steered():
    world = World(learning_rate=1e-6)
    data = world.training_batch("x", world.collect(world.team, 0))
    world.update("x", data, radii=replace(world.plan.radii, adapt=True))
    state = world.states["x"]
    assert state.beta == 0.05, "far inside: halve the penalty"
    assert state.step_scale == 2.0, "far inside: longer steps"
    assert state.radius_nats == pytest.approx(0.02), "uses little of its radius: widen it"
    assert state.updates == 1


@pytest.mark.long
def test_steps_fill_the_radius_after_a_few_updates():
    """Whatever the learning rate, the scale settles so that updates use most of their radius."""
    for rate in (1e-4, 1e-1):
        world = World(learning_rate=rate)
        reports = [world.update("x", world.training_batch("x", _current(world, k)), seed=k).report for k in range(16)]
        assert np.mean([r.kl_upper / r.radius for r in reports[-6:]]) > 0.4, rate
        assert all(r.kl_upper <= r.radius for r in reports)


# -- the steps ---------------------------------------------------------------------------------------------------


def watch_steps(monkeypatch, learner, look):
    """Calls ``look(k)`` before the k-th optimizer step of this learner."""
    step, count = learner.step, []

    def watched(*args, **named):
        look(len(count))
        count.append(1)
        return step(*args, **named)

    monkeypatch.setattr(learner, "step", watched)
    return count


def test_the_first_step_is_shortened_to_its_share_of_the_radius(monkeypatch):
    """KL grows with the square of the step, so that one look at the first one is enough."""
    world = World(learning_rate=5.0)
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    after_first = []
    watch_steps(monkeypatch, learner, lambda k: after_first.append(learner.measure().full_M.mean()) if k == 1 else None)
    world.update("x", data, optimization=Optimization(learning_rate=5.0, epochs=1, minibatches=4))
    assert 0.2 * 0.01 / 4 < after_first[0] < 3 * 0.01 / 4, "a quarter of the radius for the first of four steps"


def test_a_first_step_into_nowhere_is_taken_back(monkeypatch):
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    before, seen = weights(world), []
    step = learner.step

    def explode_once(*args, **named):
        seen.append(weights(world)["logits"])
        stats = step(*args, **named)
        if len(seen) == 1:
            with torch.no_grad():
                learner.policy.logits.fill_(float("nan"))
            learner._touched()
        return stats

    monkeypatch.setattr(learner, "step", explode_once)
    report = world.update("x", data).report
    assert torch.equal(seen[1], before["logits"])
    assert report.accepted
    assert world.states["x"].step_scale <= 0.1 * 2, "a tenth, times two at most for what it left unused"


@pytest.mark.parametrize(("gate", "outside", "passes"), [(True, True, 1), (True, False, 6), (False, True, 6)])
def test_steps_end_when_they_have_left_the_region(monkeypatch, gate, outside, passes):
    world = World(learning_rate=1e-4)
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    count = watch_steps(monkeypatch, learner, lambda _: None)
    measure = learner.measure

    def far(rows=None):
        found = measure(rows)
        return replace(found, full_M=found.full_M + (1.0 if outside and len(count) > 1 else 0.0))

    monkeypatch.setattr(learner, "measure", far)
    optimization = Optimization(learning_rate=1e-4, epochs=6, minibatches=4)
    report = world.update("x", data, optimization=optimization, region=replace(world.plan.region, gate=gate)).report
    assert report.steps == len(count) == 4 * passes


def test_steps_thrown_away_are_counted(monkeypatch):
    world = World()
    learner = world.engine.learner("x")
    step, calls = learner.step, []

    def sometimes(*args, **named):
        stats = step(*args, **named)
        stats = replace(stats, applied=len(calls) > 2, ratio_clip_rate=0.1 * len(calls))
        calls.append(stats.ratio_clip_rate)
        return stats

    monkeypatch.setattr(learner, "step", sometimes)
    report = world.update("x", world.training_batch("x", world.collect(world.team, 0))).report
    assert report.accepted
    assert report.reason == "3 non-finite steps thrown away"
    assert report.ratio_clip_rate == pytest.approx(0.35), "the mean of 0, 0.1, ... 0.7"


# -- steering ----------------------------------------------------------------------------------------------------


def test_what_explodes_halves_the_step_and_leaves_beta(monkeypatch):
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    measure = learner.measure
    monkeypatch.setattr(
        learner, "measure", lambda rows=None: replace(measure(rows), full_M=measure(rows).full_M * np.nan)
    )
    world.update("x", data)
    assert (world.states["x"].step_scale, world.states["x"].beta) == (0.1 * 0.5, 0.1), (
        "a first step into nowhere, then half"
    )


def test_only_what_is_adaptive_adapts():
    world = World(learning_rate=1e-6)
    data = world.training_batch("x", world.collect(world.team, 0))
    world.update("x", data, region=Region(gate=False, beta=0.1, adapt_beta=False))
    assert (world.states["x"].beta, world.states["x"].step_scale, world.states["x"].radius_nats) == (0.1, 1.0, 0.01)
    world.update("x", data, region=Region(gate=False, beta=0.1, adapt_beta=True))
    assert (world.states["x"].beta, world.states["x"].step_scale) == (0.05, 1.0), (
        "without a gate the learning rate is the step"
    )
    world.update("x", data)
    assert (world.states["x"].radius_nats, world.states["x"].updates) == (0.01, 3)


def test_a_restored_update_leaves_an_adaptive_radius():
    world = World(learning_rate=0.3)
    data = world.training_batch("x", world.collect(world.team, 0))
    optimization = Optimization(learning_rate=0.3, epochs=1, minibatches=16, max_backtracks=0)
    update = world.update("x", data, optimization=optimization, radii=replace(world.plan.radii, adapt=True))
    assert update.report.outcome == "restored"
    assert world.states["x"].radius_nats == 0.01


def test_with_a_gate_the_step_is_steered_by_the_bound():
    """It aims for four fifths of the radius by its upper bound, which is what must be inside."""
    world = World(learning_rate=0.02)
    data = world.training_batch("x", world.collect(world.team, 0))
    report = world.update("x", data).report
    assert (report.backtracks, report.kl_rejected) == (0, None)
    assert report.kl_upper > 1.05 * report.kl_full
    scale = world.states["x"].step_scale
    assert scale == pytest.approx(min(2.0, np.sqrt(0.8 * 0.01 / report.kl_upper)), rel=1e-9)


# -- the report --------------------------------------------------------------------------------------------------


def test_a_report_by_hand():
    """Clip rates, zeta, distances and the mismatch from the two policies' own log-probabilities."""
    world = World(radius=0.3, learning_rate=0.5)
    batch = world.collect(world.team, 0)
    data = world.training_batch("x", batch)
    learner = world.engine.learner("x")
    sampled = tuple(logprobs + np.float32(0.25) for logprobs in data.messages.sampler_logprobs)
    data = replace(data, messages=replace(data.messages, sampler_logprobs=sampled))
    update = world.update("x", data, advantage=GroupAdvantage(normalize=False))
    report, ratio_M = update.report, np.exp(update.log_ratio_M)
    clipped_M = np.clip(ratio_M, 0.8, 1.2)
    assert np.abs(ratio_M - clipped_M).max() > 0.05
    assert report.zeta_ratio == pytest.approx((np.abs(data.advantages_M) * np.abs(ratio_M - clipped_M)).mean())
    assert report.zeta_norm == zeta_norm(data.returns_PG, a_clip=3.0, eps_norm=1e-6, normalize=False)
    assert report.zeta_norm != zeta_norm(data.returns_PG, a_clip=3.0, eps_norm=1e-6)
    assert report.mismatch_sampler == pytest.approx(0.25, abs=1e-5)
    assert report.mismatch_median == pytest.approx(0.25, abs=1e-5)
    assert report.mismatch_largest == pytest.approx(0.25, abs=1e-5)
    lengths = data.messages.lengths_M
    assert report.mismatch_per_message == pytest.approx(0.25 * np.median(lengths), abs=1e-4)
    assert report.kl_discounted == pytest.approx(report.kl_full), "one message in every episode, no discount"
    assert report.kl_per_token < report.kl_full
    assert report.kl_k1 == pytest.approx(-update.log_ratio_M.mean())
    assert 0.0 < sum(report.seconds.values()) < 60.0
    assert learner.tokens == report.tokens


def test_a_restored_report_says_that_nothing_was_kept(monkeypatch):
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    measure = learner.measure
    monkeypatch.setattr(learner, "measure", lambda rows=None: replace(measure(rows), full_M=measure(rows).full_M + 1.0))
    report = world.update("x", data, optimization=replace(world.optimization, max_backtracks=1)).report
    assert report.outcome == "restored"
    assert (report.fraction, report.backtracks, report.kl_discounted, report.kl_per_token) == (0.0, 1, 0.0, 0.0)
    assert report.reason.startswith("upper KL bound")
    assert report.kl_rejected > 1.0
    assert report.noise_floor == pytest.approx(1.0)


def test_a_discounted_kl_of_some_episodes_stands_for_all():
    world = World(plan=replace(PRESETS["teamtr"], gamma=0.5))
    data = world.training_batch("y", world.collect(world.team, 0, group=64))
    report = world.update("y", data, optimization=replace(world.optimization, gate_share=0.4)).report
    assert report.messages_measured == 3 * 26
    assert report.kl_discounted == pytest.approx(0.5 * 0.5 * report.kl_full), "(1 - gamma) gamma^1 of every message"


def test_why_an_agent_was_skipped(monkeypatch):
    world = World()
    batch = world.collect(world.team, 0)
    data = world.training_batch("x", batch)
    wild = replace(data, weights_E=np.where(np.arange(48) == 5, np.inf, 1.0))
    report = world.update("x", wild).report
    assert (report.outcome, report.reason) == ("skipped_non_finite", "an episode weight is not finite")
    flat = World(reward=lambda k, value: 0.5)
    equal = flat.training_batch("x", flat.collect(flat.team, 0))
    told = "every group it spoke in had equal rewards"
    assert flat.update("x", equal).report.reason == told
    aside = replace(equal, holdout_P=np.arange(3) < 1)
    assert flat.update("x", aside).report.reason == f"{told}, or was set aside"
    cut = replace(equal, filter_cut=True, messages=replace(equal.messages, cut_M=np.arange(48) < 1))
    assert flat.update("x", cut).report.reason == f"{told}, or only messages of it that were cut"
    whole = replace(equal, filter_cut=True, messages=replace(equal.messages, cut_M=np.zeros(48, dtype=bool)))
    assert flat.update("x", whole).report.reason == told
    learner = world.engine.learner("x")
    monkeypatch.setattr(learner, "begin", lambda batch, **_: np.where(np.arange(48) < 2, np.nan, -1.0))
    assert world.update("x", data).report.reason == "2 messages have a non-finite log-probability"


def test_the_noise_floor_is_that_of_changed_weights(monkeypatch):
    """Scoring the same weights again shows nothing: they are moved a little first."""
    world = World()
    data = world.training_batch("x", world.collect(world.team, 0))
    learner = world.engine.learner("x")
    perturb, asked = learner.perturb, []

    def more(relative, seed):
        asked.append(relative)
        perturb(1e5 * relative, seed)

    monkeypatch.setattr(learner, "perturb", more)
    assert world.update("x", data).report.noise_floor > 1e-6
    assert asked == [1e-6]
