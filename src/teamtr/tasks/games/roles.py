"""Roles: a blind round in which exactly one of n agents must volunteer.

The agents are alike, see nothing of each other's message, and must still divide roles: the task on which training
from stale episodes hurts most (``teamtr lab roles``). Its problems have no content, so the test split
differs from the training split in name only.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np

from teamtr.errors import UserError
from teamtr.tasks.games.code_exchange import FormatExample
from teamtr.types import Problem, Verdict


class Roles:
    """ "1" volunteers, "0" does not; the last message of each agent counts.

    Args:
        agents: how many, named ``a1`` ... ``an``.
        tags: with more than one, prompts carry one of this many letters that mean nothing.
        train: problems in the training split.
        test: problems in the test split.
        volunteer_share: how often a format example says "1".
    """

    reward_range: float | None = 1.0
    VOLUNTEER = "1"
    ABSTAIN = "0"
    alphabet = "01"

    def __init__(
        self, agents: int = 5, tags: int = 1, train: int = 64, test: int = 16, volunteer_share: float = 0.5
    ) -> None:
        if agents < 2:
            raise ValueError(f"roles needs at least two agents, got {agents}")
        if not 1 <= tags <= len(string.ascii_lowercase):
            raise ValueError(f"tags is a number of letters from 1 to {len(string.ascii_lowercase)}, got {tags}")
        if train < 1 or test < 1:
            raise ValueError(f"roles needs at least one problem in each split, got train={train} and test={test}")
        if not 0 < volunteer_share < 1:
            raise ValueError(f"volunteer_share is strictly between 0 and 1, got {volunteer_share}")
        self.agents: tuple[str, ...] = tuple(f"a{k + 1}" for k in range(agents))
        self.warnings: tuple[str, ...] = ()
        self._volunteer_share = volunteer_share
        prompts = ["go?"] if tags == 1 else [f"go {letter}?" for letter in string.ascii_lowercase[:tags]]
        every = tuple(Problem(id=f"r{k}", prompt=prompts[k % tags]) for k in range(train + test))
        self._splits = {"train": every[:train], "test": every[train:]}

    def problems(self, split: str) -> Sequence[Problem]:
        if split not in self._splits:
            raise UserError(f"roles has no split {split!r}: use one of {sorted(self._splits)}")
        return self._splits[split]

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        """Looks at what every agent said; the team's answer as such means nothing here."""
        return [self._grade_one(problem, texts) for problem, _, texts in episodes]

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        """``count`` messages of the right form, the agents in turn, each a coin that looks at nothing."""
        train = self._splits["train"]
        return [
            (
                self.agents[i % len(self.agents)],
                train[rng.integers(len(train))],
                [],  # the round is blind
                self.VOLUNTEER if rng.random() < self._volunteer_share else self.ABSTAIN,
            )
            for i in range(count)
        ]

    def _grade_one(self, problem: Problem, texts: Sequence[str]) -> Verdict:
        if len(texts) < len(self.agents):
            raise ValueError(
                f"problem {problem.id}: roles needs a message of each of its {len(self.agents)} agents, got "
                f"{len(texts)}: let every agent speak in every round"
            )
        said = [text.strip() for text in texts[-len(self.agents) :]]
        if not set(said) <= {self.VOLUNTEER, self.ABSTAIN}:
            return Verdict("unparsed", 0.0)
        if said.count(self.VOLUNTEER) == 1:
            return Verdict("right", 1.0, "".join(said))
        return Verdict("wrong", 0.0, "".join(said))
