"""The definition of a recipe: teams to train, and the lines of a table or the figures to make from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from teamtr.analysis.figures import Run
from teamtr.chat.message_filter import ToolPolicy
from teamtr.chat.systems import SystemPolicy
from teamtr.chat.thinking import ThinkPolicy
from teamtr.swap.request import Mode
from teamtr.sweep.measures import Measure

Runs = Mapping[str, Sequence[Run]]
"""Finished runs by variant, one per seed."""


@dataclass(frozen=True)
class Replacement:
    """Replacement of an agent of a trained team by a model that never saw the team, followed by more training. ``mode``
    and the protocol switches are those of ``teamtr swap``."""

    mode: Mode
    think: ThinkPolicy | None = None
    tools: ToolPolicy | None = None
    system: SystemPolicy | None = None


@dataclass(frozen=True)
class Variant:
    """A team to train: changes to the scale's team file, the number of agents (None: the scale's own team), and the
    radius as a multiple of the scale's. With a ``replacement``, the scale's own team is trained first and continues
    with another agent. With a ``method``, nothing is trained and the models answer by it (``teamtr.baselines``); a
    single agent then plays all roles."""

    name: str
    changes: tuple[str, ...] = ()
    agents: int | None = None
    radius: float = 1.0
    replacement: Replacement | None = None
    method: str | None = None


@dataclass(frozen=True)
class Line:
    """A line of a table: measures of one variant's runs, and the paper's numbers in the same columns."""

    name: str
    variant: str
    measures: Mapping[str, Measure]
    paper: Mapping[str, str] = field(default_factory=dict)
    part: str = ""


@dataclass(frozen=True)
class Recipe:
    """One of the paper's tables or figures.

    ``columns`` are in display order. If ``reference`` names a line, a column after the first (accuracy) shows the
    difference from that line's accuracy. ``notes`` make a sentence about all runs together, or None; ``figures`` are
    drawn from all runs (``teamtr.analysis.figures``). ``task`` and ``stages`` are the paper's own.
    """

    name: str
    title: str
    label: str
    variants: tuple[Variant, ...]
    columns: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    notes: tuple[Callable[[Runs], str | None], ...] = ()
    figures: tuple[str, ...] = ()
    task: str = "aime24"
    stages: int = 40
    probes: bool = False
    reference: str = ""
