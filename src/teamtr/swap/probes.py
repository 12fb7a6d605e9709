"""Probes: contexts from the current team's own conversations in which the agent to be replaced speaks (app:align).

Every probe is a context and the old agent's message in it. The context is text, so it is rendered once for each agent,
with that agent's chat template; the message is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teamtr.batches import AgentBatch, RolloutBatch
from teamtr.errors import UserError
from teamtr.ports import Codec
from teamtr.randomness import generator, seed_of
from teamtr.rollout import play
from teamtr.session.build import Session
from teamtr.team import Agent, Team, visible
from teamtr.types import Ids, Message, Problem, Turn, conversation

GROUP = 4
"""Conversations per problem: enough for a surrogate, few enough to cover many problems."""

EXPLORING = 1.5
"""Temperature of additional probes. A trained team repeats itself; a higher temperature gives new contexts."""


@dataclass(frozen=True)
class Probes:
    """The same messages for both agents, row by row: ``old`` in the old agent's tokens, ``new`` in the new one's.

    ``exact``: both use the same token ids, so that a KL between them exists. ``held_out`` are the rows that alignment
    is not trained on: whole problems, if there are several. The first ``usual`` rows are from the first conversations;
    they are followed by conversations at a higher temperature for training, then by further ones for judging.
    """

    old: AgentBatch
    new: AgentBatch
    exact: bool
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    characters_M: NDArray[np.int64]
    usual: int


def play_probes(
    session: Session,
    team: Team,
    agent: str,
    problems: Sequence[Problem],
    probes: int,
    *,
    part: str,
    temperature: float | None = None,
) -> RolloutBatch:
    """Conversations of this team with at least ``probes`` messages of the agent, or fewer if it does not use all turns.

    ``part`` names the batch: it seeds the order of problems and the noise.
    """
    seed = session.team_file.seed
    turns = session.context.router.turns_of(agent)
    if turns == 0:
        raise UserError(f"agent {agent!r} never speaks under team.router; there is nothing to align it on")
    wanted = -(-probes // (turns * GROUP))
    rng = generator(seed, "swap", "problems", agent, part)
    order = np.concatenate([rng.permutation(len(problems)) for _ in range(-(-wanted // len(problems)))])[:wanted]
    drawn = [problems[i] for i in order]
    noise = seed_of(seed, "swap", "probes", agent, part)
    return play(session.context, team, drawn, GROUP, seed=noise, temperature=temperature)


def split_rows(cluster_M: NDArray[np.int64], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Selects the held-out rows: about this share of the problems, or of the messages if there is only one problem."""
    clusters = np.unique(cluster_M)
    if len(clusters) < 2:
        cluster_M = np.arange(len(cluster_M))
        clusters = cluster_M
    count = min(max(1, round(share * len(clusters))), len(clusters) - 1)
    return np.isin(cluster_M, rng.permutation(clusters)[:count])


def make_probes(
    batches: Sequence[RolloutBatch],
    agent: Agent,
    session: Session,
    *,
    exact: bool,
    probes: int,
    held_out: float,
    seed: int,
    judges: Sequence[RolloutBatch] = (),
) -> Probes:
    """Builds both agents' views of the messages; ``session`` is the new agent's.

    Of the first batch's first ``probes`` messages a part is held out. Further batches are entirely trained on, and
    ``judges`` entirely held out: choose their problems from ``problems_to_train`` and ``problems_held_out``.
    """
    batch = joined([*batches, *judges])
    learnt = sum(len(b.of(agent.name)) for b in batches)
    codec = session.context.codecs[agent.name]
    turns = list(_turns_of(batch, agent.name))
    messages = [turn.token_ids if exact else _respelt(codec, turn) for _, turn, _ in turns]
    first = len(batches[0].of(agent.name))
    spoken = [m for m, message in enumerate(messages) if len(message)]
    own = [m for m in spoken if m < first][:probes]
    if len(own) < 2:
        raise UserError(f"agent {agent.name!r} spoke {len(own)} times in the probes; raise --probes")
    rows = own + [m for m in spoken if m >= first]
    prompts = [
        session.context.prompt(session.team, agent, problem, heard)
        for problem, heard in (_heard(batch, agent, *turns[m]) for m in rows)
    ]
    old = batch.of(agent.name).rows(rows)
    new = AgentBatch(
        agent=agent.name,
        prompts=tuple(prompts),
        messages=tuple(messages[m] for m in rows),
        sampler_logprobs=old.sampler_logprobs,
        episode_M=old.episode_M,
        problem_M=old.problem_M,
        turn_M=old.turn_M,
        cluster_M=old.cluster_M,
    )
    held = np.zeros(len(rows), dtype=bool)
    held[: len(own)] = split_rows(old.cluster_M[: len(own)], held_out, generator(seed, "swap", "held out", agent.name))
    held |= np.array(rows) >= learnt
    characters = np.array([max(1, len(turns[m][1].text)) for m in rows], dtype=np.int64)
    return Probes(old, new, exact, np.flatnonzero(~held), np.flatnonzero(held), characters, usual=len(own))


def problems_to_train(batch: RolloutBatch, probes: Probes) -> list[Problem]:
    """The problems for additional training probes: none of the held-out problems, if there are several problems."""
    return [batch.problems[p] for p in np.unique(probes.old.cluster_M[probes.train])]


def problems_held_out(batch: RolloutBatch, probes: Probes) -> list[Problem]:
    return [batch.problems[p] for p in np.unique(probes.old.cluster_M[probes.held_out])]


def joined(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Concatenates several batches of one team."""
    return RolloutBatch(
        tuple(problem for batch in batches for problem in batch.problems),
        tuple(episode for batch in batches for episode in batch.episodes),
        batches[0].group_size,
    )


def _turns_of(batch: RolloutBatch, agent: str) -> Iterator[tuple[int, Turn, int]]:
    """(episode, turn, index of the turn in the episode), in the order of ``RolloutBatch.of``."""
    for e, episode in enumerate(batch.episodes):
        for t, turn in enumerate(episode.turns):
            if turn.agent == agent:
                yield e, turn, t


def _heard(batch: RolloutBatch, agent: Agent, e: int, turn: Turn, t: int) -> tuple[Problem, tuple[Message, ...]]:
    """The problem, and the conversation visible to the agent before this turn."""
    episode = batch.episodes[e]
    seen = visible(episode.turns[:t], agent, turn.round)
    return batch.problems[e // batch.group_size], conversation(seen, episode.replies[: turn.round + 1])


def _respelt(codec: Codec, turn: Turn) -> Ids:
    """The message in another tokenizer's ids; without an end token if it was cut."""
    ids = codec.encode_message(turn.text)
    return ids if turn.finish == "stop" else ids[:-1]
