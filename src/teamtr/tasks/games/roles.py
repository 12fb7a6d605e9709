"""Roles: a blind round in which exactly one of n agents must volunteer.

The agents are alike, do not see each other's messages, and must still divide roles: the task on which training
from stale episodes hurts most (``teamtr lab roles``). Its problems have no content, so the test split
differs from the training split in name only.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le
from pydantic import Strict

from teamtr.settings.refusals import Refusal
from teamtr.settings.section import key
from teamtr.tasks.base import FormatExample, Task
from teamtr.tasks.config import TaskConfig, TaskContext, TeamSection
from teamtr.tasks.registry import task
from teamtr.types import Problem, Verdict


@task("roles")
class Roles(Task):
    """ "1" volunteers, "0" does not; the last message of each agent counts.

    Args:
        agents: number of agents, named ``a1`` ... ``an``.
        tags: with more than one, prompts carry one of this many meaningless letters.
        train: problems in the training split.
        test: problems in the test split.
        volunteer_share: how often a format example says "1".
    """

    class Config(TaskConfig):
        """Roles: in a blind round, exactly one of n agents, called a1 to an, must volunteer."""

        tags: Annotated[int, Strict(), Ge(1), Le(26)] = key(1, "Number of different problems, distinguished by a tag.")

        def arguments(self, context: TaskContext) -> dict[str, Any]:
            return {"agents": len(context.agents), "tags": self.tags}

        def refusals_of(self, team: TeamSection) -> Iterator[Refusal]:
            """Names are a1, a2 and so on, and all must speak."""
            expected = {f"a{i + 1}" for i in range(max(len(team.agents), 2))}
            silent = sorted(expected - set(team.speaking_order))
            if set(team.names) != expected:
                message = f"task roles needs two or more agents called a1, a2 and so on, got {', '.join(team.names)}"
                yield Refusal(("team", "agents"), message, at_key=True)
            elif silent:
                message = f"task roles needs a message of every agent; team.router.order leaves out {', '.join(silent)}"
                yield Refusal(("team", "router", "order"), message)

    reward_range = 1.0
    VOLUNTEER: ClassVar[str] = "1"
    ABSTAIN: ClassVar[str | None] = "0"
    """None: every message that is not exactly ``VOLUNTEER`` abstains."""
    alphabet = "01"
    silence = "0"  # silent agents do not volunteer
    grades_conversation = True

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
        self.agents = tuple(f"a{k + 1}" for k in range(agents))
        self._volunteer_share = volunteer_share
        prompts = ["go?"] if tags == 1 else [f"go {letter}?" for letter in string.ascii_lowercase[:tags]]
        every = tuple(Problem(id=f"r{k}", prompt=prompts[k % tags]) for k in range(train + test))
        super().__init__({"train": every[:train], "test": every[train:]})

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        """Grade the messages of all agents; the team's answer is ignored."""
        return [self._grade_one(problem, texts) for problem, _, texts in episodes]

    def format_examples(self, rng: np.random.Generator, count: int) -> list[FormatExample]:
        """``count`` messages of the right form, from the agents in turn, each drawn regardless of the problem."""
        train = self._splits["train"]
        return [
            (
                self.agents[i % len(self.agents)],
                train[rng.integers(len(train))],
                [],  # the round is blind
                self.VOLUNTEER if rng.random() < self._volunteer_share else self.ABSTAIN or "",
            )
            for i in range(count)
        ]

    def _grade_one(self, problem: Problem, texts: Sequence[str]) -> Verdict:
        if len(texts) < len(self.agents):
            raise ValueError(
                f"problem {problem.id}: roles needs a message of each of its {len(self.agents)} agents, got "
                f"{len(texts)}: let every agent speak in every round"
            )
        said = list(texts[-len(self.agents) :])
        if self.ABSTAIN is not None:
            said = [text.strip() for text in said]
            if not set(said) <= {self.VOLUNTEER, self.ABSTAIN}:
                return Verdict("unparsed", 0.0)
        if said.count(self.VOLUNTEER) == 1:
            return Verdict("right", 1.0, "".join(said))
        return Verdict("wrong", 0.0, "".join(said))
