"""Roles in words, for models that can write: exactly one of n agents, who hear nothing of each other, must say Yes.

Whatever else an agent says counts as not saying Yes, so that a small model need not learn to say No first.
"""

from __future__ import annotations

from dataclasses import replace

from teamtr.tasks import Roles

QUESTION = "Do you say Yes?"
SYSTEM_PROMPT = (
    "You are one of {agents} agents who cannot hear each other. Answer with one word, Yes or No. "
    "You win together if exactly one of you says Yes."
)
"""Under it SmolLM2-135M-Instruct says Yes, and no more, with probability 0.12."""


class Words(Roles):
    """ "Yes" volunteers. Success is exact, as in ``roles``: from the agents' own probabilities."""

    VOLUNTEER, ABSTAIN = "Yes", None

    def __init__(self, agents: int = 8) -> None:
        super().__init__(agents)
        self._splits = {
            split: tuple(replace(problem, prompt=QUESTION) for problem in problems)
            for split, problems in self._splits.items()
        }
