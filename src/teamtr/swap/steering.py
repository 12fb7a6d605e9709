"""How an alignment is steered: which rate, when more probes are needed, when it ends. Pure: looks in, decisions out.

    trials    the first rates are tried from the same start, a few steps each, until one of them is within the radius
    descent   the one that ended lowest goes on; when held-out probes gain nothing more,
                over-fitted (the probes trained on are far below those held out): more probes
                otherwise: half the rate

Every decision is a function of the looks alone, so that an alignment that was killed decides the same again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

TRIED = (1.0, 3.0, 10.0, 1 / 3)
"""Rates that are tried, as multiples of the team's own: distilling bears larger steps than a policy gradient."""

OVERFITTED = 0.5
"""The KL on probes trained on, as a share of that on held-out ones, below which more steps cannot help."""

Role = Literal["start", "leader"]


@dataclass(frozen=True)
class Alignment:
    """How to align. ``radius`` is in nats per message, or per token with ``per_token``; None where no KL exists.

    Each of ``rates`` is tried for ``trial_looks`` looks, a look every ``check_every`` steps, after a linear warm-up.
    After ``patience`` looks without a new best the probes are doubled, at most ``doublings`` times, or the rate is
    halved, at most ``halvings`` times.
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
    """One look at the probes: mean KL (or cross-entropy) from old to new on held-out ones with its upper bound, and on
    as many of those trained on. ``step`` counts the steps behind these weights, ``trial`` is the rate's place."""

    trial: int
    step: int
    kl: float
    upper: float
    train_kl: float
    learning_rate: float
    doubled: int = 0

    @property
    def worst(self) -> float:
        """What must be within the radius: a few held-out probes alone can be low by luck. What is no number is worst:
        compared as it is, nan would be neither above the radius nor above another look."""
        return self._largest(self.upper, self.train_kl)

    @property
    def mean(self) -> float:
        """What looks are compared by: a bound follows the few messages that are hardest to say, and is mostly noise."""
        return self._largest(self.kl, self.train_kl)

    def _largest(self, *values: float) -> float:
        broken = any(math.isnan(value) for value in (self.kl, self.upper, self.train_kl))
        return math.inf if broken else max(values)


@dataclass(frozen=True)
class Progress:
    """Where an alignment stands; part of every commit.

    ``best`` is the place of the lowest look in ``looks``, ``leader`` of the lowest of those that ended a trial.
    ``trial`` is the rate being tried or, after the trials, the one that led. ``idle`` counts looks without a new best
    since the last decision, ``spent`` all steps taken.
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
    """Held-out probes by their upper bound, and those trained on by their mean."""
    return settings.radius is not None and found.worst <= settings.radius


def ended(progress: Progress, settings: Alignment) -> bool:
    """Within the radius, or no steps left, or nothing left to try."""
    tried = _stuck(progress, settings) and not _doubles(progress, settings) and progress.halved >= settings.halvings
    return within(progress.last, settings) or progress.spent >= settings.max_steps or tried


def next_look(progress: Progress, settings: Alignment) -> int:
    """The step after which to look again; sooner than usual when no more steps are left."""
    return progress.step + min(settings.check_every, settings.max_steps - progress.spent)


def rate_at(progress: Progress, step: int, settings: Alignment) -> float:
    return progress.learning_rate * min(1.0, (step + 1) / settings.warmup)


def seen(progress: Progress, look: ProbeCheck, settings: Alignment) -> Progress:
    """Add a look; it may be the best, and at a trial's end the one to go on from."""
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
    """What comes after the last look, and the weights to go on with; None: those at hand."""
    if progress.trying:
        return _next_trial(progress, settings) if _trial_ends(progress.last, settings) else (progress, None)
    if not _stuck(progress, settings):
        return progress, None
    if _doubles(progress, settings):
        return replace(progress, doubled=progress.doubled + 1, idle=0), None
    return replace(progress, learning_rate=progress.learning_rate / 2, halved=progress.halved + 1, idle=0), None


def path(progress: Progress) -> list[ProbeCheck]:
    """The looks that lead to the best weights: the start, their own trial, and the descent from it down to them."""
    trial = progress.looks[progress.best].trial
    return [look for look in progress.looks[: progress.best + 1] if look.trial == trial or look.step == 0]


def _height(look: ProbeCheck, settings: Alignment) -> tuple[bool, float]:
    """Within the radius first, then by the mean."""
    return not within(look, settings), look.mean


def _stuck(progress: Progress, settings: Alignment) -> bool:
    return not progress.trying and progress.idle >= settings.patience


def _doubles(progress: Progress, settings: Alignment) -> bool:
    """The probes have been learnt by heart, and more may be played."""
    return progress.last.train_kl < OVERFITTED * progress.last.kl and progress.doubled < settings.doublings


def _trial_ends(look: ProbeCheck, settings: Alignment) -> bool:
    return look.step == settings.trial_looks * settings.check_every


def _next_trial(progress: Progress, settings: Alignment) -> tuple[Progress, Role]:
    """The next rate from the start; after the last one, on from the lowest."""
    following = progress.trial + 1
    if following < len(settings.rates):
        rate = settings.rates[following]
        return replace(progress, trial=following, step=0, idle=0, learning_rate=rate), "start"
    assert progress.leader is not None, "a trial has ended"
    led = progress.looks[progress.leader]
    descent = replace(progress, trial=led.trial, trying=False, step=led.step, idle=0, learning_rate=led.learning_rate)
    return descent, "leader"
