"""Routers, which decide who speaks next: the Protocol, the library's routers, and how a team file selects one.

A router is a frozen value and a function of the turns so far, so that a run resumes to the same bits. A new one is a
class with a ``planned`` method and an entry in ``ROUTERS``; a team file names it under ``team.router.kind``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from teamtr.errors import UserError
from teamtr.types import Turn


class Upcoming(NamedTuple):
    """The next turn: its round, counted from 0, and its speaker."""

    round: int
    agent: str


@runtime_checkable
class Router(Protocol):
    """Decides who speaks when. ``horizon``, ``rounds`` and ``turns_of`` are upper bounds, on which certificates and
    memory estimates rely; an environment or the router itself may end an episode earlier."""

    @property
    def rounds(self) -> int:
        """The maximum number of rounds of an episode."""
        ...

    @property
    def horizon(self) -> int:
        """The maximum number of turns of an episode."""
        ...

    def turns_of(self, agent: str) -> int:
        """The maximum number of turns of this agent in an episode; 0 for one that never speaks."""
        ...

    def next(self, turns: Sequence[Turn]) -> tuple[int, str] | None:
        """Round and speaker of the turn that follows these, or None when the episode is over.

        Rounds begin at 0 and increase by one at a time; the environment speaks before the first turn of each.
        """
        ...


@dataclass(frozen=True)
class Schedule:
    """A fixed schedule: the order of speakers of every round. An agent may speak more than once in a round."""

    orders: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.orders or not all(self.orders):
            raise ValueError("a schedule needs at least one round, and every round a speaker")

    @classmethod
    def repeated(cls, order: Sequence[str], rounds: int = 1, then: Sequence[str] = ()) -> Self:
        """One order for ``rounds`` rounds, then a last round of ``then``."""
        if rounds < 1:
            raise ValueError(f"a schedule needs at least one round, got {rounds}")
        return cls((tuple(order),) * rounds + ((tuple(then),) if then else ()))

    @classmethod
    def planned(
        cls,
        agents: Sequence[str],
        *,
        order: Sequence[str] = (),
        rounds: int | Sequence[Sequence[str]] = 1,
        then: Sequence[str] = (),
    ) -> Self:
        """The schedule that a team file describes. ``rounds`` may be the orders themselves. Without an order, all but
        ``then`` speak, in the order of the team."""
        if not isinstance(rounds, int):
            if order:
                raise ValueError("lists an order for every round in rounds; leave order out")
            return cls((*map(tuple, rounds), *([tuple(then)] if then else ())))
        everybody = tuple(agent for agent in agents if agent not in then) or tuple(agents)
        return cls.repeated(tuple(order) or everybody, rounds, then)

    @property
    def rounds(self) -> int:
        return len(self.orders)

    @property
    def horizon(self) -> int:
        return sum(map(len, self.orders))

    @property
    def speakers(self) -> tuple[str, ...]:
        """The speakers in order; equal rounds in a row are listed once."""
        return tuple(name for order, _ in groupby(self.orders) for name in order)

    @property
    def closers(self) -> tuple[str, ...]:
        return self.orders[-1][-1:]

    def turns_of(self, agent: str) -> int:
        return sum(order.count(agent) for order in self.orders)

    def turns(self) -> tuple[Upcoming, ...]:
        """All turns of an episode that does not end early."""
        return tuple(Upcoming(round, name) for round, order in enumerate(self.orders) for name in order)

    def next(self, turns: Sequence[Turn]) -> Upcoming | None:
        ahead = len(turns)
        for round, order in enumerate(self.orders):
            if ahead < len(order):
                return Upcoming(round, order[ahead])
            ahead -= len(order)
        return None


@dataclass(frozen=True)
class Addressed:
    """The agent that the last message names (``@bob``) speaks next. Every message is a round of its own.

    Of several names the last counts; an agent cannot name itself. If nobody is named, the next agent in ``order``
    speaks; the first in ``order`` begins. After ``turns`` messages, or as soon as one of ``then`` is named, the agents
    in ``then`` speak in a last round. Agents in ``also`` speak only if they are named.
    """

    order: tuple[str, ...]
    turns: int
    then: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.order or self.turns < 1:
            raise ValueError("needs somebody who begins and at least one turn")
        if len(set(self.order)) < len(self.order):
            raise ValueError("takes every agent of order once")

    @classmethod
    def planned(cls, agents: Sequence[str], *, turns: int, order: Sequence[str] = (), then: Sequence[str] = ()) -> Self:
        """The router that a team file describes. Without an order, all but ``then`` take turns, in the team's order."""
        everybody = tuple(agent for agent in agents if agent not in then)
        order = tuple(order) or everybody
        return cls(order, turns, tuple(then), tuple(agent for agent in everybody if agent not in order))

    @property
    def rounds(self) -> int:
        return self.turns + bool(self.then)

    @property
    def horizon(self) -> int:
        return self.turns + len(self.then)

    @property
    def speakers(self) -> tuple[str, ...]:
        return (*self.order, *self.also, *self.then)

    @property
    def closers(self) -> tuple[str, ...]:
        return self.then[-1:] or self.speakers

    def turns_of(self, agent: str) -> int:
        at_the_end = self.then.count(agent)
        if agent not in (*self.order, *self.also):
            return at_the_end
        if len(self.order) == 1 and agent == self.order[0]:  # if nobody is named, it speaks again
            return self.turns + at_the_end
        return (self.turns + (agent == self.order[0])) // 2 + at_the_end  # no agent speaks twice in a row

    def next(self, turns: Sequence[Turn]) -> Upcoming | None:
        talked = self._talked(turns)
        if talked is None:
            if not turns:
                return Upcoming(0, self.order[0])
            return Upcoming(len(turns), self._named(turns[-1]) or self._after(turns[-1].agent))
        spoken = len(turns) - talked
        return Upcoming(talked, self.then[spoken]) if spoken < len(self.then) else None

    def _talked(self, turns: Sequence[Turn]) -> int | None:
        """The number of messages before the last round, or None while that has not begun."""
        for t, turn in enumerate(turns, start=1):
            if t == self.turns or self._named(turn) in self.then:
                return t
        return None

    def _named(self, turn: Turn) -> str | None:
        """The agent that this message names as the next speaker."""
        others = sorted({*self.speakers} - {turn.agent}, key=len, reverse=True)
        if not others:
            return None
        found = re.findall(rf"@({'|'.join(map(re.escape, others))})(?!-?\w)", turn.text)
        return found[-1] if found else None

    def _after(self, agent: str) -> str:
        place = self.order.index(agent) if agent in self.order else -1
        return self.order[(place + 1) % len(self.order)]


# -- selection by a team file ---------------------------------------------------------------------------------

ROUTERS: dict[str, Callable[..., Router]] = {"schedule": Schedule.planned, "addressed": Addressed.planned}
"""By the value of ``team.router.kind``. Called with the names of the agents and the keys that the team file gives."""


def keys_of(kind: str) -> dict[str, bool]:
    """The keys that a router takes, and whether each is required."""
    parameters = inspect.signature(ROUTERS[kind]).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


# -- what the rollout loop needs of any router ----------------------------------------------------------------


def next_turn(router: Router, turns: Sequence[Turn], names: Sequence[str]) -> Upcoming | None:
    """The next turn. Raises UserError if the router violates its contract: certificates would not hold."""
    found = router.next(turns)
    if found is None:
        return None
    round, agent = found
    before = turns[-1].round if turns else -1
    spoken = sum(turn.agent == agent for turn in turns)
    if agent not in names:
        wrong = f"gives the word to {agent!r}, who is no agent of the team"
    elif not max(before, 0) <= round <= before + 1:
        wrong = f"goes from round {before} to round {round}" if turns else f"begins with round {round}"
    elif round >= router.rounds:
        wrong = f"goes on after its {router.rounds} rounds"
    elif len(turns) >= router.horizon:
        wrong = f"goes on after its {router.horizon} turns"
    elif spoken >= router.turns_of(agent):
        wrong = f"gives {agent!r} more than {router.turns_of(agent)} turns"
    else:
        return Upcoming(round, agent)
    raise UserError(f"the router {type(router).__name__} {wrong}; see docs/teams.md")


def opens_round(turns: Sequence[Turn], upcoming: Upcoming | None) -> bool:
    """Whether the next turn is the first of a round, before which an environment speaks."""
    return upcoming is not None and (not turns or upcoming.round > turns[-1].round)


def ends_after(router: Router, turns: Sequence[Turn], upcoming: Upcoming) -> bool:
    """Whether the next turn is certainly the last, whatever its message says. A user-defined router may depend on the
    message, so only its horizon is used."""
    if len(turns) + 1 >= router.horizon:
        return True
    if not isinstance(router, Schedule | Addressed):
        return False
    nothing = np.zeros(0, dtype=np.int32)
    said = Turn(upcoming.agent, upcoming.round, nothing, nothing, nothing.astype(np.float32), "stop", "", "")
    return router.next([*turns, said]) is None


def speakers_of(router: Router, names: Sequence[str]) -> tuple[str, ...]:
    """The agents that may speak, in the router's order if it has one."""
    known: tuple[str, ...] | None = getattr(router, "speakers", None)
    return tuple(name for name in names if router.turns_of(name)) if known is None else known


def closers_of(router: Router, names: Sequence[str]) -> tuple[str, ...]:
    """The agents that may write the last message."""
    known: tuple[str, ...] | None = getattr(router, "closers", None)
    return speakers_of(router, names) if known is None else known


def most_before(router: Router, agent: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """The maximum total size of the messages before this agent's last turn, given each author's message size, and the
    number of rounds opened after the first by then. Exact for a schedule, otherwise from the router's bounds."""
    if isinstance(router, Schedule):
        turns = router.turns()
        own = [t for t, turn in enumerate(turns) if turn.agent == agent]
        return (sum(sizes[turn.agent] for turn in turns[: own[-1]]), turns[own[-1]].round) if own else (0, 0)
    if not router.turns_of(agent):
        return 0, 0
    said = [size for name, size in sizes.items() for _ in range(router.turns_of(name) - (name == agent))]
    return sum(sorted(said, reverse=True)[: router.horizon - 1]), router.rounds - 1
