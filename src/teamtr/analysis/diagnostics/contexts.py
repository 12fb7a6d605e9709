"""Reductions of contexts to forms that repeat: D_occ for free text (app:exp:scaling counts hashed contexts).

Free text never repeats word for word, so contexts are reduced to the statements in them. Each form is a function of the
context, and a function cannot increase the total variation between two distributions: that of a reduced form is a lower
bound of that of the contexts. From the finest to the coarsest:

    identity     the token ids that the agent saw
    statements   each author's statement: the boxed answer, else the whole message if it is short, else the last number
    agreement    which statements agree: each statement as the index of the first equal one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from teamtr.batches import RolloutBatch
from teamtr.grading.answers import last_number, normalize
from teamtr.team import Agent, visible
from teamtr.types import conversation

SHORT = 40
"""Maximum length in characters of a message that is its own statement."""
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


@dataclass(frozen=True)
class Heard:
    """One context in which an agent spoke: the problem, the tokens it saw, and (author, text) of each message in it."""

    problem: str
    context: bytes
    said: tuple[tuple[str, str], ...]


def heard_by(agent: Agent, batch: RolloutBatch) -> tuple[Heard, ...]:
    """Every context in which this agent spoke, restricted to the messages visible to it."""
    found = []
    for e, episode in enumerate(batch.episodes):
        for t, turn in enumerate(episode.turns):
            if turn.agent == agent.name:
                seen = visible(episode.turns[:t], agent, turn.round)
                said = conversation(seen, episode.replies[: turn.round + 1])
                problem = batch.problems[e // batch.group_size].id
                texts = tuple((message.author, message.text) for message in said)
                found.append(Heard(problem, turn.context_ids.tobytes(), texts))
    return tuple(found)


def statement(text: str) -> str:
    """The statement of a message; empty if none is recognized."""
    boxed = _BOXED.findall(text)
    if boxed:
        return normalize(boxed[-1])
    if len(text) <= SHORT:
        return normalize(text)
    number = last_number(text)
    return "" if number is None else str(number)


def by_identity(heard: Heard) -> Hashable:
    return heard.context


def by_statements(heard: Heard) -> Hashable:
    return heard.problem, tuple((author, statement(text)) for author, text in heard.said)


def by_agreement(heard: Heard) -> Hashable:
    stated = [statement(text) for _, text in heard.said]
    return heard.problem, tuple(
        (author, stated.index(said)) for (author, _), said in zip(heard.said, stated, strict=True)
    )


FORMS: dict[str, Callable[[Heard], Hashable]] = {
    "identity": by_identity,
    "statements": by_statements,
    "agreement": by_agreement,
}


def finest_repeating(shares: Sequence[tuple[str, float]], least: float = 0.5) -> str | None:
    """The first form in which at least ``least`` of the contexts repeat, from (form, share that repeats)."""
    return next((form for form, repeated in shares if repeated >= least), None)
