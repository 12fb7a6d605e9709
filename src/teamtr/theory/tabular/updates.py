"""Updates of one agent of a solved team, scaled so that the expected KL is the radius."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from teamtr.theory.tabular.discounted import DiscountedTeam
from teamtr.theory.tabular.episodic import EpisodicTeam
from teamtr.theory.tabular.messages import Ints, log_softmax
from teamtr.types import Floats

LOGIT_BOUND = 300.0
"""No update moves a logit further than this: beyond it a probability leaves the range of float64."""


def scale_to_radius(logits: Floats, direction: Floats, weight: Floats, radius_B: Floats) -> Floats:
    """The step length c_B at which the expected KL from ``logits`` to ``logits + c * direction`` is the radius.

    ``logits`` and ``direction`` are (B, ..., V), ``weight`` (B, ...) holds how often each row of tokens is used. The
    expected KL is D(c) = sum of weight * (lse(l + c u) - lse(l) - c p.u), convex and increasing in c >= 0: bisection
    of log c encloses the answer, and a few secant steps of log D against log c, almost a straight line, finish it to
    twelve digits. At most the length that moves some logit by ``LOGIT_BOUND``, where the radius is out of reach.
    """
    batch, vocabulary = len(logits), logits.shape[-1]
    logp, u = log_softmax(logits).reshape(batch, -1, vocabulary), direction.reshape(batch, -1, vocabulary)
    w = weight.reshape(batch, -1)
    mean_u = np.einsum("brv,brv->br", np.exp(logp), u)

    def excess(x_B: Floats) -> Floats:
        """log D(exp(x)) - log radius."""
        c_B = np.exp(x_B)
        exponent = logp + c_B[:, None, None] * u
        top = exponent.max(axis=-1)
        lse = top + np.log(np.exp(exponent - top[..., None]).sum(axis=-1))
        kl_B = np.einsum("br,br->b", w, np.maximum(lse - c_B[:, None] * mean_u, 0.0))
        return np.asarray(np.log(np.maximum(kl_B, 1e-300)) - np.log(radius_B))

    longest_B = np.log(LOGIT_BOUND) - np.log(np.maximum(np.abs(u).max(axis=(1, 2)), 1e-100))
    low_B, high_B = longest_B - 28.0, longest_B
    for _ in range(12):
        middle_B = 0.5 * (low_B + high_B)
        inside_B = excess(middle_B) <= 0.0
        low_B, high_B = np.where(inside_B, middle_B, low_B), np.where(inside_B, high_B, middle_B)
    x_B, y_B = low_B, excess(low_B)
    next_B, next_y_B = high_B, excess(high_B)
    for _ in range(3):
        slope_B = np.where(
            np.abs(next_B - x_B) > 1e-15, (next_y_B - y_B) / np.where(next_B == x_B, 1.0, next_B - x_B), 2
        )
        better_B = np.clip(next_B - next_y_B / np.maximum(slope_B, 0.1), low_B, high_B)
        x_B, y_B, next_B = next_B, next_y_B, better_B
        next_y_B = excess(next_B)
    return np.exp(next_B)


UPDATES = ("random", "natural", "gradient", "against", "flip", "unseen")
"""Kinds of update: a random direction; the natural and the plain policy gradient; down the natural gradient; towards
one message everywhere, by 5 to 40 in the logits, whatever the KL; a random direction that is stronger the rarer the
state, so that the radius does not see most of it."""


def _update_directions(
    rng: np.random.Generator, kind_B: Ints, token_advantage: Floats, reach: Floats, row_weight: Floats
) -> Floats:
    """One direction (B, rows, K, V) per team by its kind. ``row_weight`` (B, rows) is how often a row is used."""
    noise = rng.standard_normal(token_advantage.shape)
    target = rng.integers(token_advantage.shape[-1], size=token_advantage.shape[:-1])
    flip = np.eye(token_advantage.shape[-1])[target]
    weight = (row_weight[:, :, None] * reach)[..., None]
    rare = noise / (row_weight[:, :, None, None] + 1e-3)
    return np.asarray(
        np.select(
            [kind_B[:, None, None, None] == k for k in range(len(UPDATES))],
            [noise, token_advantage, token_advantage * weight, -token_advantage, flip, rare],
        )
    )


def _step_length(
    rng: np.random.Generator, kind_B: Ints, logits: Floats, direction: Floats, weight: Floats, radius_B: Floats | None
) -> Floats:
    if radius_B is None:
        drawn_B = 10.0 ** rng.uniform(-5.0, 0.5, size=len(logits))
        far_B = rng.uniform(5.0, 40.0, size=len(logits))
        exact_B = scale_to_radius(logits, direction, weight, drawn_B)
        return np.where(kind_B == UPDATES.index("flip"), far_B, exact_B)
    return scale_to_radius(logits, direction, weight, radius_B)


def update_discounted(
    rng: np.random.Generator,
    team: DiscountedTeam,
    agent: int,
    *,
    kinds: Sequence[str] = UPDATES,
    radius_B: Floats | None = None,
) -> DiscountedTeam:
    """One agent moved along a direction of a random kind per team.

    With ``radius_B``, exactly to that D_tok (eq:tr); without, to a radius between 1e-5 and 3, or, for flips, by a
    length that ignores the radius.
    """
    space, size = team.space, len(team.gamma_B)
    kind_B = np.array([UPDATES.index(kind) for kind in kinds])[rng.integers(len(kinds), size=size)]
    own_BS = team.active_BS == agent
    used_BS = team.occupancy_BS * own_BS
    # Sums over the states that share a row.
    row_BSR = np.eye(used_BS.shape[1])[team.row_BS]
    mass_BRKV = np.einsum("bsr,bskv->brkv", row_BSR, space.token_mass(used_BS[..., None] * team.policy_BSA))
    earned_BSA = used_BS[..., None] * team.policy_BSA * team.advantage_BSA
    earned_BRKV = np.einsum("bsr,bskv->brkv", row_BSR, space.token_mass(earned_BSA))
    token_advantage = earned_BRKV / np.maximum(mass_BRKV, 1e-300)
    weight_BRK = mass_BRKV.sum(axis=-1)
    row_weight_BR = np.einsum("bsr,bs->br", row_BSR, used_BS)
    reach_BRK = weight_BRK / np.maximum(row_weight_BR[:, :, None], 1e-300)
    direction = _update_directions(rng, kind_B, token_advantage, reach_BRK, row_weight_BR)
    direction *= own_BS[:, :, None, None]
    length_B = _step_length(rng, kind_B, team.logits_BSKV, direction, weight_BRK, radius_B)
    return team.replace_agent(agent, team.logits_BSKV + length_B[:, None, None, None] * direction)


def update_episodic(
    rng: np.random.Generator,
    team: EpisodicTeam,
    agent: int,
    *,
    kinds: Sequence[str] = UPDATES,
    radius_B: Floats | None = None,
) -> EpisodicTeam:
    """One agent moved along a direction of a random kind per team; see ``update_discounted``.

    The radius is the mean KL of a message of this agent: nats per message, as in training.
    """
    space, size = team.space, len(team.start_BX)
    kind_B = np.array([UPDATES.index(kind) for kind in kinds])[rng.integers(len(kinds), size=size)]
    logits_BRKV = team.logits_BnRKV[:, agent]
    mass_BRA, earned_BRA = np.zeros((2, *logits_BRKV.shape[:2], space.size))
    for t in range(team.horizon):
        used_BNA = (team.visits[t] * (team.active[t] == agent))[..., None] * team.policies[t]
        _add_to_rows(mass_BRA, team.rows[t], used_BNA)
        _add_to_rows(earned_BRA, team.rows[t], used_BNA * team.advantages[t])
    mass_BRKV = space.token_mass(mass_BRA)
    token_advantage = space.token_mass(earned_BRA) / np.maximum(mass_BRKV, 1e-300)
    messages_B = np.maximum(mass_BRA.sum(axis=(1, 2)), 1e-300)  # expected messages of the agent in an episode
    weight_BRK = mass_BRKV.sum(axis=-1) / messages_B[:, None, None]
    row_weight_BR = mass_BRA.sum(axis=-1)
    reach_BRK = mass_BRKV.sum(axis=-1) / np.maximum(row_weight_BR[:, :, None], 1e-300)
    direction = _update_directions(rng, kind_B, token_advantage, reach_BRK, row_weight_BR)
    length_B = _step_length(rng, kind_B, logits_BRKV, direction, weight_BRK, radius_B)
    return team.replace_agent(agent, logits_BRKV + length_B[:, None, None, None] * direction)


def _add_to_rows(total_BRA: Floats, rows_N: Ints, values_BNA: Floats) -> None:
    """Add each history's values to its policy row, in place."""
    first, count = int(rows_N.min()), int(rows_N.max() - rows_N.min()) + 1
    if count == len(rows_N):  # every history has its own row, in order
        total_BRA[:, first : first + count] += values_BNA
    else:
        total_BRA[:, first : first + count] += np.eye(count)[rows_N - first].T @ values_BNA
