"""A process that trains a small team with tools, and dies in the middle of a tool turn."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

from teamtr.config import TeamFile, loads
from teamtr.session import train as run
from teamtr.tools.toolbox import ToolboxTools
from teamtr.types import ToolRequest

TEAM = """
name: tools
task: {name: lookup, keys: "12", values: AB, tables: 4, skill: 0.5, reading_skill: 0.5}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 60, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: asker, max_tokens: 17}
    - {name: answerer, max_tokens: 2, tools: none}
tools: {steps: 2, tell: false}
plan: {preset: teamtr, stages: 3, problems: 4, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 1, samples: 2}
"""


def team_file() -> TeamFile:
    return loads(TEAM, "tools")


def main(folder: str, dies_at: int) -> None:
    """Train, and die when tools are asked for the n-th time, with half of their results given."""
    torch.set_num_threads(1)
    given, results = 0, ToolboxTools.results

    def results_or_death(self: Any, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        nonlocal given
        given += 1
        if given == dies_at:
            results(self, requests[: len(requests) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return results(self, requests)

    ToolboxTools.results = results_or_death  # type: ignore[method-assign]
    for _ in run.train(team_file(), folder):
        pass


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
