"""What an agent has heard, in a form that can repeat: D_occ for free text (app:exp:scaling counts hashed contexts).

Free text never repeats word for word, so its contexts are reduced to what was stated in them. Each form is a function
of the context, and a function cannot make two laws easier to tell apart: the total variation of a reduced form is at
most that of the contexts themselves. From the finest to the coarsest:

    identity     the token ids that the agent saw
    statements   who stated what: the boxed answer, else a short message as it is, else the last number
    agreement    who agrees with whom: each statement as the first place where the same was stated
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
"""Characters up to which a message is its own statement."""
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


@dataclass(frozen=True)
class Heard:
    """One context in which an agent spoke: the problem, the tokens it saw, and (author, text) of what was said."""

    problem: str
    context: bytes
    said: tuple[tuple[str, str], ...]


def heard_by(agent: Agent, batch: RolloutBatch) -> tuple[Heard, ...]:
    """Every context in which this agent spoke, as far as it could see."""
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
    """What a message states; empty when it states nothing that can be recognised."""
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
    """Of (form, share of contexts that repeat), finest first: the first of which at least this share repeats."""
    return next((form for form, repeated in shares if repeated >= least), None)
