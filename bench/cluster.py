"""How a stage grows with workers, and what a cluster costs on one of them: ratios of one run.

    python bench/cluster.py [--workers 1,2,4] [--shards 4] [--problems 16] [--width 256] [--json]

Strong: the same batch over more workers. Weak: as many more problems as there are workers. Beside each ratio stands
what a simple model expects: work that is shared out over as many workers as there are cores, work that is not, and what
one worker costs more than none, all measured in the same run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import report
from teamtr.config import TeamFile, loads
from teamtr.session.processes import usable_cores
from teamtr.session.train import train
from teamtr.store import RunFolder

TEAM = """
name: cluster
task: {name: data, path: FOLDER/rows.jsonl, grader: "python:FOLDER/rewards.py:odd"}
team:
  model: tiny
  train: lora
  agents: [{name: left, max_tokens: 8}, {name: right, max_tokens: 8}, {name: speaker, max_tokens: 8}]
tiny: {layers: 4, width: WIDTH, heads: 4, warmup_steps: 0}
plan: {stages: 3, problems: PROBLEMS, group_size: 8, preset: teamtr, radius_nats_per_message: 0.05}
eval: {every: 0}
"""
REWARDS = """
import zlib


def odd(prompts, completions, **_):
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]
"""
"""By chance, which the words decide: an update needs episodes of a problem that differ."""


@dataclass(frozen=True)
class Stage:
    """Seconds of a stage after the first: all of it, and what is shared out among workers."""

    seconds: float
    shared: float


def team(problems: int, width: int, *cluster: str) -> TeamFile:
    text = TEAM.replace("PROBLEMS", str(problems)).replace("WIDTH", str(width))
    return loads(text, "cluster", cluster)


def stage_of(team_file: TeamFile) -> Stage:
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for record in train(team_file, Path(folder) / "run"):
            if record["kind"] in ("start", "stage"):
                ends.append((time.perf_counter(), _shared(Path(folder) / "run")))
    (first, before), (last, after) = ends[1], ends[-1]
    count = len(ends) - 2
    return Stage((last - first) / count, (after - before) / count)


def _shared(folder: Path) -> float:
    commit = RunFolder.read(folder).checkpoints.latest()
    assert commit is not None
    return sum(sum(phases.values()) for phases in commit.progress["account"]["seconds"].values())


def expected(alone: Stage, one: Stage, workers: int, problems: int) -> float:
    """Of a stage over so many workers with so many times the problems: what is shared out, on the cores that are there;
    what is not; and what one worker costs more than none."""
    hands = min(workers, usable_cores())
    return problems * alone.shared / hands + (alone.seconds - alone.shared) + (one.seconds - alone.seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)

    def measured(workers: int, times: int) -> Stage:
        import ray

        own = ("cluster.engine=ray", f"cluster.workers={workers}", f"cluster.shards={max(options.shards, workers)}")
        try:
            return stage_of(team(options.problems * times, options.width, *own))
        finally:
            ray.shutdown()

    alone = stage_of(team(options.problems, options.width, f"cluster.shards={options.shards}"))
    rows: list[dict[str, Any]] = [{"what": "one process", "workers": 0, "seconds": alone.seconds, "ratio": 1.0}]
    one = measured(1, 1)
    for workers in map(int, options.workers.split(",")):
        for kind, times in (("strong", 1), ("weak", workers)):
            if workers == 1 and kind == "weak":
                continue
            found = one if workers == 1 else measured(workers, times)
            rows.append(
                {
                    "what": kind,
                    "workers": workers,
                    "seconds": found.seconds,
                    "ratio": found.seconds / alone.seconds,
                    "expected": expected(alone, one, workers, times) / alone.seconds,
                }
            )
    header = ("what", "workers", "seconds", "ratio", "expected")
    table = [[row.get(name) for name in header] for row in rows]
    report("a stage over workers, beside one process", header, table, {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
