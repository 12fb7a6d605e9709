"""Prediction of a stage on a cluster: seconds by phase, what bounds them, and whether it fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

from teamtr.engines.passes import lowered
from teamtr.planning.exchange import (
    call_seconds,
    checkpoint_seconds,
    exchange_seconds,
    gather_seconds,
)
from teamtr.planning.learning import LearnerCost, PassCount, gate_seconds, score_seconds, train_seconds
from teamtr.planning.memory import WorkerMemory, memory_of, tightest
from teamtr.planning.sampling import decoder_of, sample_seconds
from teamtr.planning.seconds import Load, Spent
from teamtr.planning.setup import Setup

PHASES = ("sample", "score", "train", "gate", "exchange", "gather", "calls", "checkpoint")


@dataclass(frozen=True)
class Prediction:
    """The predicted costs of a stage. ``micro_batch``: messages per pass that fit, which may be fewer than the settings
    say. ``groups``: the prediction of each group of workers, if there are groups; ``memory`` is that of the tightest
    one."""

    setup: Setup
    memory: WorkerMemory
    phases: Mapping[str, Spent]
    micro_batch: int
    sampled_tokens: int
    waves: int
    groups: tuple[Prediction, ...] = ()

    @property
    def spent(self) -> Spent:
        return reduce(add, self.phases.values())

    @property
    def seconds(self) -> float:
        return self.spent.seconds

    @property
    def run_seconds(self) -> float:
        """Seconds of all stages and evaluations, without startup and grading."""
        evaluated = sum(one._evaluation_seconds for one in self.groups or (self,))
        return self.setup.plan.stages * self.seconds + evaluated

    @property
    def _evaluation_seconds(self) -> float:
        episodes, times = self.setup.evaluated
        return sample_seconds(self.setup, self.memory.pages, episodes).seconds * times if episodes else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / self.seconds

    def as_record(self) -> dict[str, Any]:
        return {
            "stage_seconds": self.seconds,
            "run_seconds": self.run_seconds,
            "bound": self.spent.bound,
            "phases": {
                name: {"seconds": spent.seconds, "bound": spent.bound, "by": dict(spent.by)}
                for name, spent in self.phases.items()
            },
            "sampled_tokens": self.sampled_tokens,
            "sampled_tokens_per_second": self.tokens_per_s,
            "waves": self.waves,
            "micro_batch": self.micro_batch,
            "recomputed": [name for one in self.groups or (self,) for name in one.memory.plan.recomputed],
            "precision": {name: self.setup.precision(self.setup.member(name)) for name in self.setup.updated},
        }


def predict(setup: Setup, *, local: bool | None = None) -> Prediction:
    """Predicts a stage. ``local``: no worker is called; by default if there is one worker. Groups of workers compute
    one after the other."""
    local = setup.cluster.workers == 1 if local is None else local
    if not setup.cluster.groups:
        return _of_one_group(setup, local)
    groups = tuple(_of_one_group(one, local) for one in setup.by_group)
    return Prediction(
        setup,
        tightest(one.memory for one in groups),
        {phase: reduce(add, (one.phases[phase] for one in groups)) for phase in PHASES},
        min(one.micro_batch for one in groups),
        sum(one.sampled_tokens for one in groups),
        max(one.waves for one in groups),
        groups,
    )


def _of_one_group(setup: Setup, local: bool) -> Prediction:
    fitted, memory = fitting(setup)
    phases = _phases(fitted, memory, local)
    episodes = fitted.plan.problems * fitted.plan.group_size
    load = Load.sampled(fitted, episodes)
    waves = max(
        (
            decoder_of(fitted, turn.agent, memory.pages[turn.agent]).waves(turn, load.rows, fitted.plan.group_size)
            for turn in fitted.turns
        ),
        default=1,
    )
    said = fitted.batches * episodes * sum(turn.message for turn in fitted.turns)
    return Prediction(fitted, memory, phases, fitted.learning.micro_batch, said, waves)


def fitting(setup: Setup) -> tuple[Setup, WorkerMemory]:
    """The setup with a micro-batch that fits, lowered as a learner lowers it. Unchanged if none fits, and where it is
    never lowered: for workers in lockstep, and next to vLLM servers, where a run is refused instead."""
    asked = memory_of(setup)
    smaller, found = setup, asked
    lowers = not setup.cluster.shard_base and not asked.plan.taken
    while lowers and not found.fits and smaller.learning.micro_batch > 1:
        learning = replace(smaller.learning, micro_batch=lowered(smaller.learning.micro_batch))
        smaller = replace(smaller, learning=learning)
        found = memory_of(smaller)
    return (smaller, found) if found.fits else (setup, asked)


def _phases(setup: Setup, memory: WorkerMemory, local: bool) -> dict[str, Spent]:
    episodes = setup.plan.problems * setup.plan.group_size
    found = dict.fromkeys(PHASES, Spent())
    found["sample"] = sample_seconds(setup, memory.pages, episodes) * setup.batches
    for turn in setup.turns:
        if memory.pages[turn.agent] is not None:
            found["gather"] += gather_seconds(
                setup, setup.member(turn.agent), PassCount(setup.batches)
            )  # to fill the sampling copies
    for name in setup.updated:
        learner = LearnerCost(setup, setup.member(name), name in memory.plan.recomputed)
        for phase, seconds in (("score", score_seconds), ("train", train_seconds), ("gate", gate_seconds)):
            spent, passes = seconds(learner)
            found[phase] += spent
            found["gather"] += gather_seconds(setup, learner.member, passes)
        found["exchange"] += exchange_seconds(setup, learner.member)
        found["checkpoint"] += checkpoint_seconds(learner.member)
    found["calls"] = call_seconds(setup, local=local)
    return found
