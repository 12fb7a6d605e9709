"""A training run on a small tau-bench: two tabular agents whose letters stand for lines, some of which call tools.

As a program (``python taubench_run.py FOLDER N``) it kills itself with SIGKILL at the N-th call of tools.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from small_taubench import write_world
from teamtr.calls import ToolCall
from teamtr.config import TeamFile, loads
from teamtr.session import build
from teamtr.session import train as run
from teamtr.tasks.benchmarks.taubench import Airline
from teamtr.tasks.benchmarks.taubench.dialogue import DomainTools
from teamtr.tasks.benchmarks.taubench.replay import STOP
from teamtr.tasks.players import PolicyPlayer

TEAM = """
name: dialogues
task: {name: 'taubench:airline', path: WORLD, player: {agent: customer}}
tools: {steps: 2}
team:
  model: tabular
  max_tokens: 2
  agents:
    - {name: planner}
    - {name: clerk}
    - {name: customer, frozen: true}
  router: {rounds: 3, order: [planner, clerk]}
plan: {preset: naive_sequential, stages: 2, problems: 2, group_size: 8, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 1, samples: 2}
"""
CANCEL = ToolCall("cancel_reservation", {"reservation_id": "OLD111"}).canonical()
LOOK = ToolCall("get_user_details", {"user_id": "ada_1"}).canonical()
DESK = {"a": CANCEL, "b": LOOK, "c": "It is done.", "d": "<tool_call>{</tool_call>"}
CUSTOMER = {"a": STOP, "b": "Go on.", "c": STOP, "d": "Cancel it."}


@dataclass(frozen=True)
class Phrases:
    """Wraps a codec so that each of its letters stands for a line."""

    inner: Any
    lines: Mapping[str, str]

    def encode(self, messages: Any, tools: Sequence[Any] = ()) -> Any:
        return self.inner.encode(messages)

    def encode_message(self, text: str) -> Any:
        return self.inner.encode_message("c")

    def decode(self, token_ids: Any) -> str:
        return "\n".join(self.lines[letter] for letter in self.inner.decode(token_ids))


class Toy(Airline):
    """The domain with the letters of ``Phrases``, which cannot encode a dialogue: no answer is known to be right."""

    alphabet = "abcd"

    def gold(self, problem: Any) -> Any:
        return None

    def wrong(self, problem: Any, rng: Any) -> Any:
        return []


def team_in(folder: Path) -> TeamFile:
    world = write_world(folder / "world", Airline)
    tasks = [
        {
            "user_id": "ada_1",
            "instruction": f"Cancel your trip, number {number}.",
            "actions": [{"name": "cancel_reservation", "kwargs": {"reservation_id": "OLD111"}}],
            "outputs": [],
        }
        for number in range(3)
    ]
    for split in ("train", "test"):
        rows = "".join(json.dumps(row) + "\n" for row in tasks)
        (world / f"tasks_{split}.jsonl").write_text(rows, encoding="utf-8")
    return loads(TEAM.replace("WORLD", str(world)), "dialogues")


@contextmanager
def toy() -> Iterator[None]:
    """Within this block, runs use ``Toy`` and ``Phrases``."""
    make_task, make = build.build_task, run.build

    def task(team_file: Any) -> Any:
        made = make_task(team_file)
        made.__class__ = Toy
        return made

    def built(team_file: Any, **settings: Any) -> build.Session:
        session = make(team_file, **settings)
        codecs = {name: Phrases(codec, DESK) for name, codec in session.context.codecs.items()}
        customer = Phrases(session.context.codecs["customer"], CUSTOMER)
        session.task.player = PolicyPlayer(session.engine, "customer", customer, max_tokens=2)
        return replace(session, context=replace(session.context, codecs=codecs))

    build.build_task, run.build = task, built  # type: ignore[assignment]
    try:
        yield
    finally:
        build.build_task, run.build = make_task, make


def main(folder: Path, kill_at: int) -> None:
    asked, results = 0, DomainTools.results

    def killing(self: DomainTools, requests: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return results(self, requests)

    DomainTools.results = killing  # type: ignore[method-assign]
    with toy():
        list(run.train(team_in(folder), folder / "run"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
