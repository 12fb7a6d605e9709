"""How an alignment is steered: decided from looks alone, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teamtr.swap.steering import Alignment, ProbeCheck, Progress, decide, ended, next_look, path, rate_at, seen, within

SETTINGS = Alignment(
    rates=(1.0, 3.0), radius=0.1, check_every=10, trial_looks=2, patience=2, halvings=1, doublings=1, max_steps=200
)


def start(upper: float = 4.0) -> Progress:
    fresh = Progress(SETTINGS.rates[0])
    return seen(fresh, ProbeCheck(0, 0, upper, upper, upper, 1.0), SETTINGS)


def after(progress: Progress, *uppers: float, train: float | None = None) -> tuple[Progress, list[str | None]]:
    """These looks one after the other, every ten steps, each after a decision."""
    roles: list[str | None] = []
    for upper in uppers:
        progress, role = decide(progress, SETTINGS)
        roles.append(role)
        low = upper if train is None else train
        look = ProbeCheck(
            progress.trial, progress.step + 10, upper, upper, low, progress.learning_rate, doubled=progress.doubled
        )
        progress = seen(progress, look, SETTINGS)
    return progress, roles


def test_every_rate_starts_from_the_same_weights_and_the_lowest_goes_on():
    progress, roles = after(start(), 3.0, 2.0, 2.5, 1.0, 0.5)
    assert roles == [None, None, "start", None, "leader"]
    assert [(look.trial, look.step, look.learning_rate) for look in progress.looks] == [
        (0, 0, 1.0),
        (0, 10, 1.0),
        (0, 20, 1.0),
        (1, 10, 3.0),
        (1, 20, 3.0),
        (1, 30, 3.0),
    ]
    assert progress.spent == 50
    assert [look.step for look in path(progress)] == [0, 10, 20, 30]


def test_the_first_rate_can_win():
    progress, roles = after(start(), 3.0, 0.9, 3.5, 2.0, 0.8)
    assert roles[-1] == "leader"
    assert (progress.last.trial, progress.last.step, progress.last.learning_rate) == (0, 30, 1.0)


def test_probes_held_out_that_are_low_by_luck_are_not_enough():
    lucky, _ = after(start(), 0.05, train=0.2)
    assert not ended(lucky, SETTINGS)
    assert lucky.best == 1
    worse, _ = after(lucky, 0.04, train=0.3)
    assert worse.best == 1, "both count"


def test_within_the_radius_nothing_more_is_tried():
    progress, _ = after(start(), 0.05)
    assert ended(progress, SETTINGS)
    assert not ended(start(), SETTINGS)
    assert not ended(progress, replace(SETTINGS, radius=None)), "without a KL there is no radius to be within"


def descent() -> Progress:
    progress, _ = after(start(), 3.0, 2.0, 2.5, 1.0, 0.5)
    return progress


def test_learnt_by_heart_means_more_probes_first():
    """Held-out probes stand still and those trained on are far below: more of them; when there are no more, smaller
    steps; then the end."""
    progress, _ = after(descent(), 0.6, 0.6, 0.6, train=0.01)
    assert (progress.doubled, progress.halved, progress.last.learning_rate) == (1, 0, 3.0)
    assert progress.last.doubled == 1
    progress, _ = after(progress, 0.6, 0.6, train=0.01)
    assert (progress.doubled, progress.halved, progress.last.learning_rate) == (1, 1, 1.5)
    assert not ended(progress, SETTINGS)
    progress, _ = after(progress, 0.6, train=0.01)
    assert ended(progress, SETTINGS)
    assert progress.looks[progress.best].upper == 0.5


def test_stuck_on_both_means_smaller_steps():
    progress, _ = after(descent(), 0.6, 0.6, 0.6)
    assert (progress.doubled, progress.halved) == (0, 1)


def test_a_rate_is_halved_as_often_as_said():
    progress, settings = descent(), replace(SETTINGS, halvings=3, max_steps=10**6)
    while not ended(progress, settings):
        progress, _ = decide(progress, settings)
        stuck = ProbeCheck(progress.trial, next_look(progress, settings), 0.6, 0.6, 0.6, progress.learning_rate)
        progress = seen(progress, stuck, settings)
    rates = [look.learning_rate for look in progress.looks[5:]]
    assert rates == [3.0] * 3 + [1.5] * 2 + [0.75] * 2 + [0.375] * 2, "each of them has its patience"


NAN = float("nan")


@pytest.mark.parametrize(("kl", "upper", "train_kl"), [(NAN, 0.05, 0.04), (0.04, NAN, 0.05), (0.04, 0.05, NAN)])
def test_what_is_no_number_is_not_within_the_radius(kl, upper, train_kl):
    assert within(ProbeCheck(0, 10, 0.04, 0.05, 0.04, 1.0), SETTINGS)
    assert not within(ProbeCheck(0, 10, kl, upper, train_kl, 1.0), SETTINGS)


def test_looks_are_compared_by_the_mean_unless_one_is_within():
    progress = start()
    for kl, upper in ((2.0, 2.5), (0.05, 4.0), (0.06, 3.0), (0.07, 0.09), (0.01, 5.0)):
        progress = seen(progress, ProbeCheck(0, progress.step + 5, kl, upper, 0.01, 1.0), SETTINGS)
    best = [seen(start(), look, SETTINGS).best for look in progress.looks[2:4]]
    assert best == [1, 1], "both are better than the start"
    assert progress.looks[progress.best].kl == 0.07, "the one that is within, though others have a lower mean"
    outside = replace(SETTINGS, radius=None)
    assert seen(progress, ProbeCheck(0, 50, 0.005, 9.0, 0.001, 1.0), outside).best == 6, (
        "without a radius none is within"
    )


def test_what_is_no_number_does_not_lead():
    """The first rate diverges: the second leads and is the best, however high."""
    progress, roles = after(start(NAN), NAN, NAN, 3.5, 3.4, 3.3)
    assert roles[-1] == "leader"
    assert (progress.leader, progress.last.trial, progress.last.learning_rate) == (4, 1, 3.0)
    assert progress.best == 5


def test_a_new_best_gives_time():
    progress, _ = after(descent(), 0.6, 0.4, 0.6, train=0.01)
    assert (progress.doubled, progress.halved, progress.idle) == (0, 0, 1)


def test_steps_are_counted_over_all_trials():
    progress, _ = after(start(), *[2.0 - 0.05 * k for k in range(20)])
    assert progress.spent == 200
    assert ended(progress, SETTINGS)
    assert progress.last.step == 180


def test_a_rate_is_warmed_up():
    fresh = Progress(2.0)
    assert [rate_at(fresh, step, SETTINGS) for step in (0, 4, 9, 50)] == pytest.approx([0.2, 1.0, 2.0, 2.0])


def test_progress_survives_a_record():
    from dataclasses import asdict

    assert Progress.of(asdict(descent())) == descent()
