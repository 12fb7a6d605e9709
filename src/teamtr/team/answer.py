"""Chooses the team's answer from its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from teamtr.types import Turn


def team_answer(turns: Sequence[Turn], rule: str, extract: Callable[[str], str | None] | None = None) -> str:
    """The team's answer: the last message, a named agent's last, or the most frequent among the agents' last
    messages (ties go to the agent that spoke first).

    ``extract`` finds the answer in a message, so that a majority is over answers, not over wordings.
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
