"""A small team behind a server, for tests. Its weights are random, so that messages depend on the whole prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from teamtr.config import loads
from teamtr.serving.desk import Limits
from teamtr.serving.request import ChatRequest, read_request
from teamtr.serving.server import TeamServer
from teamtr.session.build import Session, build

KEY = "test-key-0123456789"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
"""Tools that a client offers."""
TEAM = """
name: trio
task: {name: sums}
team:
  model: tiny
  max_tokens: 24
  agents:
    - {name: left, system_prompt: You are left.}
    - {name: right, system_prompt: You are right.}
    - {name: speaker, system_prompt: You answer.}
  router: {order: [left, right, speaker]}
  answer: ANSWER
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {problems: 2, group_size: 2}
"""


def make_session(*changes: str, answer: str = "speaker", sharp: float = 8.0) -> Session:
    """A session of the team. ``sharp``: factor for the weights, since an untrained model is almost uniform."""
    session = build(loads(TEAM.replace("ANSWER", answer), "trio", changes))
    if sharp != 1.0:
        seen = set()
        with torch.no_grad():
            for name in session.team.names:
                learner: Any = session.engine.learner(name)
                for parameter in learner.policy.parameters().values():
                    if id(parameter) not in seen and parameter.ndim == 2:
                        parameter.mul_(sharp)
                    seen.add(id(parameter))
                learner._version = None
    return session


def ask(text: str = "What is 2+3?", model: str = "trio", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def asked(text: str = "What is 2+3?", model: str = "trio", **fields: Any) -> ChatRequest:
    return read_request(ask(text, model, **fields))


@contextmanager
def serving(session: Session, *, limits: Limits | None = None, **settings: Any) -> Iterator[TeamServer]:
    """Run a server in a thread; at the end it is shut down as by a signal, and must end."""
    with TeamServer(key=KEY, limits=limits, **settings) as server:
        server.take_up(session, session.current_team(), "trio")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(60)
            assert not thread.is_alive(), "the server does not end"
