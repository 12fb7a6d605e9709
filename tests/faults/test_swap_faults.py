"""A swap that is killed at any moment and asked for again ends with the same bits, and the old run is not harmed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


Death = Callable[[], None]
"""Arms a process so that it kills itself at some moment."""


def request(model: Path, options: Mapping[str, Any]) -> Request:
    """Long enough for all four rates to be tried, and for the best to go on."""
    usual = {"probes": 32, "batch": 16, "check_every": 3, "max_steps": 30}
    return Request("speaker", str(model), train="full", **{**usual, **options})


def child(run: str, model: str, out: str, death: Death | None, options: Mapping[str, Any]) -> None:
    """Swap to the end, or until death."""
    torch.set_num_threads(1)
    quieten()
    if death is not None:
        death()
    for _ in swap(run, request(Path(model), options), out):
        pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_write(number: int) -> None:
    """Just before this thing, counted from 1, would have been durable."""
    writes = 0

    def counted(write: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == number:
                die()
            return write(*arguments, **options)

        return wrapped

    atomic.os.replace = counted(os.replace)  # every file and folder of a run gets its name by one of these two
    atomic.os.rename = counted(os.rename)
    Log.append = counted(Log.append)  # type: ignore[method-assign]


def at_naming(name: str) -> None:
    """Just before a file or folder gets this name."""

    def watched(write: Any) -> Any:
        def wrapped(source: Any, final: Any) -> None:
            if Path(final).name == name:
                die()
            write(source, final)

        return wrapped

    atomic.os.replace = watched(os.replace)
    atomic.os.rename = watched(os.rename)


def at_removing_looks() -> None:
    """When the looks of the alignment are half removed: their weights are gone, the commits stand."""
    remove = shutil.rmtree

    def wrapped(folder: Any, *arguments: Any, **options: Any) -> None:
        if Path(folder).parent.name == "swap":
            remove(Path(folder) / "agents")
            die()
        remove(folder, *arguments, **options)

    shutil.rmtree = wrapped  # type: ignore[assignment]


def attempt(run: Path, model: Path, out: Path, death: Death | None = None, **options: Any) -> int | None:
    process = CONTEXT.Process(target=child, args=(str(run), str(model), str(out), death, options))
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
    assert attempt(folder / "run", folder / "model", folder / "whole") == 0
    whole = outcome(folder / "whole")
    found = whole["records"][-1]["alignment"]
    rates = {look["learning_rate"] for look in (*found["curve"], *found["trials"])}
    assert len(rates) == 4, "too little happens to prove anything"
    assert found["steps_in_all"] == 30
    return folder / "run", folder / "model", whole


def killed_often(world, out: Path, deaths: Sequence[Death], **options: Any) -> None:
    """Killed so, one time after the other, a swap ends as if nothing had been."""
    run, model, whole = world
    before = files(run)
    killed = 0
    for death in deaths:
        code = attempt(run, model, out, death, **options)
        killed += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
        if (out / "team.yaml").exists():
            assert "swap" in [r["kind"] for r in RunFolder.read(out).log.read()], "a team file before the log"
            assert RunFolder.read(out).checkpoints.latest() is not None, "a team file before the weights"
        if code == 0:
            break
    assert killed == len(deaths) or killed >= 2
    assert attempt(run, model, out, **options) == 0
    assert outcome(out) == whole
    assert files(run) == before


def test_killed_and_asked_again(world, tmp_path):
    """Before the first thing is written, in the middle, and while the new run is put in place."""
    killed_often(world, tmp_path / "out", [partial(at_write, number) for number in (1, 4, 9)])


def test_killed_while_the_looks_are_removed(world, tmp_path):
    """They go when nothing needs them any more; asked again, the rest of them goes."""
    killed_often(world, tmp_path / "out", [at_removing_looks])


def test_killed_while_more_probes_are_played(world, tmp_path):
    """When further probes to learn from, or to judge by, are there but for their name, and when a look at what was
    learnt of them is committed and the next one is not."""
    run, model, _ = world
    learns_by_heart = {"probes": 8, "learning_rate": 0.03, "check_every": 4, "max_steps": 44, "eval_problems": 1}
    assert attempt(run, model, tmp_path / "whole", **learns_by_heart) == 0
    whole = outcome(tmp_path / "whole")
    found = whole["records"][-1]["alignment"]
    doubled = [look["doubled"] for look in sorted((*found["curve"], *found["trials"]), key=lambda look: look["step"])]
    first = doubled.index(1)
    assert doubled[first + 1 :], "a look follows the first one with more probes"
    files = ("swap-probes-1.jsonl.gz", "swap-judges-1.jsonl.gz", f"{first + 2:06d}")
    deaths = [partial(at_naming, file) for file in files]
    killed_often((run, model, whole), tmp_path / "out", deaths, **learns_by_heart)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_ten_times(world, tmp_path, seed):
    rng = random.Random(seed)
    killed_often(world, tmp_path / "out", [partial(at_write, rng.randint(1, 5)) for _ in range(10)])


def test_another_seed_would_be_seen(world, tmp_path):
    """The comparison above can fail."""
    run, model, whole = world
    other = tmp_path / "out"
    for _ in swap(run, request(model, {"check_every": 2}), other):
        pass
    assert outcome(other)["files"] != whole["files"]
