"""The cells of the map of staleness, and the record of a training run in one of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from teamtr.errors import UserError

Game = Literal["roles", "code-exchange"]
Cost = Literal["updates", "tokens", "seconds"]
COSTS: tuple[Cost, ...] = ("updates", "tokens", "seconds")
FRESH, STALE, AUTO = "teamtr", "naive_sequential", "auto"
PLANS = (FRESH, STALE, "reweighted", AUTO, "partial")


@dataclass(frozen=True)
class Cell:
    """A game and the settings that may decide whether stale rollouts fail in it. ``length`` is that of a message, in
    symbols."""

    game: Game
    agents: int
    radius: float
    stages: int
    sees: Literal["blind", "everything"] = "blind"
    rounds: int = 1
    length: int = 1
    problems: int = 32

    def __post_init__(self) -> None:
        if self.game == "roles" and self.length != 1:
            raise UserError(f"cell {self.name}: a message in roles is one symbol, so length is 1, not {self.length}")
        if self.game == "code-exchange" and self.agents != 3:
            raise UserError(f"cell {self.name}: code exchange has 3 agents, not {self.agents}")
        if self.game == "code-exchange" and self.sees != "everything":
            raise UserError(f"cell {self.name}: in code exchange the speaker must hear the others: sees is everything")
        if min(self.agents - 1, self.stages, self.rounds, self.length, self.problems) < 1 or not self.radius > 0.0:
            raise UserError(
                f"cell {self.name}: at least two agents, one stage, one round, one symbol, one problem and a positive "
                "radius are needed"
            )

    @property
    def name(self) -> str:
        """The name that ``--cells`` takes; settings with their usual values are left out."""
        parts = [self.game, str(self.agents), f"{self.radius:g}"]
        parts += [self.sees] if self.game == "roles" and self.sees != "blind" else []
        parts += [f"{self.rounds}-rounds"] if self.rounds > 1 else []
        parts += [f"length-{self.length}"] if self.length > 1 else []
        parts += [f"{self.problems}-problems"] if self.problems != 32 else []
        return "-".join(parts)

    @property
    def updates(self) -> int:
        return self.agents * self.stages

    @property
    def is_exact(self) -> bool:
        """Whether success has a closed form: one round of roles, in which no agent sees another's message."""
        return self.game == "roles" and self.sees == "blind" and self.rounds == 1


MAP = (
    *(Cell("roles", n, radius, stages) for radius, stages in ((0.02, 30), (0.1, 16), (0.5, 10)) for n in (3, 5, 8)),
    Cell("roles", 5, 0.1, 16, sees="everything"),
    Cell("roles", 5, 0.1, 16, rounds=2),
    Cell("code-exchange", 3, 0.5, 20, sees="everything"),
    Cell("code-exchange", 3, 0.5, 20, sees="everything", length=2),
)
QUICK = (Cell("roles", 2, 0.5, 1, problems=4), Cell("roles", 3, 0.5, 1, problems=4))
QUICK_PLANS = (FRESH, STALE, AUTO)


def chosen(names: Sequence[str], cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells with these names, in the order of the map; all cells if there are no names."""
    known = [cell.name for cell in cells]
    _require_known("cell", names, known)
    return tuple(cell for cell in cells if not names or cell.name in names)


def chosen_plans(names: Sequence[str]) -> tuple[str, ...]:
    """The plans with these names, in the order of the map; all plans if there are no names."""
    _require_known("plan", names, PLANS)
    return tuple(plan for plan in PLANS if not names or plan in names)


def _require_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"the map has no {what} {name!r}{hint}; it has {', '.join(known)}")


# -- one run -----------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """Success of a team when the run had spent this much."""

    updates: int
    tokens: int
    seconds: float
    success: float


@dataclass(frozen=True)
class Run:
    """The record of one training run: a line of ``--out``.

    ``points`` start before the first update. ``share`` is the mean effective share of rollouts that could be reused,
    ``kept`` the mean share of tokens that partial resampling kept, ``bias`` the mean of its measured bias; each is None
    if there was none. ``settings`` is a hash of everything that determines a run.
    """

    cell: str
    plan: str
    seed: int
    settings: str
    points: tuple[Point, ...]
    samplings: int = 0
    redraws: int = 0
    share: float | None = None
    kept: float | None = None
    bias: float | None = None

    def at(self, cost: Cost, budget: float) -> float:
        """Success at this cost, interpolated between neighboring measurements."""
        reached = {float(getattr(point, cost)): point.success for point in self.points}  # the last of equal costs
        return float(np.interp(budget, list(reached), list(reached.values())))

    def total(self, cost: Cost) -> float:
        return float(getattr(self.points[-1], cost))

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "points": [list(point) for point in self.points]}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Run:
        return cls(**{**record, "points": tuple(Point(*point) for point in record["points"])})
