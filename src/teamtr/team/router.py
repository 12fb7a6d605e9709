"""Who speaks next, who sees what, and whose word is the team's answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teamtr.team.team import Agent
from teamtr.types import Turn


@dataclass(frozen=True)
class Router:
    """A speaking order, repeated for a number of rounds. An agent may stand in the order more than once."""

    order: tuple[str, ...]
    rounds: int = 1

    def __post_init__(self) -> None:
        if not self.order or self.rounds < 1:
            raise ValueError("a router needs at least one speaker and one round")

    @property
    def horizon(self) -> int:
        """Turns in an episode, at most: an environment may end it early."""
        return len(self.order) * self.rounds

    def turns_of(self, agent: str) -> int:
        """How often this agent speaks in an episode, at most."""
        return self.order.count(agent) * self.rounds

    def next(self, turns_taken: int) -> tuple[int, str] | None:
        """(round, speaker) of the next turn, or None when the episode is over."""
        if turns_taken >= self.horizon:
            return None
        return turns_taken // len(self.order), self.order[turns_taken % len(self.order)]

    def opens_round(self, turns_taken: int) -> bool:
        """Whether the next turn is the first of a round: the moment at which an environment speaks."""
        return turns_taken < self.horizon and turns_taken % len(self.order) == 0


def visible(turns: Sequence[Turn], agent: Agent, round: int) -> tuple[Turn, ...]:
    """The turns this agent sees when it speaks in this round; a blind agent sees none of the current round."""
    if agent.sees == "blind":
        return tuple(t for t in turns if t.round < round)
    return tuple(turns)


def team_answer(turns: Sequence[Turn], rule: str, extract: Callable[[str], str | None] | None = None) -> str:
    """The team's answer: the last message, a named agent's last, or the most frequent among the agents' last
    messages (of equally frequent ones, the one said first).

    ``extract`` finds the answer in a message, so that a majority is one of answers, not of wordings.
    """
    if not turns:
        return ""
    if rule == "last":
        return turns[-1].text
    if rule == "majority":
        last = {turn.agent: turn.text.strip() for turn in turns}
        votes = {agent: extract(text) if extract else text for agent, text in last.items()}
        stated = [vote for vote in votes.values() if vote is not None]
        if not stated:
            return next(iter(last.values()))
        winner = Counter(stated).most_common(1)[0][0]
        return next(last[agent] for agent, vote in votes.items() if vote == winner)
    for turn in reversed(turns):
        if turn.agent == rule:
            return turn.text
    return ""
