"""How often a certificate is informative: the share of steps with a positive lower bound, for the paper's and ours.

Random episodic teams take exact steps of one radius. For every step the true gain is known, and four lower bounds are
computed:

    paper        thm:single; for H turns, as it prescribes, gamma = 1 - 1/H, D_tok = (the sum of the episode's KLs) / H,
                 with the exact A_max of the team and the true advantages (zeta = 0)
    first_order  turn-aware, from what each turn may lose by total variation alone
    by_kl        turn-aware, first and second order, from the KL that the gate measures: what training can compute
    by_tv        the same with the exact total variation, which is available for tabular teams only

A step counts as a true improvement if its gain exceeds ``ROUNDING``, the error of this lab, which samples nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from teamtr.randomness import generator
from teamtr.theory.certificates import single_step_certificate, turn_aware_certificate
from teamtr.theory.occupancy import tv_by_kl
from teamtr.theory.tabular import (
    EpisodicStep,
    EpisodicTeam,
    MessageSpace,
    random_episodic_team,
    update_episodic,
)
from teamtr.types import Floats

ROUNDING = 1e-9
BOUNDS = ("paper", "first_order", "by_kl", "by_tv")
SPACES = (MessageSpace(2, 1), MessageSpace(3, 1), MessageSpace(2, 2, ends=True))
Direction = Literal["natural", "gradient", "random"]
"""Natural gradient, plain gradient, or a random direction: about half of the random steps improve, by chance."""


@dataclass(frozen=True)
class TightnessRow:
    """Steps of one kind: how many there are, how many truly improve, and the share of these that each bound
    certifies."""

    turns: int
    direction: str
    steps: int
    improving: int
    certified: dict[str, float]
    """Share of the improving steps with a positive lower bound."""
    violated: dict[str, int]
    """Number of steps whose gain is below the bound by more than rounding; 0 if the bound holds."""
    kept: dict[str, float]
    """Median over improving steps of max(bound, 0) / gain: how much of the gain is certified."""
    median_gain: float
    median_bound: dict[str, float]


@dataclass(frozen=True)
class TightnessReport:
    """Results of ``tightness``. ``overall`` is over all rows; ``points`` are some (gain, bound) pairs for a figure."""

    radius: float
    seed: int
    rows: tuple[TightnessRow, ...]
    overall: TightnessRow
    points: dict[str, tuple[float, ...]]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def tightness(
    teams: int = 2000,
    *,
    radius: float = 0.01,
    turns: Sequence[int] = (1, 2, 3),
    directions: Sequence[Direction] = ("natural", "gradient", "random"),
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> TightnessReport:
    """Steps of ``teams`` random teams for each number of turns per agent and each direction.

    ``radius`` is in nats per message, as in training: the mean over the agent's messages.
    """
    batches: list[tuple[int, str, _Steps]] = []
    for count in turns:
        for direction in directions:
            if progress is not None:
                progress(f"{count} turns, {direction}")
            batches.append((count, direction, _steps(seed, count, direction, teams, radius)))
    rows = tuple(_row(count, direction, steps) for count, direction, steps in batches)
    everything = _Steps(
        gain=np.concatenate([steps.gain for _, _, steps in batches]),
        bounds={name: np.concatenate([steps.bounds[name] for _, _, steps in batches]) for name in BOUNDS},
    )
    shown = generator(seed, "tightness", "points").permutation(len(everything.gain))[:600]
    points = {"gain": tuple(everything.gain[shown].tolist())} | {
        name: tuple(everything.bounds[name][shown].tolist()) for name in BOUNDS
    }
    return TightnessReport(radius, seed, rows, _row(0, "all", everything), points)


@dataclass(frozen=True)
class _Steps:
    gain: Floats
    bounds: dict[str, Floats]


def _steps(seed: int, turns: int, direction: Direction, teams: int, radius: float) -> _Steps:
    gains, bounds = [], {name: [] for name in BOUNDS}  # type: ignore[var-annotated]
    batch = 50
    for first in range(0, teams, batch):
        rng = generator(seed, "tightness", turns, direction, first)
        team = _team(rng, min(batch, teams - first), turns)
        agent = int(rng.integers(team.agents))
        new = update_episodic(rng, team, agent, kinds=(direction,), radius_B=np.full(len(team.start_BX), radius))
        step = EpisodicStep(team, new, (agent,))
        gains.append(step.gain_B)
        for name, value_B in lower_bounds(step).items():
            bounds[name].append(value_B)
    return _Steps(np.concatenate(gains), {name: np.concatenate(values) for name, values in bounds.items()})


def _team(rng: np.random.Generator, size: int, turns: int) -> EpisodicTeam:
    """Teams of one random shape in which every agent has exactly ``turns`` turns."""
    agents = int(rng.integers(2, 4))
    horizon = agents * turns
    fitting = [space for space in SPACES if space.size**horizon <= 800] or [SPACES[0]]
    return random_episodic_team(
        rng,
        size,
        agents=agents,
        horizon=horizon,
        space=fitting[rng.integers(len(fitting))],
        visibility=rng.choice(["everything", "blind_round"]),
        rewards=rng.choice(["sparse", "dense"]),
    )


def lower_bounds(step: EpisodicStep) -> dict[str, Floats]:
    """The four lower bounds on the gain of a step, from exact quantities of the team."""
    old, horizon = step.old, step.old.horizon
    a_max_B = np.max([np.abs(advantage).max(axis=(1, 2)) for advantage in old.advantages], axis=0)
    delta_B = step.kl_by_turn_BK.sum(axis=1) / horizon
    paper = single_step_certificate(step.surrogate_B, delta_B, 0.0, 1.0 - 1.0 / horizon, a_max_B)
    ours = {
        "by_kl": turn_aware_certificate(
            step.surrogate_B, step.kl_by_turn_BK, old.reward_range_B, turns=step.turns_B
        ).lower_bound,
        "by_tv": turn_aware_certificate(
            step.surrogate_B,
            step.kl_by_turn_BK,
            old.reward_range_B,
            turns=step.turns_B,
            tv_by_turn_K=step.tv_by_turn_BK,
        ).lower_bound,
    }
    first_B = step.surrogate_B - first_order_penalty(step)
    return {"paper": np.asarray(paper.lower_bound), "first_order": first_B} | {
        name: np.asarray(value) for name, value in ours.items()
    }


def first_order_penalty(step: EpisodicStep) -> Floats:
    """Step 6 of the proof of ``turn_aware_certificate`` alone: range * sum over k of (m_k + min(m_k, E tau_k)). m_k
    bounds the total variation that the agent's earlier turns may have caused, by ``tv_by_kl`` of each turn or of their
    sum."""
    tv_BK = tv_by_kl(step.kl_by_turn_BK)
    before_BK = np.cumsum(step.kl_by_turn_BK, axis=1) - step.kl_by_turn_BK
    moved_BK = np.minimum(np.cumsum(tv_BK, axis=1) - tv_BK, tv_by_kl(np.maximum(before_BK, 0.0)))
    within_BK = np.arange(tv_BK.shape[1]) < step.turns_B[:, None]
    lost_BK = np.where(within_BK, moved_BK + np.minimum(moved_BK, tv_BK), 0.0)
    return np.asarray(step.old.reward_range_B * lost_BK.sum(axis=1))


def _row(turns: int, direction: str, steps: _Steps) -> TightnessRow:
    improving = steps.gain > ROUNDING
    gain = steps.gain[improving]
    return TightnessRow(
        turns=turns,
        direction=direction,
        steps=len(steps.gain),
        improving=int(improving.sum()),
        certified={name: float((steps.bounds[name][improving] > 0.0).mean()) for name in BOUNDS},
        violated={name: int((steps.gain < steps.bounds[name] - ROUNDING).sum()) for name in BOUNDS},
        kept={name: float(np.median(np.maximum(steps.bounds[name][improving], 0.0) / gain)) for name in BOUNDS},
        median_gain=float(np.median(gain)),
        median_bound={name: float(np.median(steps.bounds[name][improving])) for name in BOUNDS},
    )
