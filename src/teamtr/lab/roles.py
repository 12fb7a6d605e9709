"""The game "exactly one volunteers", in which stale episodes ruin a team, computed exactly.

n agents that do not see each other's messages each say 1 with probability p_j = sigmoid(logit_j); the team succeeds if
exactly one does. J is linear in each p_j, so with g_j = P(none of the others) - P(exactly one of the others)

    gain of moving p_j by d  =  d g_j   exactly, and the fresh surrogate is the gain.

Every update fills its radius exactly, KL(old || new) = radius, in the direction of its gradient: that of the
intermediate team ("fresh"), or of the stage-start team ("stale"). Initial logits have standard deviation ``spread``;
0.2 is fitted to a known table of stale success (docs/log.md, "What was fitted in the lab").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from teamtr.randomness import generator
from teamtr.theory.power_law import PowerLaw, fit_power_law
from teamtr.types import Floats

LAST = 10
"""Success is averaged over this many final stages."""

LOGIT_BOUND = 30.0
"""Limit of logits, at which 1 - p is 1e-13. An update that reaches it does not fill its radius; ``filled`` is the share
of updates that filled theirs."""

LOWERED = 1e-12
"""An update counts as lowering J if its exact gain is below minus this."""

FRESH, STALE = 0, 1


@dataclass(frozen=True)
class RolesReport:
    """Success and drift by number of agents, under fresh and under stale training: means over seeds.

    ``*_gap`` is the stale gap and ``*_drift`` the occupancy drift of tab:scaling, each summed over the updates of a
    stage and averaged over all stages; ``*_lowered`` is the share of updates that lowered J. ``spread_*`` are standard
    deviations over seeds. ``exponents`` are fitted to n, None where a mean is zero.
    """

    n: tuple[int, ...]
    fresh: tuple[float, ...]
    stale: tuple[float, ...]
    spread_fresh: tuple[float, ...]
    spread_stale: tuple[float, ...]
    fresh_lowered: tuple[float, ...]
    stale_lowered: tuple[float, ...]
    fresh_gap: tuple[float, ...]
    stale_gap: tuple[float, ...]
    fresh_drift: tuple[float, ...]
    stale_drift: tuple[float, ...]
    fresh_filled: tuple[float, ...]
    stale_filled: tuple[float, ...]
    exponents: dict[str, PowerLaw | None]
    by_seed: dict[str, tuple[tuple[float, ...], ...]]
    """"fresh" and "stale": each team's success, a row for each n. The distribution is bimodal: most stale teams of many
    agents stay near 0.4 and a few divide the roles, so a standard deviation over eight teams may miss the second
    mode."""
    curves: dict[str, tuple[tuple[float, ...], ...]]
    """"fresh" and "stale": mean success after each stage, a row for each n."""
    seeds: int
    stages: int
    radius: float
    spread: float
    seed: int

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def roles(
    ns: Iterable[int] = range(2, 13),
    seeds: int = 8,
    stages: int = 40,
    radius: float = 0.01,
    seed: int = 0,
    *,
    spread: float = 0.2,
) -> RolesReport:
    """Train ``seeds`` teams of every size, fresh and stale from the same start, and measure everything exactly."""
    sizes = tuple(ns)
    if not sizes or min(sizes) < 2 or seeds < 2 or stages < 1 or radius <= 0:
        raise ValueError("roles: sizes of at least two agents, two seeds, one stage and a positive radius are needed")
    runs = [_train(generator(seed, "roles", n), n, seeds, stages, radius, spread) for n in sizes]
    last = min(LAST, stages)

    def over_seeds(name: str, rule: int) -> tuple[float, ...]:
        return tuple(float(getattr(run, name)[rule].mean()) for run in runs)

    def success(rule: int) -> Floats:
        return np.array([run.success[rule, -last:].mean(axis=0) for run in runs])

    rng = generator(seed, "roles", "bootstrap")
    fits = {
        f"{label}_{name}": fit_power_law(sizes, np.array([getattr(run, name)[rule].mean(axis=0) for run in runs]), rng)
        for rule, label in ((FRESH, "fresh"), (STALE, "stale"))
        for name in ("gap", "drift")
        if len(sizes) > 1
    }
    return RolesReport(
        n=sizes,
        fresh=tuple(success(FRESH).mean(axis=1).tolist()),
        stale=tuple(success(STALE).mean(axis=1).tolist()),
        spread_fresh=tuple(success(FRESH).std(axis=1, ddof=1).tolist()),
        spread_stale=tuple(success(STALE).std(axis=1, ddof=1).tolist()),
        fresh_lowered=over_seeds("lowered", FRESH),
        stale_lowered=over_seeds("lowered", STALE),
        fresh_gap=over_seeds("gap", FRESH),
        stale_gap=over_seeds("gap", STALE),
        fresh_drift=over_seeds("drift", FRESH),
        stale_drift=over_seeds("drift", STALE),
        fresh_filled=over_seeds("filled", FRESH),
        stale_filled=over_seeds("filled", STALE),
        exponents=fits,
        by_seed={
            label: tuple(tuple(row) for row in success(rule).tolist())
            for rule, label in ((FRESH, "fresh"), (STALE, "stale"))
        },
        curves={
            label: tuple(tuple(run.success[rule].mean(axis=1).tolist()) for run in runs)
            for rule, label in ((FRESH, "fresh"), (STALE, "stale"))
        },
        seeds=seeds,
        stages=stages,
        radius=radius,
        spread=spread,
        seed=seed,
    )


# -- the game ------------------------------------------------------------------------------------------------------


def sigmoid(logit: Floats) -> Floats:
    return np.asarray(np.exp(-np.logaddexp(0.0, -logit)))


def others(p_A: Floats, agent: int) -> tuple[Floats, Floats]:
    """P(none) and P(exactly one) of the other agents volunteer; agents along the last axis."""
    none, one = np.ones(p_A.shape[:-1]), np.zeros(p_A.shape[:-1])
    for k in range(p_A.shape[-1]):
        if k != agent:
            none, one = none * (1.0 - p_A[..., k]), one * (1.0 - p_A[..., k]) + none * p_A[..., k]
    return none, one


def success_probability(p_A: Floats) -> Floats:
    """J = P(exactly one volunteers)."""
    none, one = others(p_A, 0)
    return np.asarray(p_A[..., 0] * none + (1.0 - p_A[..., 0]) * one)


def bernoulli_kl(logit_cur: Floats, logit_new: Floats) -> Floats:
    """KL(cur || new) of two coins given by their logits."""
    p = sigmoid(logit_cur)
    heads = np.logaddexp(0.0, -logit_new) - np.logaddexp(0.0, -logit_cur)
    tails = np.logaddexp(0.0, logit_new) - np.logaddexp(0.0, logit_cur)
    return np.asarray(p * heads + sigmoid(-logit_cur) * tails)


def fill_radius(logit: Floats, direction: Floats, radius: float) -> Floats:
    """The logit in ``direction`` (+1, -1, or 0: stay) at exactly ``radius`` nats, by bisection; at most
    ``LOGIT_BOUND``."""
    furthest = np.maximum(np.where(direction > 0, LOGIT_BOUND - logit, LOGIT_BOUND + logit), 0.0) * np.abs(direction)
    p = sigmoid(logit)
    limit = radius + np.logaddexp(0.0, logit)
    # KL(cur || new) = log(1 + e^new) - log(1 + e^cur) - p (new - cur), convex in the step
    reachable = np.logaddexp(0.0, logit + direction * furthest) - p * direction * furthest > limit
    low, high = np.zeros_like(logit), furthest
    slope = p * direction
    for _ in range(56):  # halves an interval of at most 60 down to rounding
        middle = 0.5 * (low + high)
        inside = np.logaddexp(0.0, logit + direction * middle) - slope * middle <= limit
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return np.asarray(logit + direction * np.where(reachable, low, furthest))


def drift_of_coins(p_new_A: Floats, p_old_A: Floats) -> Floats:
    """TV between the distributions of what agents 0..k-1 said, for k = 0..n-1: the state at turn k. Shape (n, ...)."""
    new, old = np.ones((*p_new_A.shape[:-1], 1)), np.ones((*p_old_A.shape[:-1], 1))
    distances = []
    for k in range(p_new_A.shape[-1]):
        distances.append(0.5 * np.abs(new - old).sum(axis=-1))
        new, old = (
            np.concatenate([law * (1.0 - p[..., k : k + 1]), law * p[..., k : k + 1]], axis=-1)
            for law, p in ((new, p_new_A), (old, p_old_A))
        )
    return np.array(distances)


# -- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """One team size. All arrays are (2, stages, seeds), the first axis being fresh and stale: success after each stage,
    and shares of the stage's updates or sums over them."""

    success: Floats
    lowered: Floats
    gap: Floats
    drift: Floats
    filled: Floats


def _train(rng: np.random.Generator, n: int, seeds: int, stages: int, radius: float, spread: float) -> _Run:
    start = spread * rng.standard_normal((seeds, n))
    logits = np.stack([start, start])  # fresh, stale
    record: dict[str, list[Floats]] = {name: [] for name in ("success", "lowered", "gap", "drift", "filled")}
    for _ in range(stages):
        p_start = sigmoid(logits)
        lowered, gap, filled = np.zeros((3, 2, seeds))
        for agent in range(n):
            p = sigmoid(logits)
            now, then = (none - one for none, one in (others(p, agent), others(p_start, agent)))
            gradient = np.stack([now[FRESH], then[STALE]])
            moved = fill_radius(logits[..., agent], np.sign(gradient), radius)
            used = bernoulli_kl(logits[..., agent], moved)
            change = sigmoid(moved) - p[..., agent]
            lowered += (change * now < -LOWERED) / n
            gap += np.abs(change * (now - then))  # |L_i^seq - L_i^stale|
            filled += np.isclose(used, radius, rtol=1e-9) / n
            logits = logits.copy()
            logits[..., agent] = moved
        p_end = sigmoid(logits)
        # Before update i, the agents below i have been updated. The state at turn t is what the agents below t said.
        distances = drift_of_coins(p_end, p_start)
        moved_before = np.minimum.outer(np.arange(n), np.arange(n))
        record["drift"].append(distances[moved_before].mean(axis=1).sum(axis=0))
        for name, value in (("success", success_probability(p_end)), ("lowered", lowered), ("gap", gap)):
            record[name].append(value)
        record["filled"].append(filled)
    return _Run(**{name: np.stack(values, axis=1) for name, values in record.items()})


def table(report: RolesReport, sizes: Sequence[int] = (2, 3, 4, 5, 6, 8, 12)) -> list[dict[str, float]]:
    """Fresh against stale by number of agents, for those sizes that were run."""
    columns = ("fresh", "stale", "fresh_lowered", "stale_lowered")
    return [
        {"n": n, **{column: getattr(report, column)[k] for column in columns}}
        for k, n in enumerate(report.n)
        if n in sizes
    ]
