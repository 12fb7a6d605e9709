"""Exact effects of an update of a tabular run, by enumeration and without the functions that diagnostics use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tabular_run import A_CLIP, NAMES, SEED, SPACE, TabularRun, histories
from teamtr.randomness import generator
from teamtr.theory.tabular import EpisodicStep, EpisodicTeam, kl
from teamtr.training.probe import PROBED_MESSAGES
from teamtr.types import Floats


@dataclass(frozen=True)
class GateCheck:
    """One update and the batch it was trained on, by the numbers of histories."""

    run: TabularRun
    update: dict[str, Any]

    @cached_property
    def agent(self) -> int:
        return NAMES.index(self.update["agent"])

    @cached_property
    def step(self) -> EpisodicStep:
        return self.run.step(self.update)

    def numbers(self, step: int) -> tuple[Floats, Floats]:
        """The agent's context and word in every episode of the batch of this step."""
        path = histories(self.run.batch(self.update["stage"], step))
        return path[:, self.agent], path[:, self.agent + 1] % SPACE.size

    def log_ratio(self, step: int) -> Floats:
        context, word = self.numbers(step)
        old, new = (team.logp[self.agent][0] for team in (self.step.old, self.step.new))
        return (new - old)[context, word]

    def advantages(self, step: int) -> tuple[Floats, Floats]:
        """Group-normalized advantages before and after clipping, computed independently."""
        returns = self.run.batch(self.update["stage"], step).returns_PG(1.0)
        mean, variance = returns.mean(axis=1, keepdims=True), returns.var(axis=1, keepdims=True)
        raw = np.where(variance > 0, (returns - mean) / np.sqrt(variance + 1e-6), 0.0)
        return raw.ravel(), np.clip(raw, -A_CLIP, A_CLIP).ravel()

    def surrogate(self, step: int) -> float:
        return float((np.expm1(self.log_ratio(step)) * self.advantages(step)[1]).mean())

    @cached_property
    def token_kl(self) -> Floats:
        """KL of the next token by context and prefix."""
        old, new = (team.token_logp[self.agent][0] for team in (self.step.old, self.step.new))
        return kl(old, new)

    @cached_property
    def positions(self) -> list[tuple[int, int, int]]:
        """(context, prefix, token) at every position of the probed messages, in their order."""
        context, word = self.numbers(self.update["step"])
        rng = generator(SEED, "probe", self.update["stage"], self.update["agent"])
        rows = np.sort(rng.permutation(len(context))[:PROBED_MESSAGES])
        places = {prefix: k for k, prefix in enumerate(SPACE.prefixes)}
        said = [(int(context[m]), SPACE.words[word[m]]) for m in rows]
        return [(h, places[tokens[:u]], tokens[u]) for h, tokens in said for u in range(len(tokens))]


def seen(run: TabularRun) -> list[GateCheck]:
    return [GateCheck(run, update) for update in run.updates]


def weights_of(start: EpisodicTeam, now: EpisodicTeam) -> tuple[Floats, Floats]:
    """(probability under ``start``, weight) of every conversation."""
    return start.visits[3][0], now.visits[3][0] / start.visits[3][0]


def variance(probability: Floats, value: Floats) -> float:
    mean = probability @ value
    return float(probability @ (value - mean) ** 2)


def return_error(team: EpisodicTeam, episodes: int) -> float:
    """Standard error of the mean reward if all problems are played equally often, from the variance within problems."""
    law, rewards, own = team.visits[3][0], team.reward_BN[0], np.arange(3 * SPACE.size**3) // SPACE.size**3
    within = [variance(law[own == x] * 3, rewards[own == x]) for x in range(3)]
    return float(np.sqrt(np.mean(within) / episodes))
