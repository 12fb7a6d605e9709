"""Random teams and stages, for checks over many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from teamtr.theory.tabular.discounted import DiscountedStage, DiscountedTeam
from teamtr.theory.tabular.episodic import NOBODY, EpisodicStage, EpisodicTeam
from teamtr.theory.tabular.messages import Ints, MessageSpace
from teamtr.theory.tabular.updates import UPDATES, update_discounted, update_episodic
from teamtr.types import Floats

Visibility = Literal["everything", "blind_round", "nothing"]
Router = Literal["cyclic", "addressed", "table"]
Rewards = Literal["sparse", "dense", "signed"]


def random_discounted_team(
    rng: np.random.Generator,
    size: int,
    *,
    agents: int,
    states: int,
    space: MessageSpace,
    router: Literal["cyclic", "table"] = "table",
    rewards: Rewards = "dense",
    aliased: bool = False,
    gamma_B: Floats | None = None,
) -> DiscountedTeam:
    """Random teams. Sharpness of the policies, sparsity of the transitions and gamma vary from team to team.

    ``router``: "table" draws a speaker per state; "cyclic" makes agents speak in turn (states of agent j lead to
    states of agent j + 1). ``aliased``: each agent tells its states apart only in pairs.
    """
    if router == "cyclic":
        active_BS = np.broadcast_to(np.arange(states) % agents, (size, states)).astype(np.int64)
    else:
        active_BS = rng.integers(agents, size=(size, states))
    concentration_B = rng.choice([0.05, 0.3, 1.0], size=size)
    transition = rng.gamma(concentration_B[:, None, None, None], size=(size, states, space.size, states)) + 1e-12
    if router == "cyclic":
        follows_BSS = active_BS[:, None, :] == (active_BS[:, :, None] + 1) % agents
        transition = transition * (follows_BSS | ~follows_BSS.any(axis=2, keepdims=True))[:, :, None, :]
    start = rng.gamma(rng.choice([0.1, 1.0], size=size)[:, None], size=(size, states)) + 1e-12
    row_BS = np.broadcast_to(np.arange(states), (size, states)).astype(np.int64)
    if aliased:
        same_BSS = active_BS[:, :, None] == active_BS[:, None, :]
        near_SS = np.arange(states)[:, None] // 2 == np.arange(states)[None, :] // 2
        row_BS = (same_BSS & near_SS).argmax(axis=2)
    return DiscountedTeam(
        space=space,
        agents=agents,
        logits_BSKV=_random_logits(rng, size, (states,), space),
        row_BS=row_BS,
        active_BS=active_BS,
        transition_BSAS=transition / transition.sum(axis=-1, keepdims=True),
        reward_BSA=_random_rewards(rng, (size, states, space.size), rewards),
        start_BS=start / start.sum(axis=-1, keepdims=True),
        gamma_B=rng.choice([0.05, 0.3, 0.5, 0.7, 0.9, 0.97], size=size) if gamma_B is None else gamma_B,
    )


def random_discounted_stage(
    rng: np.random.Generator,
    size: int,
    *,
    agents: int,
    states: int,
    space: MessageSpace,
    router: Literal["cyclic", "table"] = "table",
    rewards: Rewards = "dense",
    aliased: bool = False,
    kinds: Sequence[str] = UPDATES,
    radius: float | None = None,
) -> DiscountedStage:
    """A random team and one random update of each agent, in a random order."""
    team = random_discounted_team(
        rng, size, agents=agents, states=states, space=space, router=router, rewards=rewards, aliased=aliased
    )
    order = tuple(int(j) for j in rng.permutation(agents))
    radius_B = None if radius is None else np.full(size, radius)
    teams = [team]
    for agent in order:
        teams.append(update_discounted(rng, teams[-1], agent, kinds=kinds, radius_B=radius_B))
    return DiscountedStage(tuple(teams), order)


def random_episodic_team(
    rng: np.random.Generator,
    size: int,
    *,
    agents: int,
    horizon: int,
    space: MessageSpace,
    problems: int = 1,
    router: Router = "cyclic",
    visibility: Visibility = "everything",
    rewards: Rewards = "dense",
    stops: bool = False,
) -> EpisodicTeam:
    """Random teams of one shape.

    ``router``: "cyclic"; "addressed" (the last message names the next speaker); "table" (a speaker per history).
    ``visibility``: agents see the whole history, or not the current round of ``agents`` turns, or not even which
    turn it is. ``stops``: from the second turn on, some messages end the episode.
    """
    rows, active = _policy_rows(agents, horizon, space.size, problems, visibility), []
    address_BA = rng.integers(agents, size=(size, space.size))
    stopping_BA = rng.random((size, space.size)) < 0.3
    stopped_BN = np.zeros((size, problems), dtype=bool)
    for t in range(horizon):
        histories = problems * space.size**t
        if router == "cyclic":
            speaker_BN = np.full((size, histories), t % agents)
        elif router == "addressed" and t > 0:
            speaker_BN = np.tile(address_BA, (1, histories // space.size))
        else:
            speaker_BN = rng.integers(agents, size=(size, histories))
        active.append(np.where(stopped_BN, NOBODY, speaker_BN))
        stopped_BN = np.repeat(stopped_BN, space.size, axis=1)
        if stops and t >= 1:
            stopped_BN = stopped_BN | np.tile(stopping_BA, (1, histories))
    total_rows = 1 + max(int(rows_N.max()) for rows_N in rows)
    start = rng.gamma(1.0, size=(size, problems)) + 1e-12
    return EpisodicTeam(
        space=space,
        logits_BnRKV=_random_logits(rng, size, (agents, total_rows), space),
        rows=rows,
        active=tuple(active),
        start_BX=start / start.sum(axis=-1, keepdims=True),
        reward_BN=_random_rewards(rng, (size, problems * space.size**horizon), rewards),
    )


def random_episodic_stage(
    rng: np.random.Generator,
    size: int,
    *,
    agents: int,
    horizon: int,
    space: MessageSpace,
    problems: int = 1,
    router: Router = "cyclic",
    visibility: Visibility = "everything",
    rewards: Rewards = "dense",
    stops: bool = False,
    kinds: Sequence[str] = UPDATES,
    radius: float | None = None,
) -> EpisodicStage:
    """A random team and one random update of each agent, in a random order; ``radius`` in nats per message."""
    team = random_episodic_team(
        rng,
        size,
        agents=agents,
        horizon=horizon,
        space=space,
        problems=problems,
        router=router,
        visibility=visibility,
        rewards=rewards,
        stops=stops,
    )
    order = tuple(int(j) for j in rng.permutation(agents))
    radius_B = None if radius is None else np.full(size, radius)
    teams = [team]
    for agent in order:
        teams.append(update_episodic(rng, teams[-1], agent, kinds=kinds, radius_B=radius_B))
    return EpisodicStage(tuple(teams), order)


def _policy_rows(agents: int, horizon: int, messages: int, problems: int, visibility: Visibility) -> tuple[Ints, ...]:
    """Which row of its table the speaker uses in each history: one per thing that it can tell apart."""
    rows, used = [], 0
    for t in range(horizon):
        history_N = np.arange(problems * messages**t)
        if visibility == "nothing":
            rows.append(np.zeros_like(history_N))
            continue
        hidden = t % agents if visibility == "blind_round" else 0  # messages of the current round
        seen_N = history_N // messages**hidden
        rows.append(used + seen_N)
        used += int(seen_N.max()) + 1
    return tuple(rows)


def _random_logits(rng: np.random.Generator, size: int, rows: tuple[int, ...], space: MessageSpace) -> Floats:
    """Normal logits; their deviation, the sharpness, is one per team, from almost uniform to almost deterministic."""
    sharpness_B = rng.choice([0.1, 1.0, 2.5, 6.0], size=size)
    shape = (size, *rows, len(space.prefixes), space.vocabulary)
    return np.asarray(rng.standard_normal(shape) * sharpness_B.reshape(-1, *[1] * (len(shape) - 1)))


def _random_rewards(rng: np.random.Generator, shape: tuple[int, ...], rewards: Rewards) -> Floats:
    """Sparse: 1 with probability 0.15, at least once, else 0. Dense: uniform in [0, 1]. Signed: normal, any scale."""
    if rewards == "sparse":
        drawn = rng.random(shape)
        least = drawn.min(axis=tuple(range(1, len(shape))), keepdims=True)
        return np.asarray(((drawn < 0.15) | (drawn == least)).astype(np.float64))
    if rewards == "dense":
        return rng.random(shape)
    scale_B = 10.0 ** rng.uniform(-1.0, 1.0, size=shape[0])
    return np.asarray(rng.standard_normal(shape) * scale_B.reshape(-1, *[1] * (len(shape) - 1)))
