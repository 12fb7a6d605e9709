"""Runs every check over random teams: how often each statement was tested and violated, and how tight it is.

Most batches are random teams with random updates. Two in ten are constructed so that a bound is nearly attained;
without them a wrong constant would pass (``tests/statistical/test_verify.py`` shows that none does).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from teamtr.lab import geometry_checks, point_checks, team_checks
from teamtr.lab.checks import Check, Draw, Outcome
from teamtr.randomness import generator
from teamtr.theory.tabular import (
    DiscountedStage,
    DiscountedTeam,
    EpisodicStage,
    EpisodicTeam,
    MessageSpace,
    random_discounted_stage,
    random_episodic_stage,
    update_discounted,
)
from teamtr.types import Floats

Progress = Callable[[int, int], None]

BATCH = 25
SPACES = (
    MessageSpace(2, 1),
    MessageSpace(3, 1),
    MessageSpace(2, 2),
    MessageSpace(2, 2, ends=True),
    MessageSpace(2, 3, ends=True),
    MessageSpace(3, 2, ends=True),
)


@dataclass(frozen=True)
class CheckReport:
    """One statement over all cases. Ratios are bound / true where the true value is positive; nan if it never is."""

    tested: int
    violations: int
    median_ratio: float
    p99_ratio: float
    min_ratio: float
    first_violation: int | None = None
    """Index of the first batch with a violation: ``draw(seed, batch, size)`` builds it again."""


@dataclass(frozen=True)
class VerifyReport:
    """Results of ``verify``."""

    teams: int
    seed: int
    batch_size: int
    seconds: float
    checks: dict[str, CheckReport]

    @property
    def violations(self) -> int:
        return sum(check.violations for check in self.checks.values())

    def as_json(self) -> dict[str, Any]:
        """{"teams": ..., "checks": {name: {"tested", "violations", "median_ratio", "p99_ratio", "min_ratio"}}}."""
        return {
            "teams": self.teams,
            "checks": {
                name: {
                    "tested": check.tested,
                    "violations": check.violations,
                    "median_ratio": _number(check.median_ratio),
                    "p99_ratio": _number(check.p99_ratio),
                    "min_ratio": _number(check.min_ratio),
                }
                for name, check in self.checks.items()
            },
        }


def verify(
    teams: int = 10_000,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    checks: Sequence[Check] | None = None,
) -> VerifyReport:
    """Run every check on ``teams`` random teams of each kind. ``progress(done, teams)`` is called after every batch."""
    if teams < 1:
        raise ValueError(f"verify: at least one team is needed, got {teams}")
    checks = all_checks() if checks is None else checks
    started = time.perf_counter()
    size = min(BATCH, max(5, teams // 20))  # twenty batches from 100 teams on: every family occurs
    tallies: dict[str, _Tally] = {}
    for batch, first in enumerate(range(0, teams, size)):
        drawn = draw(seed, batch, min(size, teams - first))
        for check in checks:
            own = replace(drawn, rng=generator(seed, "verify", batch, check.__module__, check.__name__))
            for outcome in check(own):
                tallies.setdefault(outcome.name, _Tally()).add(outcome, batch)
        if progress is not None:
            progress(min(first + size, teams), teams)
    seconds = time.perf_counter() - started
    return VerifyReport(teams, seed, size, seconds, {name: tally.report() for name, tally in tallies.items()})


def all_checks() -> list[Check]:
    return [*team_checks.CHECKS, *point_checks.CHECKS, *geometry_checks.CHECKS]


class _Tally:
    """Counts for one statement, added batch by batch."""

    def __init__(self) -> None:
        self.tested = 0
        self.violations = 0
        self.first: int | None = None
        self.ratios: list[Floats] = []

    def add(self, outcome: Outcome, batch: int) -> None:
        broken = outcome.violations()
        self.tested += int(np.broadcast(outcome.bound, outcome.true).size)
        self.violations += broken
        if broken and self.first is None:
            self.first = batch
        self.ratios.append(outcome.ratios())

    def report(self) -> CheckReport:
        ratios = np.concatenate(self.ratios)
        median, p99, least = np.quantile(ratios, [0.5, 0.99, 0.0]) if ratios.size else [np.nan] * 3
        return CheckReport(self.tested, self.violations, float(median), float(p99), float(least), self.first)


def _number(value: float) -> float | None:
    """None for nan and inf, which JSON lacks."""
    return value if np.isfinite(value) else None


# -- random batches ----------------------------------------------------------------------------------------------


def draw(seed: int, batch: int, size: int) -> Draw:
    """The random teams of one batch; their shape and family depend on the index of the batch."""
    rng = generator(seed, "verify", batch)
    match batch % 10:
        case 3:
            return Draw(rng, size, fork(rng, size), crossed(rng, size, agents=1 + batch // 10 % 2))
        case 7:
            return Draw(rng, size, blind_spot(rng, size), rare_branch(rng, size))
    return Draw(rng, size, _random_discounted(rng, size), _random_episodic(rng, size))


def _random_discounted(rng: np.random.Generator, size: int) -> DiscountedStage:
    space = SPACES[rng.integers(len(SPACES))]
    agents = int(rng.integers(1, 5 if space.size <= 4 else 4))
    return random_discounted_stage(
        rng,
        size,
        agents=agents,
        states=int(rng.integers(max(2, agents), 8)),
        space=space,
        router=rng.choice(["cyclic", "table"]),
        rewards=rng.choice(["sparse", "dense", "signed"]),
        aliased=bool(rng.random() < 0.3),
    )


def _random_episodic(rng: np.random.Generator, size: int) -> EpisodicStage:
    space = SPACES[rng.integers(len(SPACES))]
    problems = int(rng.integers(1, 3))
    longest = int(np.log(600 / problems) / np.log(space.size))  # at most 600 final histories
    return random_episodic_stage(
        rng,
        size,
        agents=int(rng.integers(1, 4)),
        horizon=int(rng.integers(1, min(longest, 6) + 1)),
        space=space,
        problems=problems,
        router=rng.choice(["cyclic", "addressed", "table"]),
        visibility=rng.choice(["everything", "blind_round", "nothing"]),
        rewards=rng.choice(["sparse", "dense", "signed"]),
        stops=bool(rng.random() < 0.3),
    )


# -- cases in which bounds are nearly attained -------------------------------------------------------------------


def _logit(probability: Floats) -> Floats:
    """Logits of two messages, the second of which has the given probability."""
    return np.stack([np.log1p(-probability), np.log(probability)], axis=-1)


def _three_states(
    rng: np.random.Generator, active: Sequence[int], second_BS: Floats, reward_BSA: Floats, gamma_B: Floats
) -> DiscountedTeam:
    """State 0 leads to state 1 by message 0 and to state 2 by message 1; these two are absorbing. ``second_BS`` is
    Pr(message 1)."""
    size = len(gamma_B)
    transition_SAS = np.zeros((3, 2, 3))
    transition_SAS[0, 0, 1] = transition_SAS[0, 1, 2] = transition_SAS[1, :, 1] = transition_SAS[2, :, 2] = 1.0
    return DiscountedTeam(
        space=MessageSpace(2, 1),
        agents=1 + max(active),
        logits_BSKV=_logit(second_BS)[:, :, None, :],
        row_BS=np.tile(np.arange(3), (size, 1)),
        active_BS=np.tile(np.asarray(active), (size, 1)),
        transition_BSAS=np.tile(transition_SAS, (size, 1, 1, 1)),
        reward_BSA=reward_BSA,
        start_BS=np.tile(np.eye(3)[0], (size, 1)),
        gamma_B=gamma_B,
    )


def fork(rng: np.random.Generator, size: int) -> DiscountedStage:
    """Agent 0 chooses between two absorbing states, in which agent 1 speaks: the whole shift happens at once.

    lem:occexp is attained: both sides, the shift from d to d' and its bound, are 2 gamma TV. lem:occ is attained up to
    1 / sqrt(1 - gamma) for small steps from 1/2. Agent 1 then changes from wrong to right in one state and from right
    to wrong in the other, so that the expected advantage is +-A_max and eq:stale_surrogate_gap is attained up to the
    same factor.
    """
    gamma_B = rng.choice([0.05, 0.2, 0.5, 0.9], size=size)
    second_BS = np.stack([rng.choice([0.5, 0.3, 0.05], size=size), np.full(size, 1e-9), np.full(size, 1e-9)], axis=1)
    reward_BSA = np.zeros((size, 3, 2))
    reward_BSA[:, 1, 1] = reward_BSA[:, 2, 0] = 1.0  # agent 1 is wrong in state 1 and right in state 2
    team = _three_states(rng, (0, 1, 1), second_BS, reward_BSA, gamma_B)
    first = update_discounted(rng, team, 0, kinds=("random",), radius_B=10.0 ** rng.uniform(-5.0, -0.3, size=size))
    turned = first.logits_BSKV.copy()
    turned[:, 1:] = turned[:, 1:, :, ::-1]
    return DiscountedStage((team, first, first.replace_agent(1, turned)), (0, 1), "fork")


def blind_spot(rng: np.random.Generator, size: int) -> DiscountedStage:
    """One agent leaves state 1, where it improves, for state 2, which it never visited and where it now always fails.

    The KL does not cover state 2, because the old team never visits it. Half of the teams have small gamma and long
    steps, for which thm:single is attained up to a factor below 1.5. The other half have short steps, any gamma and the
    same reward in state 1 for every message; for these ``second_order_certificate`` is nearly attained.
    """
    long_B = rng.random(size) < 0.5
    gamma_B = np.where(long_B, rng.choice([0.02, 0.05, 0.1], size=size), rng.choice([0.5, 0.9, 0.97], size=size))
    never = 1e-12
    moved_B = np.where(long_B, rng.uniform(0.5, 0.95, size=size), 10.0 ** rng.uniform(-4.0, -2.0, size=size))
    better_B = np.where(long_B, rng.uniform(0.5, 0.99, size=size), never)
    reward_BSA = np.zeros((size, 3, 2))
    reward_BSA[:, 1, 0] = np.where(long_B, 0.0, 1.0)
    reward_BSA[:, 1, 1] = 1.0
    reward_BSA[:, 2, 0] = 1.0
    old_BS = np.tile([never, never, never], (size, 1))
    team = _three_states(rng, (0, 0, 0), old_BS, reward_BSA, gamma_B)
    new_BS = np.stack([moved_B, better_B, np.full(size, 1.0 - never)], axis=1)
    return DiscountedStage((team, team.replace_agent(0, _logit(new_BS)[:, :, None, :])), (0,), "blind_spot")


def _two_turns(size: int, agents: int, second_BR: Floats, reward_B4: Floats) -> EpisodicTeam:
    """Two turns of two messages, both spoken by one agent, or each by its own. Row 0 is the first turn, rows 1 and 2
    are the second turn after message 0 and message 1; ``second_BR`` is Pr(message 1)."""
    logits_BRKV = _logit(second_BR)[:, :, None, :]
    return EpisodicTeam(
        space=MessageSpace(2, 1),
        logits_BnRKV=np.stack([logits_BRKV] * agents, axis=1),
        rows=(np.array([0]), np.array([1, 2])),
        active=(np.zeros((size, 1), dtype=np.int64), np.full((size, 2), agents - 1)),
        start_BX=np.ones((size, 1)),
        reward_BN=reward_B4,
    )


def _replace_all(team: EpisodicTeam, second_BR: Floats, family: str) -> EpisodicStage:
    teams = [team]
    for agent in range(team.agents):
        teams.append(teams[-1].replace_agent(agent, _logit(second_BR)[:, :, None, :]))
    return EpisodicStage(tuple(teams), tuple(range(team.agents)), family)


def crossed(rng: np.random.Generator, size: int, agents: int) -> EpisodicStage:
    """Two branches of probability 1/2, shifted apart by e; then the policy moves by tau, to the bad message in one
    branch and to the good one in the other.

    The loss is 2 e tau, the root term in ``turn_aware_certificate``. With one agent for both turns it is the loss of a
    step; with two agents it is a loss from training both on one batch.
    """
    tau_B = 10.0 ** rng.uniform(-2.0, -0.5, size=size)
    e_B = tau_B * 10.0 ** rng.uniform(-3.0, 0.0, size=size)
    reward_B4 = np.tile([0.0, 1.0, 0.0, 1.0], (size, 1))
    half = np.full((size, 3), 0.5)
    new_BR = half + np.stack([e_B, tau_B, -tau_B], axis=1)
    return _replace_all(_two_turns(size, agents, half, reward_B4), new_BR, "crossed")


def rare_branch(rng: np.random.Generator, size: int) -> EpisodicStage:
    """A branch that the old team never takes, where it would succeed and the new team always fails.

    Reaching it with mass e costs a KL of -log(1 - e), which is the whole linear term of ``turn_aware_certificate``.
    """
    never = 1e-12
    e_B = 10.0 ** rng.uniform(-4.0, -0.7, size=size)
    reward_B4 = np.tile([1.0, 1.0, 1.0, 0.0], (size, 1))
    old_BR = np.full((size, 3), never)
    new_BR = np.stack([e_B, np.full(size, never), np.full(size, 1.0 - never)], axis=1)
    return _replace_all(_two_turns(size, 1, old_BR, reward_B4), new_BR, "rare_branch")
