"""Steering of an alignment: learning rate, number of probes, and when to end. Pure functions from checks to decisions.

    trials    each rate is tried from the same start for a few steps, until one of them is within the radius
    descent   the rate with the lowest result continues; when held-out probes no longer improve,
                if overfitted (the KL on training probes is far below that on held-out ones): more probes
                otherwise: half the rate

Every decision is a function of the checks alone, so that a resumed alignment makes the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

TRIED = (1.0, 3.0, 10.0, 1 / 3)
"""Rates to try, as multiples of the team's own: distillation tolerates larger steps than a policy gradient."""

OVERFITTED = 0.5
"""The student is overfitted if its KL on training probes is below this share of that on held-out ones."""

Role = Literal["start", "leader"]


@dataclass(frozen=True)
class Alignment:
    """Settings of an alignment. ``radius`` is in nats per message, or per token with ``per_token``; None if there is no
    KL.

    Each of ``rates`` is tried for ``trial_looks`` checks, one every ``check_every`` steps, with a linear warm-up. After
    ``patience`` checks without a new best the probes are doubled, at most ``doublings`` times, or the rate is halved,
    at most ``halvings`` times.
    """

    rates: tuple[float, ...]
    radius: float | None
    per_token: bool = False
    confidence: float = 0.95
    batch: int = 64
    check_every: int = 25
    max_steps: int = 2000
    warmup: int = 10
    trial_looks: int = 2
    patience: int = 4
    halvings: int = 3
    doublings: int = 5
    seed: int = 0


@dataclass(frozen=True)
class ProbeCheck:
    """One check on the probes: mean KL (or cross-entropy) from old to new on held-out ones with its upper bound, and on
    as many training ones. ``step`` counts the steps that led to these weights, ``trial`` is the index of the rate."""

    trial: int
    step: int
    kl: float
    upper: float
    train_kl: float
    learning_rate: float
    doubled: int = 0

    @property
    def worst(self) -> float:
        """The value that must be within the radius: the larger of the held-out upper bound and the training mean,
        because a few held-out probes can be low by chance. nan counts as inf, since comparisons with nan are False."""
        return self._largest(self.upper, self.train_kl)

    @property
    def mean(self) -> float:
        """The value by which checks are compared: the larger mean. Not the bound, which depends on the few messages
        with the largest KL and is mostly noise."""
        return self._largest(self.kl, self.train_kl)

    def _largest(self, *values: float) -> float:
        broken = any(math.isnan(value) for value in (self.kl, self.upper, self.train_kl))
        return math.inf if broken else max(values)


@dataclass(frozen=True)
class Progress:
    """The state of an alignment, part of every commit.

    ``best`` is the index of the lowest check in ``looks``, ``leader`` that of the lowest check at the end of a trial.
    ``trial`` is the index of the rate being tried or, after the trials, of the best one. ``idle`` counts checks without
    a new best since the last decision, ``spent`` all steps taken.
    """

    learning_rate: float
    looks: tuple[ProbeCheck, ...] = ()
    best: int = 0
    leader: int | None = None
    trial: int = 0
    trying: bool = True
    step: int = 0
    spent: int = 0
    idle: int = 0
    halved: int = 0
    doubled: int = 0

    @property
    def last(self) -> ProbeCheck:
        return self.looks[-1]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Progress:
        return cls(**{**record, "looks": tuple(ProbeCheck(**look) for look in record["looks"])})


def within(found: ProbeCheck, settings: Alignment) -> bool:
    """Whether the upper bound on held-out probes and the mean on training probes are within the radius."""
    return settings.radius is not None and found.worst <= settings.radius


def ended(progress: Progress, settings: Alignment) -> bool:
    """Whether the last check is within the radius, no steps are left, or there is nothing left to try."""
    tried = _stuck(progress, settings) and not _doubles(progress, settings) and progress.halved >= settings.halvings
    return within(progress.last, settings) or progress.spent >= settings.max_steps or tried


def next_look(progress: Progress, settings: Alignment) -> int:
    """The step of the next check, at most the last step."""
    return progress.step + min(settings.check_every, settings.max_steps - progress.spent)


def rate_at(progress: Progress, step: int, settings: Alignment) -> float:
    return progress.learning_rate * min(1.0, (step + 1) / settings.warmup)


def seen(progress: Progress, look: ProbeCheck, settings: Alignment) -> Progress:
    """Adds a check, updating the best one and, at the end of a trial, the leader."""
    looks = (*progress.looks, look)
    better = not progress.looks or _height(look, settings) < _height(progress.looks[progress.best], settings)
    leader = progress.leader
    if _trial_ends(look, settings) and (leader is None or _height(look, settings) < _height(looks[leader], settings)):
        leader = len(looks) - 1
    return replace(
        progress,
        looks=looks,
        best=len(looks) - 1 if better else progress.best,
        leader=leader,
        step=look.step,
        spent=progress.spent + look.step - progress.step,
        idle=0 if better else progress.idle + 1,
    )


def decide(progress: Progress, settings: Alignment) -> tuple[Progress, Role | None]:
    """The next state after the last check, and the weights to continue from; None: the current weights."""
    if progress.trying:
        return _next_trial(progress, settings) if _trial_ends(progress.last, settings) else (progress, None)
    if not _stuck(progress, settings):
        return progress, None
    if _doubles(progress, settings):
        return replace(progress, doubled=progress.doubled + 1, idle=0), None
    return replace(progress, learning_rate=progress.learning_rate / 2, halved=progress.halved + 1, idle=0), None


def path(progress: Progress) -> list[ProbeCheck]:
    """The checks that led to the best weights: the start, their trial, and the descent from it."""
    trial = progress.looks[progress.best].trial
    return [look for look in progress.looks[: progress.best + 1] if look.trial == trial or look.step == 0]


def _height(look: ProbeCheck, settings: Alignment) -> tuple[bool, float]:
    """Sort key of checks: those within the radius first, then by the mean."""
    return not within(look, settings), look.mean


def _stuck(progress: Progress, settings: Alignment) -> bool:
    return not progress.trying and progress.idle >= settings.patience


def _doubles(progress: Progress, settings: Alignment) -> bool:
    """Whether the probes are overfitted and may be doubled again."""
    return progress.last.train_kl < OVERFITTED * progress.last.kl and progress.doubled < settings.doublings


def _trial_ends(look: ProbeCheck, settings: Alignment) -> bool:
    return look.step == settings.trial_looks * settings.check_every


def _next_trial(progress: Progress, settings: Alignment) -> tuple[Progress, Role]:
    """The next rate, from the start; after the last rate, the descent from the leader."""
    following = progress.trial + 1
    if following < len(settings.rates):
        rate = settings.rates[following]
        return replace(progress, trial=following, step=0, idle=0, learning_rate=rate), "start"
    assert progress.leader is not None, "a trial has ended"
    led = progress.looks[progress.leader]
    descent = replace(progress, trial=led.trial, trying=False, step=led.step, idle=0, learning_rate=led.learning_rate)
    return descent, "leader"
