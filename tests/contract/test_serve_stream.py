"""Requests that come while others are answered join the running batch of a paged sampler, and nobody is put back."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from teamtr.answers import Decoding
from teamtr.config import loads
from teamtr.randomness import uniforms
from teamtr.serving.schedule import Row, Scheduler
from teamtr.session.build import Session, build
from teamtr.types import Ids

TEAM = """
name: pair
task: {name: sums}
team: {model: tiny, train: lora, max_tokens: 8, agents: [{name: ann}, {name: bob}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
"""
TOKENS = 80
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def session() -> Session:
    """Messages that only end where they must, of adapters that differ."""
    built = build(loads(TEAM, "pair", ("sampling.engine=paged", "sampling.adapters=by_row")))
    for k, name in enumerate(("ann", "bob")):
        learner: Any = built.engine.learner(name)
        learner.policy.end_ids = frozenset()
        generator = torch.Generator().manual_seed(k)
        with torch.no_grad():
            for parameter in learner.policy.parameters().values():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return built


def row_of(session: Session, agent: str, seed: int, listen: Any = lambda ids: True, tokens: int = TOKENS) -> Row:
    prompt = session.context.codecs[agent].encode([{"role": "user", "content": f"hello {seed}"}])
    noise = uniforms(seed, 1, tokens)[0]
    return Row(agent, prompt, noise, Decoding(0.9), tokens, listen, threading.Event())


def alone(session: Session, row: Row) -> list[int]:
    [sample] = session.engine.sample(row.agent, [row.prompt], row.noise_T[None], decoding=row.decoding)
    return sample.token_ids.tolist()


@pytest.mark.long
@pytest.mark.parametrize("together", [True, False])
def test_a_row_of_another_agent_joins_where_adapters_are_applied_by_row(session: Session, together: bool):
    """In the middle of a long message. Where agents are not known to go together, the long message is put back."""
    scheduler = Scheduler.of(session.engine) if together else Scheduler(session.engine)
    joined = threading.Event()
    second = row_of(session, "bob", 1)
    thread = threading.Thread(target=lambda: scheduler.samples([second]))

    def listen(token_ids: Ids) -> bool:
        if first.told > 40 and not joined.is_set():
            joined.set()
            thread.start()
            until = time.monotonic() + PATIENCE_S
            while not scheduler.waiting:
                assert time.monotonic() < until
                time.sleep(0.01)
        return True

    first = row_of(session, "ann", 0, listen)
    scheduler.samples([first])
    thread.join(PATIENCE_S)
    scheduler.close()
    assert [first.token_ids, second.token_ids] == [alone(session, first), alone(session, second)]
    assert len(first.token_ids) == TOKENS
    assert (scheduler.work.most_rows, scheduler.work.put_back > 0) == ((2, False) if together else (1, True))


@pytest.mark.long
def test_rows_of_different_lengths_and_agents_asked_at_once_are_one_batch(session: Session):
    scheduler = Scheduler.of(session.engine)
    rows = [row_of(session, ["ann", "bob"][k % 2], k, tokens=5 + 7 * k) for k in range(5)]
    samples = scheduler.samples(rows)
    scheduler.close()
    for row, sample in zip(rows, samples, strict=True):
        assert sample.token_ids.tolist() == alone(session, row)
        assert sample.version == session.engine.version(row.agent)
        assert len(sample.token_ids) == row.limit
    assert (scheduler.work.batches, scheduler.work.most_rows) == (1, 5)
    assert np.unique([session.engine.info(name).batch for name in ("ann", "bob")]).tolist() != [""]
