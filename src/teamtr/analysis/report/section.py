"""The sections of the report, one module each: what a section computes, shows, and which question it answers.

    register(
        Section(
            key="lengths",                  # its place on the page, #lengths
            title="Message lengths",
            place=25,                       # sections stand in the order of their places
            lead="Do messages grow?",
            compute=compute,                # Reading -> what the report's data gains, by name
            show=show,                      # data -> parts: tables, charts, sentences
        )
    )

All modules in ``sections/`` are imported automatically. The data (JSON), the page, the live page and the Markdown use
the registered sections.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from teamtr.analysis.report.parts import Part, as_plain
from teamtr.analysis.report.reading import Reading
from teamtr.errors import UserError

Data: TypeAlias = Mapping[str, Any]
"""The data of a report, as ``teamtr report --format json`` prints it."""

_BUILT_IN = "teamtr.analysis.report.sections"


@dataclass(frozen=True)
class Answer:
    """A question that users have about a run, answered by a headline and a sentence or two."""

    question: str
    tone: Literal["good", "bad", "plain"]
    headline: str
    text: str


def _no_data(reading: Reading) -> Data:
    return {}


def _no_parts(data: Data) -> Sequence[Part]:
    return ()


@dataclass(frozen=True)
class Section:
    """``compute`` reads a run, once. ``show`` and ``answer`` get the data of all sections, and ``run``, ``notes``,
    ``evals``, ``updates`` and ``batches``. A section that shows nothing is left out.

    ``script`` names a file of ``assets/`` that draws what parts cannot; it sets ``OWN[key]``.
    """

    key: str
    title: str
    place: int
    lead: str = ""
    compute: Callable[[Reading], Data] = _no_data
    show: Callable[[Data], Sequence[Part]] = _no_parts
    answer: Callable[[Data], Answer] | None = None
    script: str = ""


@dataclass(frozen=True)
class Shown:
    """The contents of a section for the text and the page; ``own``: its script draws more than its parts."""

    key: str
    title: str
    lead: str
    parts: Sequence[Part]
    own: bool = False

    def as_plain(self) -> dict[str, Any]:
        return {**vars(self), "parts": as_plain(self.parts)}


_registered: dict[str, Section] = {}
_TAKEN = ("top", "headlines", "page", "data")
"""Names of other elements of the page."""


def register(section: Section) -> None:
    """Add a section to all reports made from now on."""
    if not section.key.isidentifier() or section.key in _TAKEN:
        raise UserError(f"a section's key is a word of letters, and none of {', '.join(_TAKEN)}: not {section.key!r}")
    if section.key in _registered:
        raise UserError(f"two sections have the key {section.key!r}, {section.title!r} is the second: rename it")
    _registered[section.key] = section


def sections() -> list[Section]:
    """Every section, in the order of the page."""
    _load_built_in()
    return sorted(_registered.values(), key=lambda section: (section.place, section.key))


def computed(reading: Reading) -> dict[str, Any]:
    """The data that all sections compute from a run, by name."""
    data: dict[str, Any] = {}
    for section in sections():
        found = section.compute(reading)
        if twice := sorted(data.keys() & found.keys()):
            raise UserError(f"section {section.key!r} computes {twice[0]!r}, which another one does: rename it")
        data |= found
    return data


def shown(data: Data) -> list[Shown]:
    """Every section that has something to show."""
    every = [(section, tuple(section.show(data))) for section in sections()]
    return [Shown(s.key, s.title, s.lead, parts, bool(s.script)) for s, parts in every if parts or s.script]


@cache
def _load_built_in() -> None:
    for module in pkgutil.iter_modules(importlib.import_module(_BUILT_IN).__path__):
        importlib.import_module(f"{_BUILT_IN}.{module.name}")
