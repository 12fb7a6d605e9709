"""A small team of tabular policies: two agents, three problems, and a reward that depends on all messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.tabular import TabularPolicy
from teamtr.presets import PRESETS, Plan
from teamtr.randomness import seed_of
from teamtr.rollout import RolloutContext, play
from teamtr.rollout.redraw import redraw
from teamtr.tasks import Task
from teamtr.team import Agent, Schedule, Team
from teamtr.training.batch import Optimization, TrainingBatch
from teamtr.training.update import Update, update_agent
from teamtr.types import Ids, Problem, Verdict

LETTERS = "..abcd"  # ids 0 and 1 end a message


class LetterCodec:
    """A codec whose message tokens are letters and whose prompt tokens are the characters of the text."""

    def encode(self, messages: Sequence[dict[str, str]]) -> Ids:
        return np.array([ord(c) for m in messages for c in m["content"]], dtype=np.int32)

    def encode_message(self, text: str) -> Ids:
        return np.array([*(LETTERS.index(c) for c in text), 0], dtype=np.int32)

    def decode(self, token_ids: Ids) -> str:
        return "".join(LETTERS[i] for i in token_ids if i > 1)


class SameLetter(Task):
    """Right if the first letters of both messages are the problem's letter; half a point for one of them."""

    reward_range = 1.0

    def __init__(self, reward=None) -> None:
        self.reward = reward

    def problems(self, split: str) -> list[Problem]:
        return [Problem(id=c, prompt=c, answer=c) for c in "abc"]

    def grade(self, episodes) -> list[Verdict]:
        verdicts = []
        for k, (problem, _, texts) in enumerate(episodes):
            value = sum(t[:1] == problem.answer for t in texts) / len(texts)
            if self.reward is not None:
                value = self.reward(k, value)
            verdicts.append(Verdict("right" if value == 1.0 else "wrong", value))
        return verdicts


class World:
    """Engine, context and team, and the two functions that the training loop takes."""

    def __init__(
        self,
        *,
        plan: Plan = PRESETS["teamtr"],
        radius: float = 0.01,
        learning_rate: float = 0.05,
        reward=None,
        names: Sequence[str] = ("x", "y"),
        rounds: int = 1,
    ):
        plan = replace(plan, radii=replace(plan.radii, nats=radius))
        self.plan = plan
        self.states = dict.fromkeys(names, plan.first_state())
        self.engine = LocalEngine(
            {
                n: PolicyLearner(
                    n,
                    TabularPolicy(6, end_ids=frozenset({0, 1}), rows=256, spread=0.3, seed=k),
                    micro_batch=64,
                    keep_initial=plan.objective.has_reference,
                    critic=plan.critic is not None,
                )
                for k, n in enumerate(names)
            }
        )
        self.context = RolloutContext(
            self.engine, {n: LetterCodec() for n in names}, Schedule.repeated(names, rounds), SameLetter(reward)
        )
        self.team = Team(tuple(Agent(n, self.engine.version(n), max_tokens=3) for n in names))
        self.optimization = Optimization(learning_rate=learning_rate)
        self.collected: list[tuple[str, int]] = []

    def collect(
        self, team: Team, step: int, worn: RolloutBatch | None = None, *, group: int = 16, stage: int = 0
    ) -> RolloutBatch:
        self.collected.append((team.version, step))
        if worn is not None:
            ends = {name: frozenset({0, 1}) for name in team.names}
            return redraw(self.context, team, worn, seed=seed_of(1, stage, step), end_ids=ends).batch
        return play(self.context, team, self.context.task.problems("train"), group, seed=seed_of(1, stage, step))

    def training_batch(self, agent: str, batch: RolloutBatch) -> TrainingBatch:
        returns_PG = batch.returns_PG(self.plan.gamma)
        return TrainingBatch(batch.of(agent), self.plan.advantage.estimate(returns_PG), returns_PG)

    def update(self, agent: str, data: TrainingBatch, *, seed: int = 0, **changes) -> Update:
        """One update of the agent. ``changes`` override values of the plan, or are keywords of ``update_agent``."""
        own = {name: changes.pop(name) for name in list(changes) if hasattr(self.plan, name)}
        optimization = changes.pop("optimization", self.optimization)
        update = update_agent(
            self.engine.learner(agent),
            data,
            replace(self.plan, **own),
            optimization,
            self.states[agent],
            seed=seed_of(seed, agent),
            **changes,
        )
        self.states[agent] = update.state
        return update
