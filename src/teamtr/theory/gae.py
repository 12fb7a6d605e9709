"""Advantages per token from a critic's values: generalized advantage estimation (arXiv 1506.02438) over one agent's
tokens.

An agent's tokens of one episode form a chain: the successor of each is the agent's next token, whatever others said in
between, and the return arrives at the last. Turns are discounted by gamma, as in ``discounted_return``; the tokens
within a message are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teamtr.types import Floats


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of an agent's messages from a critic. ``advantages``, ``targets`` and ``values`` have an array per
    message with a number per token; ``message_M`` is each message's return minus its first value, normalized alike.

    ``targets`` are the regression targets of the values, in units of reward: the advantages before normalization plus
    the values. Messages whose return is not finite have advantages of 0 and targets equal to their values.
    ``clip_rate`` is the share of the other tokens whose advantage was clipped, ``clip_error`` the mean of what was cut.
    """

    advantages: tuple[Floats, ...]
    targets: tuple[Floats, ...]
    values: tuple[Floats, ...]
    message_M: Floats
    clip_rate: float = 0.0
    clip_error: float = 0.0

    def explained_variance(self, rows: NDArray[np.int64]) -> float | None:
        """1 - Var(target - value) / Var(target) over the tokens of these messages: 1 for a perfect critic, 0 for one as
        good as a constant; None if all targets are equal."""
        target_N = np.concatenate([self.targets[m] for m in rows])
        spread = float(target_N.var())
        if not spread > 0.0:
            return None
        return 1.0 - float((target_N - np.concatenate([self.values[m] for m in rows])).var()) / spread

    def value_error(self, rows: NDArray[np.int64]) -> float:
        """Root mean square of target - value over the tokens of these messages."""
        gaps_N = np.concatenate([self.targets[m] - self.values[m] for m in rows])
        return float(np.sqrt(np.mean(gaps_N**2)))


def chain_advantages(values_T: Floats, discounts_T: Floats, final: float, lam: float) -> Floats:
    """GAE over one chain: A_t = delta_t + discount_t * lam * A_{t+1}, delta_t = discount_t * V_{t+1} - V_t.

    ``discounts_T[t]`` is the discount from t to t + 1; the last entry is not used: after the last token comes
    ``final``, discounted to that token. ``lam`` 0 is the one-step error, 1 the return minus the value.
    """
    values, discounts = values_T.tolist(), discounts_T.tolist()
    advantage = final - values[-1]
    found = [advantage]
    for t in range(len(values) - 2, -1, -1):
        advantage = discounts[t] * (values[t + 1] + lam * advantage) - values[t]
        found.append(advantage)
    return np.array(found[::-1])


def token_advantages(
    values: Sequence[Floats],
    episode_M: NDArray[np.int64],
    turn_M: NDArray[np.int64],
    returns_E: Floats,
    *,
    gamma: float,
    lam: float,
    normalize: bool,
    clip: float,
    eps: float,
) -> TokenAdvantages:
    """Advantages and targets of the messages of one agent.

    Args:
        values: the critic's value before each token of each message.
        returns_E: discounted to the start of the episode, as the plan trains on them.
        normalize: subtract the mean over the batch's tokens and divide by sqrt(variance + eps).
        clip: advantages are clipped to this size; inf does not clip.
    """
    values = [np.asarray(value_T, dtype=np.float64) for value_T in values]
    advantages, targets = [np.zeros(len(v)) for v in values], [v.copy() for v in values]
    message_M = np.zeros(len(values))
    finite_M = np.isfinite(returns_E[episode_M])
    order = np.lexsort((turn_M, episode_M))
    for own in np.split(order, np.flatnonzero(np.diff(episode_M[order])) + 1):
        if not len(own) or not finite_M[own[0]]:
            continue
        lengths = [len(values[m]) for m in own]
        values_T, turns_T = np.concatenate([values[m] for m in own]), np.repeat(turn_M[own], lengths)
        discounts_T = gamma ** np.diff(turns_T, append=turns_T[-1]).astype(np.float64)
        start = float(returns_E[episode_M[own[0]]])  # at the episode's first turn
        final = start / gamma ** int(turns_T[-1])
        chain_T = chain_advantages(values_T, discounts_T, final, lam)
        cuts = np.cumsum(lengths)[:-1]
        for m, advantage_T in zip(own, np.split(chain_T, cuts), strict=True):
            advantages[m], targets[m] = advantage_T, advantage_T + values[m]
            message_M[m] = start / gamma ** int(turn_M[m]) - values[m][0]
    cut_N = np.zeros(0)
    if finite_M.any():
        message_M = _normalized(message_M, message_M[finite_M], finite_M, normalize, clip, eps)
        token_N = np.concatenate([advantages[m] for m in np.flatnonzero(finite_M)])
        plain_N = _normalized(token_N, token_N, np.ones(len(token_N), dtype=np.bool_), normalize, np.inf, eps)
        cut_N = np.maximum(np.abs(plain_N) - clip, 0.0)
        advantages = [
            _normalized(advantage_T, token_N, np.full(len(advantage_T), finite), normalize, clip, eps)
            for advantage_T, finite in zip(advantages, finite_M, strict=True)
        ]
    return TokenAdvantages(
        tuple(advantages),
        tuple(targets),
        tuple(values),
        message_M,
        clip_rate=float((cut_N > 0.0).mean()) if len(cut_N) else 0.0,
        clip_error=float(cut_N.mean()) if len(cut_N) else 0.0,
    )


def _normalized(
    values: Floats, over: Floats, counted: NDArray[np.bool_], normalize: bool, clip: float, eps: float
) -> Floats:
    """Normalizes by the mean and deviation of ``over``, and clips; 0 where ``counted`` is False."""
    if normalize:
        values = (values - over.mean()) / np.sqrt(over.var() + eps)
    return np.where(counted, np.clip(values, -clip, clip), 0.0)
