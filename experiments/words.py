"""Roles in words, for models that can write: exactly one of n agents, who hear nothing of each other, must say Yes."""

from __future__ import annotations

from dataclasses import replace

from teamtr.tasks import Roles

QUESTION = "Do you say Yes?"
SYSTEM_PROMPT = (
    "You are one of {agents} agents who cannot hear each other. Answer with one word, Yes or No. "
    "You win together if exactly one of you says Yes."
)
"""Under it Qwen2.5-Coder-1.5B-Instruct says Yes with probability 0.50 and No with 0.49."""


class Words(Roles):
    """ "Yes" volunteers, "No" does not. Success is exact, as in ``roles``: from the agents' own probabilities."""

    VOLUNTEER, ABSTAIN = "Yes", "No"

    def __init__(self, agents: int = 8) -> None:
        super().__init__(agents)
        self._splits = {
            split: tuple(replace(problem, prompt=QUESTION) for problem in problems)
            for split, problems in self._splits.items()
        }
