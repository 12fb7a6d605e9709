"""What a recipe is: teams to train, and lines of a table or figures to make of them."""

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
"""Finished runs by variant, one for each seed."""


@dataclass(frozen=True)
class Replacement:
    """An agent of a trained team is replaced by a model that never saw the team; then training goes on. ``mode`` and
    the switches of the protocol are those of ``teamtr swap``."""

    mode: Mode
    think: ThinkPolicy | None = None
    tools: ToolPolicy | None = None
    system: SystemPolicy | None = None


@dataclass(frozen=True)
class Variant:
    """A team that is trained: what differs from the scale's team file, how many agents there are (the scale's own team
    where None), and how many times the scale's radius its own is. With a ``replacement`` it is the scale's own team,
    trained, that goes on with another agent; with a ``method`` nothing is trained, and the models answer by it
    (``teamtr.baselines``), one agent in all roles where it is alone."""

    name: str
    changes: tuple[str, ...] = ()
    agents: int | None = None
    radius: float = 1.0
    replacement: Replacement | None = None
    method: str | None = None


@dataclass(frozen=True)
class Line:
    """A line of a table: numbers of one variant's runs, and what the paper prints in the same places."""

    name: str
    variant: str
    measures: Mapping[str, Measure]
    paper: Mapping[str, str] = field(default_factory=dict)
    part: str = ""


@dataclass(frozen=True)
class Recipe:
    """One of the paper's tables or figures.

    ``columns`` are in the order in which they are shown; after the first, accuracy, stands how far it is from that of
    the line called ``reference``, if one is; ``notes`` say something of all runs together, or nothing;
    ``figures`` are drawn of all runs (``teamtr.analysis.figures``). ``task`` and ``stages`` are the paper's own.
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
