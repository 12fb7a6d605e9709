"""Visibility: which turns an agent sees, as values and as a team file writes them.

A new one is a class and an entry in ``WORDS`` or ``FORMS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from teamtr.types import Turn


class Visibility(Protocol):
    """Which of the earlier turns an agent sees. Messages of an environment are always seen."""

    @property
    def names(self) -> tuple[str, ...]:
        """The agents that it refers to; they must exist."""
        ...

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds that it refers to, counted from 0; they must exist."""
        ...

    def shows(self, turn: Turn, agent: str, round: int) -> bool:
        """Whether ``agent``, about to speak in ``round``, sees this earlier turn."""
        ...


@dataclass(frozen=True)
class Everything:
    """Shows every turn."""

    names: tuple[str, ...] = ()
    rounds: tuple[int, ...] = ()

    def shows(self, turn: Turn, agent: str, round: int) -> bool:
        return True


@dataclass(frozen=True)
class Blind:
    """Hides the turns of the current round: in every round, or in those listed."""

    rounds: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def shows(self, turn: Turn, agent: str, round: int) -> bool:
        return turn.round < round or not self.is_blind_in(round)

    def is_blind_in(self, round: int) -> bool:
        return not self.rounds or round in self.rounds


@dataclass(frozen=True)
class Only:
    """Shows the turns of these agents and the agent's own."""

    names: tuple[str, ...]
    rounds: tuple[int, ...] = ()

    def shows(self, turn: Turn, agent: str, round: int) -> bool:
        return turn.agent == agent or turn.agent in self.names


@dataclass(frozen=True)
class Each:
    """Shows the turns that all of several visibilities show."""

    parts: tuple[Visibility, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names)

    @property
    def rounds(self) -> tuple[int, ...]:
        return tuple(round for part in self.parts for round in part.rounds)

    def shows(self, turn: Turn, agent: str, round: int) -> bool:
        return all(part.shows(turn, agent, round) for part in self.parts)


# -- as a team file writes them -------------------------------------------------------------------------------


def _rounds(value: Any) -> Visibility:
    if not _list_of(int, value) or any(round < 0 for round in value):
        raise ValueError("must list rounds under blind, counted from 0, such as {blind: [0]}")
    return Blind(tuple(value))


def _names(value: Any) -> Visibility:
    if not _list_of(str, value):
        raise ValueError("must list agents under only, such as {only: [ann, bob]}")
    return Only(tuple(value))


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(type(each) is kind for each in value)


EVERYTHING = Everything()
WORDS: dict[str, Visibility] = {"everything": EVERYTHING, "blind": Blind()}
FORMS: dict[str, Callable[[Any], Visibility]] = {"blind": _rounds, "only": _names}
MAPPING = {
    "type": "object",
    "properties": {
        "blind": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        "only": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "minProperties": 1,
    "additionalProperties": False,
}
"""JSON schema of a mapping under ``sees``, with one property per entry of ``FORMS``."""

HELP = (
    "What it sees of the conversation. everything: all messages; blind: no message of the current round; {blind: [0]}: "
    "blind in these rounds, counted from 0; {only: [ann, bob]}: these agents' messages and its own. A mapping may have "
    "both."
)


def visibility(written: Any) -> Visibility:
    """Parse the value of ``sees`` in a team file. Raises ValueError that says what it must be."""
    if isinstance(written, str) and written in WORDS:
        return WORDS[written]
    if not isinstance(written, dict) or not written or not written.keys() <= FORMS.keys():
        raise ValueError(f"must be {', '.join(WORDS)} or a mapping with {' or '.join(FORMS)}")
    parts = tuple(FORMS[form](value) for form, value in written.items())
    return parts[0] if len(parts) == 1 else Each(parts)
