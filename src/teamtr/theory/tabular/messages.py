"""Messages that are token sequences, all of them listed, and distances between laws over a list."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from teamtr.types import Floats

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MessageSpace:
    """All messages over a vocabulary: of exactly ``length`` tokens, or, if ``ends``, up to ``length``.

    With ``ends``, symbol 0 is the end token; a message that reaches ``length`` without it is cut there and counts as
    it stands. ``MessageSpace(2, 2, ends=True)`` has the three messages (0), (1, 0) and (1, 1).
    """

    vocabulary: int
    length: int
    ends: bool = False

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.length < 1:
            raise ValueError(f"a message needs two symbols and one token at least, got {self}")

    @cached_property
    def words(self) -> tuple[tuple[int, ...], ...]:
        """The messages, in the order of their numbers."""

        def finish(prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
            if len(prefix) == self.length or (self.ends and prefix[-1:] == (0,)):
                return [prefix]
            return [word for token in range(self.vocabulary) for word in finish((*prefix, token))]

        return tuple(finish(()))

    @cached_property
    def prefixes(self) -> tuple[tuple[int, ...], ...]:
        """What may stand before a token; one row of logits each."""
        return tuple(sorted({word[:u] for word in self.words for u in range(len(word))}, key=lambda p: (len(p), p)))

    @cached_property
    def lengths_A(self) -> Ints:
        return np.array([len(word) for word in self.words], dtype=np.int64)

    @cached_property
    def path_AKV(self) -> Floats:
        """1 where message a says token v after prefix k."""
        index = {prefix: k for k, prefix in enumerate(self.prefixes)}
        path = np.zeros((len(self.words), len(self.prefixes), self.vocabulary))
        for a, word in enumerate(self.words):
            for u, token in enumerate(word):
                path[a, index[word[:u]], token] = 1.0
        return path

    @property
    def size(self) -> int:
        return len(self.words)

    def message_logprobs(self, token_logp: Floats) -> Floats:
        """log pi(m) of every message from token log-probabilities (..., K, V): the sum along its tokens."""
        path = self.path_AKV.reshape(self.size, -1)
        return np.asarray(token_logp.reshape(*token_logp.shape[:-2], -1) @ path.T)

    def token_mass(self, per_message: Floats) -> Floats:
        """Sum of (..., A) over the messages that pass through each prefix and token: (..., K, V)."""
        flat = per_message @ self.path_AKV.reshape(self.size, -1)
        return np.asarray(flat.reshape(*per_message.shape[:-1], len(self.prefixes), self.vocabulary))

    def per_message(self, per_prefix: Floats) -> Floats:
        """Sum of (..., K) over the prefixes of each message: (..., A); with token KLs, S(m) of lem:avgvssum."""
        return np.asarray(per_prefix @ self.path_AKV.sum(axis=-1).T)


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def kl(logp: Floats, logq: Floats) -> Floats:
    """KL(p || q) over the last axis, as a sum of terms p (exp(d) - 1 - d) >= 0 with d = log q - log p.

    The textbook sum loses all digits for small steps; see ``theory.kl.kl_cur_to_new``.
    """
    d, p = logq - logp, np.exp(logp)
    far = np.exp(logq) - p * (1.0 + d)  # p exp(d) is q, which cannot overflow
    terms = np.where(np.abs(d) < 1.0, p * (np.expm1(np.clip(d, -1.0, 1.0)) - d), far)
    return np.asarray(np.maximum(terms, 0.0).sum(axis=-1))


def tv(p: Floats, q: Floats) -> Floats:
    """Total variation over the last axis."""
    return np.asarray(0.5 * np.abs(p - q).sum(axis=-1))
