"""Estimate of a run's tokens and seconds on this machine, from a few episodes of the actual team. Seconds follow the
rates of the device if they are known, and otherwise those of these episodes and of scoring them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import ceil

from teamtr.session.build import Session
from teamtr.session.checks import Floor, measure_floors
from teamtr.session.forecast import Spoken, forecast_here
from teamtr.session.memory import WORDS_OF_A_LINE
from teamtr.session.success import planned_evaluations
from teamtr.session.trial import Trial

BACKWARD = 2
"""Duration of a step's backward pass, in forward passes."""
OTHER_PASSES = 2
"""Forward passes over every message besides those of training: before the update, and by the gate."""


@dataclass(frozen=True)
class Scoring:
    """The cost of measuring the noise floors."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Sampled tokens and seconds, including evaluations. ``least`` is for a run that samples once per stage, ``most``
    for one that samples before every update; they differ only if the plan decides this during the run. ``seconds`` are
    None if no agent said anything, or if neither the rates of the device are known nor anything was scored."""

    least_tokens: int
    most_tokens: int
    least_seconds: float | None
    most_seconds: float | None
    open_ended: bool = False
    """Dynamic sampling may sample more than ``most``."""
    card: str | None = None
    """The card whose rates determine the seconds; None: the rates of the few episodes, which are too slow for a whole
    batch."""


def timed_floors(session: Session, trial: Trial) -> tuple[list[Floor], Scoring]:
    """Measures the noise floors, and how many tokens were scored in how many seconds."""
    began, before = time.perf_counter(), _scored(session)
    floors = measure_floors(session, trial)
    return floors, Scoring(_scored(session) - before, time.perf_counter() - began)


def _scored(session: Session) -> int:
    return sum(session.engine.learner(name).tokens["scored"] for name in session.team.trainable)


def _typical(session: Session, trial: Trial) -> dict[str, Spoken]:
    """How each agent spoke on average; agents that said nothing are left out."""
    said, answered, turns = defaultdict[str, list[int]](list), Counter[str](), Counter[str]()
    for episode in trial.batch.episodes:
        turns.update(agent for agent, _ in {(turn.agent, turn.round) for turn in episode.turns})
        for turn in episode.turns:
            said[turn.agent].append(len(turn.token_ids))
            encode = session.context.codecs[turn.agent].encode_message
            answered[turn.agent] += sum(len(encode(result.text)) + WORDS_OF_A_LINE for result in turn.results)
    return {
        agent: Spoken(
            message=ceil(sum(tokens) / len(tokens)),
            steps=ceil(len(tokens) / turns[agent]),
            results=ceil(answered[agent] / len(tokens)),
        )
        for agent, tokens in said.items()
    }


def estimate(session: Session, trial: Trial, scoring: Scoring) -> Estimate:
    """Extrapolates from the trial, as if every episode of the run were like its episodes: too low if messages grow."""
    plan, names, ledger = session.plan, session.team.trainable, trial.ledger
    episodes = len(trial.batch.episodes)
    tokens = sum(ledger.sampled_tokens.values()) / episodes
    batches, (evaluated, times) = plan.batches(len(names)), planned_evaluations(session)
    fewest, most = (1, len(names)) if batches is None else (batches, batches)
    per_batch = plan.problems * plan.group_size
    played = [plan.stages * count * per_batch + evaluated * times for count in (fewest, most)]
    found = Estimate(round(played[0] * tokens), round(played[1] * tokens), None, None, plan.dynamic_sampling.on)
    apart = [count * (ledger.grading_seconds + ledger.environment_seconds) / episodes for count in played]
    typical = _typical(session, trial)
    prediction = forecast_here(session, typical) if typical else None
    if prediction is not None:
        batch = prediction.phases["sample"].seconds  # of one batch if the plan decides during the run
        computed = [prediction.run_seconds + plan.stages * (count - fewest) * batch for count in (fewest, most)]
        card = prediction.setup.cluster.card.name
        return replace(found, least_seconds=computed[0] + apart[0], most_seconds=computed[1] + apart[1], card=card)
    if not scoring.tokens:
        return found
    sampling = sum(ledger.seconds.values()) / episodes
    own = [trial.batch.of(name) for name in names]
    read = sum(len(ids) for each in own for ids in (*each.prompts, *each.messages)) / episodes
    passes = OTHER_PASSES + (1 + BACKWARD) * session.optimization.epochs
    learning = plan.stages * per_batch * read * passes * scoring.seconds / scoring.tokens
    seconds = [count * sampling + more + learning for count, more in zip(played, apart, strict=True)]
    return replace(found, least_seconds=seconds[0], most_seconds=seconds[1])
