"""The warm-up: supervised steps on worked examples before the first stage, within a budget of tokens.

An example is what an agent should say, given a prompt and the messages before it. It is rendered as in an episode, so
that the agent learns how to speak in this team. A step maximizes the likelihood of the completions through the same
port as every update: at the policy itself, the gradient of the ratio with an advantage of one is that of the
log-likelihood. There is no trust region, and the cost is counted separately.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from teamtr.batches import AgentBatch
from teamtr.errors import UserError
from teamtr.ports import Learner
from teamtr.progress import working
from teamtr.randomness import generator
from teamtr.reports import WarmupReport
from teamtr.session.build import Session
from teamtr.tasks.data.rows import DataError, Row, read_rows
from teamtr.text import shown
from teamtr.theory.objective import Objective
from teamtr.types import Ids, Message, Problem

OWN_EXAMPLES = 1500
"""Number of examples requested from a task that has its own."""
LOOKED_AT = 64
"""Number of examples whose likelihood is reported before and after."""
COLUMNS = ("agent", "prompt", "completion", "history", "private")

# At the policy itself every ratio is one: nothing is clipped, and the gradient is that of the log-likelihood.
_LIKELIHOOD = Objective(ratio="token", average_over="tokens")


@dataclass(frozen=True)
class _Example:
    """``where`` begins every error about the example. Without an ``agent``, it is for every trained agent."""

    where: str
    agent: str | None
    problem: Problem
    history: tuple[Message, ...]
    completion: str


def warm_up(session: Session) -> dict[str, WarmupReport]:
    """Train every agent on its examples, and publish the weights to the sampler; its optimizer then starts fresh. Empty
    if the team file requests no warm-up."""
    batches, found = examples_of(session), {}
    for name, batch in batches.items():
        found[name] = _warmed(session, batch, session.team_file.warmup.tokens // len(batches))
        session.engine.publish(name, session.engine.learner(name).version())
    return found


def examples_of(session: Session) -> dict[str, AgentBatch]:
    """The examples of each trained agent as tokens. Raises a UserError that names a row that cannot be used."""
    settings, team = session.team_file.warmup, session.team
    if settings.tokens == 0:
        return {}
    pairs: dict[str, list[tuple[Ids, Ids]]] = {}
    for example in _examples(session):
        for name in team.trainable if example.agent is None else (example.agent,):
            pairs.setdefault(name, []).append(_encoded(session, name, example))
    if not pairs:
        where = settings.path or f"the task {session.team_file.task.name}"
        raise UserError(f"warmup: {where} has no examples: give some in warmup.path, or set warmup.tokens: 0")
    batches = {name: _batch(name, pairs[name]) for name in team.names if name in pairs}
    share = settings.tokens // len(batches)
    for name, batch in batches.items():
        if (least := min(_sizes(batch))) > share:
            raise UserError(
                f"warmup.tokens is {settings.tokens}, {share} for each of {len(batches)} agents, and the shortest "
                f"example of {name!r} takes {least}: raise it to {least * len(batches)} or more"
            )
    return batches


def planned_steps(sizes: Sequence[int], batch: int, budget: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """The rows of every step: all examples in random order, repeated until the next one exceeds the budget."""
    drawn: list[int] = []
    left = budget
    while True:
        for row in rng.permutation(len(sizes)):
            if sizes[row] > left:
                return [np.array(drawn[k : k + batch]) for k in range(0, len(drawn), batch)]
            drawn.append(int(row))
            left -= sizes[row]


def _warmed(session: Session, batch: AgentBatch, budget: int) -> WarmupReport:
    settings, began = session.team_file.warmup, time.perf_counter()
    learner = session.engine.learner(batch.agent)
    rate = session.team_file.learner.learning_rate if settings.learning_rate is None else settings.learning_rate
    looked_at = batch.rows(np.arange(min(LOOKED_AT, len(batch))))
    before, loss_before = learner.snapshot(), _loss(learner, looked_at)
    draws = generator(session.team_file.seed, "warmup", batch.agent)
    steps = planned_steps(_sizes(batch), settings.batch, budget, draws)
    applied = 0
    with working(f"warming up {batch.agent}", len(steps), "steps") as work:
        for step, rows in enumerate(steps):
            now = rate * min(1.0, 2 * (1 - step / len(steps)))
            applied += _step(learner, batch.rows(rows), now)
            work.advance()
    if not applied:
        raise UserError(f"warmup: no step of {batch.agent!r} had a finite gradient: set learner.precision: fp32")
    after = learner.snapshot()
    learner.restore(before)  # also restores the optimizer, which then has no moments from the warm-up
    learner.move(before, after, 1.0)
    sizes = _sizes(batch)
    return WarmupReport(
        source=_named(settings.path) or session.team_file.task.name,
        examples=len(batch),
        steps=len(steps),
        tokens=sum(sizes[row] for rows in steps for row in rows),
        loss_before=loss_before,
        loss_after=_loss(learner, looked_at),
        seconds=time.perf_counter() - began,
    )


def _named(path: str | None) -> str | None:
    """The name of a file without its path: where it was when the run began is of no use later."""
    return path if path is None or not Path(path).is_absolute() else Path(path).name


def _step(learner: Learner, part: AgentBatch, learning_rate: float) -> bool:
    learner.begin(part)
    try:
        everything = np.arange(len(part))
        ones = np.ones(len(part))
        return learner.step(everything, ones, _LIKELIHOOD, beta=0.0, learning_rate=learning_rate).applied
    finally:
        learner.end()


def _loss(learner: Learner, batch: AgentBatch) -> float:
    """Nats per token of the completions, at the training temperature."""
    logp_M = learner.begin(batch)
    learner.end()
    return float(-logp_M.sum() / batch.lengths_M.sum())


def _sizes(batch: AgentBatch) -> list[int]:
    """Tokens of every example: prompt and completion."""
    return [len(prompt) + len(message) for prompt, message in zip(batch.prompts, batch.messages, strict=True)]


def _batch(agent: str, pairs: Sequence[tuple[Ids, Ids]]) -> AgentBatch:
    places = np.arange(len(pairs))
    return AgentBatch(
        agent,
        tuple(prompt for prompt, _ in pairs),
        tuple(message for _, message in pairs),
        tuple(np.zeros(len(message), np.float32) for _, message in pairs),
        episode_M=places,
        problem_M=places,
        turn_M=np.zeros(len(pairs), np.int64),
    )


# -- examples -------------------------------------------------------------------------------------------------


def _examples(session: Session) -> Iterator[_Example]:
    path = session.team_file.warmup.path
    if path is not None:
        for row in read_rows(path):
            yield _of_row(session, row)
        return
    told = session.task.format_examples(generator(session.team_file.seed, "form"), OWN_EXAMPLES)
    trained = set(session.team.trainable)
    for number, (agent, problem, history, text) in enumerate(told, start=1):
        if agent in trained:
            said = tuple(Message(author, words) for author, words in history)
            yield _Example(f"example {number} of the task", agent, problem, said, text)


def _of_row(session: Session, row: Row) -> _Example:
    cells, team = row.cells, session.team
    if unknown := sorted(cells.keys() - set(COLUMNS)):
        raise DataError(f"{row.where}: a column {unknown[0]!r}; an example has {', '.join(COLUMNS)}")
    for column in ("prompt", "completion"):
        if not isinstance(cells.get(column), str):
            raise DataError(f"{row.where}: {column!r} must be text, found {shown(cells.get(column))}")
    agent, private = cells.get("agent"), cells.get("private")
    if agent is not None and agent not in team.trainable:
        why = "is frozen and learns nothing" if agent in team.names else "is no agent of the team"
        raise DataError(f"{row.where}: {shown(agent)} {why}; trained are {', '.join(team.trainable)}")
    if private is not None and (agent is None or not isinstance(private, str)):
        raise DataError(f"{row.where}: 'private' is text for one agent: give 'agent' too")
    own = {} if private is None else {str(agent): str(private)}
    problem = Problem(id=row.where, prompt=cells["prompt"], private=own)
    history = tuple(_said(row, entry) for entry in cells.get("history") or ())
    known = session.context.speakers(team, problem)
    if strange := [message.author for message in history if message.author not in known]:
        raise DataError(f"{row.where}: {shown(strange[0])} in 'history' never speaks; who does: {', '.join(known)}")
    return _Example(row.where, agent, problem, history, cells["completion"])


def _said(row: Row, entry: object) -> Message:
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("agent", "text")):
        raise DataError(f"{row.where}: 'history' is a list of {{agent, text}}, found {shown(entry)}")
    return Message(entry["agent"], entry["text"])


def _encoded(session: Session, name: str, example: _Example) -> tuple[Ids, Ids]:
    agent, codec = session.team[name], session.context.codecs[name]
    prompt = session.context.prompt(session.team, agent, example.problem, example.history)
    message = codec.encode_message(example.completion)
    if len(message) > agent.max_tokens:
        raise DataError(
            f"{example.where}: the completion takes {len(message)} tokens of {name!r}, who may write "
            f"{agent.max_tokens}: raise max_tokens, or shorten it"
        )
    positions = session.engine.info(name).positions
    if positions is not None and len(prompt) + len(message) > positions:
        raise DataError(
            f"{example.where}: {len(prompt) + len(message)} tokens, and the model of {name!r} has {positions} positions"
        )
    return prompt, message
