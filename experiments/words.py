"""The game *roles* in words, for pretrained models: exactly one of n agents that do not see each other must say Yes.

Any other answer counts as not saying Yes, so that a small model need not learn to say No first.
"""

from __future__ import annotations

from dataclasses import replace

from teamtr.tasks import Roles

QUESTION = "Do you say Yes?"
SYSTEM_PROMPT = (
    "You are one of {agents} agents who cannot hear each other. Answer with one word, Yes or No. "
    "You win together if exactly one of you says Yes."
)
"""With this prompt SmolLM2-135M-Instruct answers exactly Yes with probability 0.12."""


class Words(Roles):
    """Answering "Yes" volunteers. As in ``roles``, success is exact, computed from the agents' probabilities."""

    VOLUNTEER, ABSTAIN = "Yes", None

    def __init__(self, agents: int = 8) -> None:
        super().__init__(agents)
        self._splits = {
            split: tuple(replace(problem, prompt=QUESTION) for problem in problems)
            for split, problems in self._splits.items()
        }
