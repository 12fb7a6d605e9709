"""How the time of a stage scales with workers, relative to one process, measured in one run.

    python bench/cluster.py [--workers 1,2,4] [--shards 4] [--problems 16] [--width 256] [--json]
    python bench/cluster.py --model FOLDER --tokens 128 --card H200 --cards 1 --workers 1,2 --shards 2 --kinds strong

Strong scaling: the same batch over more workers. Weak scaling: the number of problems grows with the workers. Each
ratio is shown beside the prediction of the throughput model (``teamtr plan --card cpu``), with a flag for whether the
weights equal those of one process to the bit. A missing model, card or worker is reported before anything runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import report, so_far
from teamtr.config import TeamFile, loads
from teamtr.errors import UserError
from teamtr.planning.cards import card_named
from teamtr.session.cluster import require_workers
from teamtr.session.forecast import Where, forecast
from teamtr.session.models import require_source
from teamtr.session.processes import usable_cores
from teamtr.session.train import train
from teamtr.store import Commit, RunFolder

KINDS = ("strong", "weak")
TEAM = """
name: cluster
task: {name: data, path: FOLDER/rows.jsonl, grader: "python:FOLDER/rewards.py:odd"}
team:
  model: MODEL
  train: lora
  max_tokens: TOKENS
  agents: [{name: left}, {name: right}, {name: speaker}]
tiny: {layers: 4, width: WIDTH, heads: 4, warmup_steps: 0}
plan: {stages: STAGES, problems: PROBLEMS, group_size: 8, preset: teamtr, radius_nats_per_message: 0.05}
learner: {epochs: 1}
eval: {every: 0}
"""
REWARDS = """
import zlib


def odd(prompts, completions, **_):
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]
"""
"""A pseudo-random reward of the text: an update needs episodes of a problem with different rewards."""


@dataclass(frozen=True)
class Stage:
    """Mean seconds of the stages after the first, measured and predicted, whole and by phase, and the agents' versions
    at the end."""

    seconds: float
    predicted_seconds: float
    phases: dict[str, float]
    predicted_phases: dict[str, float]
    versions: dict[str, str]


def team(folder: Path, problems: int, options: argparse.Namespace, *cluster: str) -> TeamFile:
    rows = [json.dumps({"question": f"What have {k} and {k + 1} in common?", "answer": "a"}) for k in range(128)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "rewards.py").write_text(REWARDS)
    given = {
        "PROBLEMS": problems,
        "WIDTH": options.width,
        "FOLDER": folder,
        "MODEL": options.model,
        "STAGES": options.stages,
    }
    text = TEAM.replace("TOKENS", str(options.tokens))
    for word, value in given.items():
        text = text.replace(word, str(value))
    return loads(text, "cluster", [*options.set, *cluster])


def stage_of(problems: int, options: argparse.Namespace, *cluster: str) -> Stage:
    with tempfile.TemporaryDirectory() as name:
        team_file, run = team(Path(name), problems, options, *cluster), Path(name) / "run"
        ends = [(time.perf_counter(), _commit(run)) for r in train(team_file, run) if r["kind"] == "stage"]
        _, found = forecast(team_file, Where(options.card, options.cards))
    (first, before), *_, (last, after) = ends
    stages = len(ends) - 1
    own = {phase: (spent - _phases(before)[phase]) / stages for phase, spent in _phases(after).items()}
    predicted = {phase: spent.seconds for phase, spent in found.phases.items()}
    return Stage((last - first) / stages, found.seconds, own, predicted, dict(after.agents))


def _commit(folder: Path) -> Commit:
    commit = RunFolder.read(folder).checkpoints.latest()
    assert commit is not None
    return commit


def _phases(commit: Commit) -> dict[str, float]:
    """Seconds since the start of the run, by phase."""
    found: dict[str, float] = {}
    for phases in commit.progress["account"]["seconds"].values():
        found = {phase: found.get(phase, 0.0) + phases.get(phase, 0.0) for phase in {**found, **phases}}
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--stages", type=int, default=2, help="of a run; the first is not measured")
    parser.add_argument("--model", default="tiny", help="a folder with a model (default: the built-in one)")
    parser.add_argument("--width", type=int, default=256, help="of the built-in model")
    parser.add_argument("--tokens", type=int, default=8, help="of a message, at most")
    parser.add_argument("--card", default="cpu", help="that the model of throughput predicts for")
    parser.add_argument("--cards", type=int, default=usable_cores(), help="or cores (default: those of this machine)")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--set", action="append", default=[], help="a setting of the team file")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def over(workers: int, options: argparse.Namespace) -> tuple[str, ...]:
    """Settings for this number of workers."""
    return "cluster.engine=ray", f"cluster.workers={workers}", f"cluster.shards={max(options.shards, workers)}"


def worker_counts(options: argparse.Namespace) -> list[int]:
    """The counts of ``--workers``. Raises UserError for anything that would make the benchmark fail later: a missing
    model, missing workers, or wrong settings."""
    asked = options.workers.split(",")
    if not all(count.strip().isdecimal() and int(count) > 0 for count in asked):
        raise UserError(f"--workers {options.workers!r}: give numbers of workers from 1 on, such as 1,2,4")
    if unknown := [kind for kind in options.kinds.split(",") if kind not in KINDS]:
        raise UserError(f"--kinds {','.join(unknown)!r}: there are {' and '.join(KINDS)}")
    if options.stages < 2:
        raise UserError(f"--stages {options.stages}: give two or more, since the first is not measured")
    if min(options.shards, options.problems, options.tokens, options.width, options.cards) < 1:
        raise UserError("--shards, --problems, --tokens, --width and --cards: give numbers from 1 on")
    card_named(options.card)
    require_source(options.model)
    with tempfile.TemporaryDirectory() as name:
        team(Path(name), options.problems, options, f"cluster.shards={options.shards}")
        team_file = team(Path(name), options.problems, options, *over(max(map(int, asked)), options))
    require_workers(team_file)
    return list(map(int, asked))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        counts = worker_counts(options)
    except UserError as error:
        print(f"bench/cluster.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

    def measured(workers: int, times: int) -> Stage:
        import ray

        try:
            return stage_of(options.problems * times, options, *over(workers, options))
        finally:
            ray.shutdown()

    alone = stage_of(options.problems, options, f"cluster.shards={options.shards}")
    rows: list[dict[str, Any]] = []

    def told(what: str, workers: int, found: Stage) -> None:
        ratios = {
            "ratio": found.seconds / alone.seconds,
            "predicted": found.predicted_seconds / alone.predicted_seconds,
        }
        same = None if what == "weak" else found.versions == alone.versions
        rows.append({"what": what, "workers": workers, **asdict(found), **ratios, "same bits": same})
        so_far(what, rows[-1])

    told("one process", 0, alone)
    for workers in counts:
        for kind, times in (("strong", 1), ("weak", workers)):
            if kind in options.kinds.split(",") and (workers > 1 or kind == "strong"):
                told(kind, workers, measured(workers, times))
    header = ("what", "workers", "seconds", "ratio", "predicted", "same bits")
    table = [[row.get(name) for name in header] for row in rows]
    report("a stage over workers, beside one process", header, table, {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
