"""A swap that is killed at any moment and asked for again ends with the same bits, and the old run is not harmed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr import run as runs
from teamtr.build import build
from teamtr.config import loads
from teamtr.engines.torch.loading import quieten
from teamtr.store import Log, RunFolder, atomic
from teamtr.swap import Request, swap

TEAM = """\
name: small
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.9}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 10, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2}
    - {name: speaker, max_tokens: 3}
plan: {stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.001}
learner: {minibatches: 1}
eval: {every: 0, samples: 2}
"""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["test_swap_faults", "transformers.models.qwen3.modeling_qwen3"])


def request(model: Path) -> Request:
    """Long enough for all four rates to be tried, and for the best to go on."""
    return Request("speaker", str(model), train="full", probes=32, batch=16, check_every=3, max_steps=30)


def child(run: str, model: str, out: str, die_at: int | None) -> None:
    """Swap to the end, or until just before the ``die_at``-th thing that would have been durable."""
    torch.set_num_threads(1)
    quieten()
    if die_at is not None:
        _arm(die_at)
    for _ in swap(run, request(Path(model)), out):
        pass


def _arm(die_at: int) -> None:
    writes = 0

    def counted(write: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*arguments, **options)

        return wrapped

    atomic.os.replace = counted(os.replace)  # every file and folder of a run gets its name by one of these two
    atomic.os.rename = counted(os.rename)
    Log.append = counted(Log.append)  # type: ignore[method-assign]


def attempt(run: Path, model: Path, out: Path, die_at: int | None) -> int | None:
    process = CONTEXT.Process(target=child, args=(str(run), str(model), str(out), die_at))
    process.start()
    process.join(120)
    return process.exitcode


def files(folder: Path) -> dict[str, str]:
    found = (f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != ".lock")
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in found}


def outcome(out: Path) -> dict[str, Any]:
    """All that must be the same: every file but the log, and the log but for the time."""
    store = RunFolder.read(out)
    records = [{k: v for k, v in r.items() if k != "time"} for r in store.log.read()]
    return {"files": {k: v for k, v in files(out).items() if k != "log.jsonl"}, "records": records}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("swap")
    team_file = loads(TEAM, "small")
    for _ in runs.train(team_file, folder / "run"):
        pass
    workshop = build(loads(TEAM, "small", ["seed=5", "tiny.layers=2"]))
    (folder / "model").mkdir()
    workshop.engine.learner("speaker").policy.save_weights(folder / "model")
    assert attempt(folder / "run", folder / "model", folder / "whole", None) == 0
    whole = outcome(folder / "whole")
    found = whole["records"][-1]["alignment"]
    rates = {look["learning_rate"] for look in (*found["curve"], *found["trials"])}
    assert len(rates) == 4, "too little happens to prove anything"
    assert found["steps_in_all"] == 30
    return folder / "run", folder / "model", whole


def killed_often(world, out: Path, points: list[int]) -> None:
    run, model, whole = world
    before = files(run)
    killed = 0
    for die_at in points:
        code = attempt(run, model, out, die_at)
        killed += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
        assert killed == 0 or code == 0 or not (out / "team.yaml").exists(), "a team file before everything is whole"
        if code == 0:
            break
    assert killed == len(points) or killed >= 2
    assert attempt(run, model, out, None) == 0
    assert outcome(out) == whole
    assert files(run) == before


def test_killed_and_asked_again(world, tmp_path):
    """Before the first thing is written, in the middle, and while the new run is put in place."""
    killed_often(world, tmp_path / "out", [1, 4, 9])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_ten_times(world, tmp_path, seed):
    rng = random.Random(seed)
    killed_often(world, tmp_path / "out", [rng.randint(1, 5) for _ in range(10)])


def test_another_seed_would_be_seen(world, tmp_path):
    """The comparison above can fail."""
    run, model, whole = world
    other = tmp_path / "out"
    different = Request(**{**request(model).as_record(), "check_every": 2})
    for _ in swap(run, different, other):
        pass
    assert outcome(other)["files"] != whole["files"]
