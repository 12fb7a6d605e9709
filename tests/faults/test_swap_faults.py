"""A swap that is killed at any moment and asked for again ends with the same bits, and the old run is not harmed."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import CONTEXT
from teamtr.config import load_team_file, loads
from teamtr.engines.torch.loading import quieten
from teamtr.session import train as runs
from teamtr.session.build import build
from teamtr.store import Log, RunFolder, atomic
from teamtr.swap import Request, swap

pytestmark = pytest.mark.long

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


def watch(out: Path, see: Callable[[str], None]) -> None:
    """Call ``see`` just before anything in ``out`` becomes durable: every file and folder gets its name by one of two
    calls, and a log its lines by a third. What is put aside to be removed has a minus before its name."""

    def named(write: Any) -> Any:
        def wrapped(source: Any, final: Any, **options: Any) -> None:
            goes = Path(final).name.startswith(atomic.TEMPORARY)
            where = os.path.relpath(source if goes else final, out)
            if not where.startswith(os.pardir):  # as that of a base that is taught once, for all runs
                see(f"{'-' if goes else ''}{where}")
            write(source, final, **options)

        return wrapped

    append = Log.append

    def appended(log: Log, record: Mapping[str, Any]) -> None:
        see(f"{os.path.relpath(log.path, out)} {len(log.read())}")
        append(log, record)

    os.replace, os.rename = named(os.replace), named(os.rename)
    Log.append = appended  # type: ignore[method-assign]


def writing_down(out: Path, file: Path) -> None:
    """Not a death: every write is noted in ``file``."""

    def see(write: str) -> None:
        with open(file, "a") as notes:
            notes.write(f"{write}\n")

    watch(out, see)


def at_point(out: Path, point: str) -> None:
    """Just before this write."""
    watch(out, lambda write: die() if write == point else None)


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
    process.join(600)  # which no swap takes, also not on a busy machine, unless it hangs
    return process.exitcode


def files(folder: Path) -> dict[str, str]:
    found = (f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != ".lock")
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in found}


def outcome(out: Path) -> dict[str, Any]:
    """All that must be the same: every file but the log, the log but for the time, and what the team file means, whose
    paths are relative to the folder."""
    store = RunFolder.read(out)
    records = [{k: v for k, v in r.items() if k != "time"} for r in store.log.read()]
    alike = {k: v for k, v in files(out).items() if k not in ("log.jsonl", "team.yaml")}
    return {"files": alike, "records": records, "team": load_team_file(store.team_file)}


@dataclass(frozen=True)
class World:
    """A run and its files before any swap, a model to swap in, what an undisturbed swap ends with, and every write that
    it makes, in order."""

    run: Path
    unharmed: dict[str, str]
    model: Path
    whole: dict[str, Any]
    writes: tuple[str, ...]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("swap")
    team_file = loads(TEAM, "small")
    for _ in runs.train(team_file, folder / "run"):
        pass
    session = build(loads(TEAM, "small", ["seed=5", "tiny.layers=2"]))
    (folder / "model").mkdir()
    session.engine.learner("speaker").policy.save_weights(folder / "model")
    unharmed = files(folder / "run")
    noting = partial(writing_down, folder / "whole", folder / "writes")
    assert attempt(folder / "run", folder / "model", folder / "whole", noting) == 0
    whole = outcome(folder / "whole")
    found = whole["records"][-1]["alignment"]
    rates = {look["learning_rate"] for look in (*found["curve"], *found["trials"])}
    assert len(rates) == 4, "too little happens to prove anything"
    assert found["steps_in_all"] == 30
    writes = tuple((folder / "writes").read_text().splitlines())
    assert len(set(writes)) == len(writes) > 50, "a point is one write"
    return World(folder / "run", unharmed, folder / "model", whole, writes)


def killed_often(world: World, out: Path, deaths: Sequence[Death], **options: Any) -> None:
    """Killed so, one time after the other, a swap ends as if nothing had been. Every one of the deaths must strike."""
    for death in deaths:
        assert attempt(world.run, world.model, out, death, **options) == -signal.SIGKILL, f"{death} did not strike"
        assert files(world.run) == world.unharmed, f"{death} harmed the old run"
        if (out / "team.yaml").exists():
            assert "swap" in [r["kind"] for r in RunFolder.read(out).log.read()], "a team file before the log"
            assert RunFolder.read(out).checkpoints.latest() is not None, "a team file before the weights"
    assert attempt(world.run, world.model, out, **options) == 0
    assert outcome(out) == world.whole
    assert files(world.run) == world.unharmed


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_while_the_new_run_is_put_in_place(world, tmp_path, few):
    """Before the log, the weights, the commit and the team file, which come in this order, last of all but tidying."""
    weights = [w for w in world.writes if w.startswith("checkpoints/agents/")]
    commits = [w for w in world.writes if w.startswith("checkpoints/commits/")]
    assert [Path(w).parent.name for w in weights] == ["left", "right", "speaker"]
    last = ["log.jsonl", *weights, *commits, "team.yaml"]
    assert [w for w in world.writes if not w.startswith("-")][-len(last) :] == last
    out = tmp_path / "out"
    points = (weights[-1], "team.yaml") if few else ("log.jsonl", weights[-1], *commits, "team.yaml")
    killed_often(world, out, [partial(at_point, out, point) for point in points])


@pytest.mark.parametrize(
    ("times", "seed"), [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 0), *((10, k) for k in range(4)))]
)
def test_killed_several_times(world, tmp_path, times, seed):
    """At random points, one in each third or tenth of all the writes of a swap."""
    rng, out = random.Random(seed), tmp_path / "out"
    edges = [k * len(world.writes) // times for k in range(times + 1)]
    points = [world.writes[rng.randrange(*pair)] for pair in itertools.pairwise(edges)]
    killed_often(world, out, [partial(at_point, out, point) for point in points])


@pytest.mark.slow  # those above are killed at other moments of the same swap
def test_killed_while_the_looks_are_removed(world, tmp_path):
    """They go when nothing needs them any more; asked again, the rest of them goes."""
    killed_often(world, tmp_path / "out", [at_removing_looks])


@pytest.mark.slow
def test_killed_while_more_probes_are_played(world, tmp_path):
    """When further probes to learn from, or to judge by, are there but for their name, and when a look at what was
    learnt of them is committed and the next one is not."""
    learns_by_heart = {"probes": 8, "learning_rate": 0.03, "check_every": 4, "max_steps": 44, "eval_problems": 1}
    assert attempt(world.run, world.model, tmp_path / "whole", **learns_by_heart) == 0
    whole = outcome(tmp_path / "whole")
    found = whole["records"][-1]["alignment"]
    doubled = [look["doubled"] for look in sorted((*found["curve"], *found["trials"]), key=lambda look: look["step"])]
    first = doubled.index(1)
    assert doubled[first + 1 :], "a look follows the first one with more probes"
    points = (
        "episodes/swap-probes-1.jsonl.gz",
        "episodes/swap-judges-1.jsonl.gz",
        f"swap/align/commits/{first + 2:06d}",
    )
    out = tmp_path / "out"
    deaths = [partial(at_point, out, point) for point in points]
    killed_often(replace(world, whole=whole), out, deaths, **learns_by_heart)


@pytest.mark.slow
def test_another_seed_would_be_seen(world, tmp_path):
    """The comparison above can fail."""
    other = tmp_path / "out"
    for _ in swap(world.run, request(world.model, {"check_every": 2}), other):
        pass
    assert outcome(other)["files"] != world.whole["files"]
