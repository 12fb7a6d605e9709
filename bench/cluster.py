"""How a stage grows with workers, and what a cluster costs on one of them: ratios of one run.

    python bench/cluster.py [--workers 1,2,4] [--shards 4] [--problems 16] [--width 256] [--json]

Strong: the same batch over more workers. Weak: as many more problems as there are workers. Beside each ratio stands
what the throughput model predicts (``teamtr plan --card cpu``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import report, so_far
from teamtr.config import TeamFile, loads
from teamtr.session.forecast import Where, forecast
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
plan: {stages: 2, problems: PROBLEMS, group_size: 8, preset: teamtr, radius_nats_per_message: 0.05}
learner: {epochs: 1}
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
    """Seconds of the second stage, measured and predicted: all of it, and by phase."""

    seconds: float
    predicted_seconds: float
    phases: dict[str, float]
    predicted_phases: dict[str, float]


def team(folder: Path, problems: int, width: int, *cluster: str) -> TeamFile:
    rows = [json.dumps({"question": f"What have {k} and {k + 1} in common?", "answer": "a"}) for k in range(128)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "rewards.py").write_text(REWARDS)
    text = TEAM.replace("PROBLEMS", str(problems)).replace("WIDTH", str(width)).replace("FOLDER", str(folder))
    return loads(text, "cluster", cluster)


def stage_of(problems: int, width: int, *cluster: str) -> Stage:
    with tempfile.TemporaryDirectory() as name:
        team_file, run = team(Path(name), problems, width, *cluster), Path(name) / "run"
        ends = [(time.perf_counter(), _phases(run)) for r in train(team_file, run) if r["kind"] == "stage"]
        _, found = forecast(team_file, Where("cpu", usable_cores()))
    (first, before), (last, after) = ends
    own = {phase: after[phase] - before[phase] for phase in after}
    return Stage(last - first, found.seconds, own, {phase: spent.seconds for phase, spent in found.phases.items()})


def _phases(folder: Path) -> dict[str, float]:
    """Seconds since the run began, by phase."""
    commit = RunFolder.read(folder).checkpoints.latest()
    assert commit is not None
    found: dict[str, float] = {}
    for phases in commit.progress["account"]["seconds"].values():
        found = {phase: found.get(phase, 0.0) + phases.get(phase, 0.0) for phase in {**found, **phases}}
    return found


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
            return stage_of(options.problems * times, options.width, *own)
        finally:
            ray.shutdown()

    alone = stage_of(options.problems, options.width, f"cluster.shards={options.shards}")
    rows: list[dict[str, Any]] = []

    def told(what: str, workers: int, found: Stage) -> None:
        ratios = {
            "ratio": found.seconds / alone.seconds,
            "predicted": found.predicted_seconds / alone.predicted_seconds,
        }
        rows.append({"what": what, "workers": workers, **asdict(found), **ratios})
        so_far(what, rows[-1])

    told("one process", 0, alone)
    for workers in map(int, options.workers.split(",")):
        for kind, times in (("strong", 1), ("weak", workers)):
            if workers > 1 or kind == "strong":
                told(kind, workers, measured(workers, times))
    header = ("what", "workers", "seconds", "ratio", "predicted")
    table = [[row.get(name) for name in header] for row in rows]
    report("a stage over workers, beside one process", header, table, {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
