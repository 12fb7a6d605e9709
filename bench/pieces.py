"""The time of sampling long messages, measured in pieces, and the time of a call by both clocks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import stage
from common import SHAPES, random_prompts, seconds
from teamtr.engines.paged.pages import Pool
from teamtr.engines.paged.sampler import PAGE, SIZES
from teamtr.engines.torch.attention import AttentionShape, text_config
from teamtr.randomness import uniforms

PIECE = 256
"""Tokens that are timed in each part of a message."""


@dataclass(frozen=True)
class Timed:
    """The result of a call, its wall-clock seconds, and its processor seconds."""

    found: Any
    wall: float
    busy: float

    @property
    def core(self) -> float:
        return self.busy / self.wall

    @staticmethod
    def of(work: Callable[[], Any]) -> Timed:
        found: list[Any] = []
        busy = time.process_time()
        wall = seconds(lambda: found.append(work()))
        return Timed(found[0], wall, time.process_time() - busy)


def in_pieces(engine: Any, a: argparse.Namespace, seed: int, pieces: int) -> Timed:
    """A rollout with random tokens as messages, with an estimate of the time that sampling them would take. Rows whose
    KV cache is not held all at once are timed in waves, as they are sampled."""
    rng, vocabulary = np.random.default_rng(seed), SHAPES[a.shape]["vocab_size"]
    problems = random_prompts(np.random.default_rng(7), a.problems, a.prompt, vocabulary)
    contexts = [problems[e // a.group] for e in range(a.problems * a.group)]
    said: stage.Said = {}
    wall = busy = 0.0
    piece = min(PIECE, a.tokens // pieces)
    for agent in engine.learners:

        def drawn(prompts: list[Any], tokens: int, agent: str = agent) -> Timed:
            noise = uniforms(int(rng.integers(2**31)), len(prompts), tokens)
            return Timed.of(lambda: engine.sample(agent, prompts, noise))

        messages = random_prompts(rng, len(contexts), a.tokens, vocabulary)
        first, steps = drawn(contexts, 1), []
        most = at_once(engine, agent, len(contexts), len(contexts[0]) + a.tokens)
        waves = [slice(k, k + most) for k in range(0, len(contexts), most)]
        for k in range(pieces):
            at = (2 * k + 1) * a.tokens // (2 * pieces) - piece // 2
            longer = [np.concatenate([c, m[:at]]) for c, m in zip(contexts, messages, strict=True)]
            for rows in (longer[wave] for wave in waves):
                drawn(rows, 1 + piece)  # from now on, these contexts are cached and their decode step captured
                start, whole = drawn(rows, 1), drawn(rows, 1 + piece)
                steps.append(((whole.wall - start.wall) / piece, (whole.busy - start.busy) / piece))
        wall += first.wall + (a.tokens - 1) * sum(step for step, _ in steps) / pieces
        busy += first.busy + (a.tokens - 1) * sum(step for _, step in steps) / pieces
        said[agent] = (contexts, messages, [np.zeros(a.tokens, dtype=np.float32) for _ in messages])
        contexts = [np.concatenate([c, m]) for c, m in zip(contexts, messages, strict=True)]
    return Timed(said, wall, busy)


def at_once(engine: Any, agent: str, rows: int, tokens: int) -> int:
    """How many of these rows, with this many tokens each, are sampled at once, because their KV cache fits. The last
    token is never read, and one block is scratch."""
    policy = engine.learners[agent].policy
    if policy.serving is None:
        return rows
    attention = AttentionShape.of(text_config(policy.causal_lm))
    block = Pool.bytes_per_page(attention, PAGE, policy.serving.dtype)
    blocks = policy.serving.page_budget(policy.causal_lm) // block - 1
    return min(rows, SIZES[-1], max(1, blocks // -(-(tokens - 1) // PAGE)))
