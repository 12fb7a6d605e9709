"""CPU seconds of the same calls in this process and in one Ray worker: medians, and their ratio.

    python bench/worker_cpu.py [--width 256] [--rows 64] [--repeats 5] [--json]

Unlike wall-clock time, CPU seconds do not include waiting for a core, which depends on other work on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import cluster
from common import report
from teamtr.batches import AgentBatch
from teamtr.engines.cluster.engine import ClusterEngine
from teamtr.ports import Engine
from teamtr.randomness import uniforms
from teamtr.session.build import build
from teamtr.theory.objective import Objective

SHARDS = "cluster.shards=4"
TOKENS = 8


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a call: in one process, in the worker, and in the process that calls the worker."""

    alone: float
    worker: float
    asking: float


def calls_of(engine: Engine, rows: int) -> dict[str, Callable[[], Any]]:
    """The calls that an update makes to an engine, on messages that it samples."""
    rng, noise_BT, at = np.random.default_rng(0), uniforms(0, rows, TOKENS), np.arange(rows)
    prompts = [rng.integers(6, 60, size=60 + k % 3).astype(np.int32) for k in range(rows)]
    samples = engine.sample("left", prompts, noise_BT)
    ids, logprobs = tuple(s.token_ids for s in samples), tuple(s.logprobs for s in samples)
    batch = AgentBatch("left", tuple(prompts), ids, logprobs, at, at // 8, np.zeros(rows, dtype=np.int64))
    learner, advantages = engine.learner("left"), np.where(at % 2, 1.0, -1.0)
    return {
        "sample": lambda: engine.sample("left", prompts, noise_BT),
        "begin": lambda: learner.begin(batch),
        "step": lambda: learner.step(at, advantages, Objective(), beta=0.1, learning_rate=1e-3),
        "measure": learner.measure,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="of the built-in model")
    parser.add_argument("--rows", type=int, default=64, help="messages of a batch")
    parser.add_argument("--repeats", type=int, default=5, help="after a first that is not counted")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    team = cluster.parsed(["--width", str(options.width)])
    with tempfile.TemporaryDirectory() as name:
        files = [
            cluster.team(Path(name), options.rows // 8, team, SHARDS, *more)
            for more in ((), ("cluster.engine=ray", "cluster.workers=1"))
        ]
        here, there = (build(team_file).engine for team_file in files)
        assert isinstance(there, ClusterEngine)
        ((_, number),) = there.members.processes.values()  # type: ignore[attr-defined]
        worker, own = psutil.Process(number), psutil.Process()
        asked = [calls_of(engine, options.rows) for engine in (here, there)]
        spent: dict[str, list[Spent]] = {call: [] for call in asked[0]}
        for _ in range(options.repeats + 1):
            for call, found in spent.items():
                (alone,) = cpu_of(asked[0][call], own)
                found.append(Spent(alone, *cpu_of(asked[1][call], worker, own)))
        there.close()
    rows = []
    for call, (_, *found) in spent.items():
        median = Spent(*np.median([astuple(one) for one in found], axis=0).tolist())
        rows.append([call, *astuple(median), (median.worker + median.asking) / median.alone])
    header = ("call", "one process, CPU s", "worker, CPU s", "whoever asks it, CPU s", "ratio")
    report("the same calls in one process and in one worker", header, rows, {"rows": rows}, options.json)


def cpu_of(call: Callable[[], Any], *processes: psutil.Process) -> list[float]:
    """CPU seconds of each process during the call."""
    before = [_cpu(one) for one in processes]
    call()
    return [_cpu(one) - at for one, at in zip(processes, before, strict=True)]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
