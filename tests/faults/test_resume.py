"""A run that is killed, at any moment, ends with the same bits as one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import killing
import pytest

from forked import CONTEXT, LONG

pytestmark = pytest.mark.long

UPDATES = 9


def start(folder: Path, taught: Path | None = None, **options):
    process = CONTEXT.Process(target=killing.train, args=(str(folder), taught and str(taught)), kwargs=options)
    process.start()
    return process


def finish(folder: Path, taught: Path | None = None, **options) -> None:
    process = start(folder, taught, **options)
    process.join(LONG)
    assert process.exitcode == 0, f"the run ended with {process.exitcode}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    process = CONTEXT.Process(target=killing.team_file)  # starts the fork server, so that the clock below does not
    process.start()
    process.join()
    begun = time.monotonic()
    finish(folder)
    outcome = killing.result(folder)
    assert len([r for r in outcome["records"] if r["kind"] == "update"]) == UPDATES
    assert len([r for r in outcome["records"] if r["kind"] == "eval"]) == 4
    outcomes = [r["outcome"] for r in outcome["records"] if r["kind"] == "update"]
    assert outcomes.count("accepted") >= 5, f"too little happens in this run to prove anything: {outcomes}"
    return outcome, time.monotonic() - begun


def assert_same(folder: Path, expected: dict) -> None:
    outcome = killing.result(folder)
    assert outcome["agents"] == expected["agents"]
    assert outcome["files"] == expected["files"]
    assert outcome["records"] == expected["records"]
    assert outcome["episodes"] == expected["episodes"]
    assert outcome["tokens"] == expected["tokens"]


def test_two_undisturbed_runs_are_the_same(undisturbed, tmp_path):
    finish(tmp_path / "run")
    assert_same(tmp_path / "run", undisturbed[0])


@pytest.mark.parametrize("updates", [(5,), pytest.param(range(1, UPDATES + 1), marks=pytest.mark.slow)])
def test_killed_at_every_boundary(undisturbed, taught, tmp_path, updates):
    """Before a commit, between the commit and its log line, and after the log line, of each of these updates."""
    for moments in (("before_commit", "after_commit"), ("after_log",)):
        folder = tmp_path / moments[0]
        for number in updates:
            for moment in moments:
                process = start(folder, taught, die=(moment, number))
                process.join(LONG)
                assert process.exitcode == -signal.SIGKILL, (moment, number)
        finish(folder, taught)
        assert_same(folder, undisturbed[0])


@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_at_random_moments(undisturbed, taught, tmp_path, times):
    expected, seconds = undisturbed
    rng = random.Random(7)
    kills, number = 0, 0
    while kills < times:
        folder = tmp_path / f"run-{number}"
        number += 1
        finished = False
        while kills < times and not finished:
            process = start(folder, taught)
            process.join(rng.uniform(0.05, 0.6 * seconds))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                kills += 1
            else:
                assert process.exitcode == 0
                finished = True
        if not finished:
            finish(folder, taught)
        assert_same(folder, expected)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("plan.preset=naive_sequential",), marks=pytest.mark.slow),
        ("plan.preset=auto", "plan.sampling_cost=0.05", "plan.reuse_across_stages=true"),
        pytest.param(
            ("plan.preset=partial", "plan.min_effective_share=1", "plan.control_share=0.5"), marks=pytest.mark.slow
        ),
        pytest.param(("plan.preset=joint",), marks=pytest.mark.slow),
        pytest.param(("plan.preset=sequential_ppo", "team.train=lora", "team.lora.rank=2"), marks=pytest.mark.slow),
        pytest.param(("plan.preset=resample_every_2",), marks=pytest.mark.slow),
        pytest.param(("plan.preset=random_order",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_killed_in_the_middle_of_a_stage_that_reuses_its_batch(overrides, taught, tmp_path):
    overrides = (*overrides, "plan.stages=2")
    finish(tmp_path / "whole", taught, overrides=overrides)
    if "plan.preset=partial" in overrides:
        chosen = [r["rollouts"]["action"] for r in killing.result(tmp_path / "whole")["records"] if "rollouts" in r]
        assert "redraw" in chosen, "nothing was redrawn: this run proves nothing"
    for number in (2, 4):
        start(tmp_path / "run", taught, overrides=overrides, die=("after_commit", number)).join(LONG)
    finish(tmp_path / "run", taught, overrides=overrides)
    assert_same(tmp_path / "run", killing.result(tmp_path / "whole"))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("team.train=lora", "team.lora.rank=2"), marks=pytest.mark.slow),
        pytest.param(("plan.order=largest_gain", "plan.allocate=gain"), marks=pytest.mark.slow),
        pytest.param(("plan.order=largest_gain", "plan.allocate=certified"), marks=pytest.mark.slow),
        pytest.param(("plan.preset=grpo",), marks=pytest.mark.slow),
        pytest.param(("plan.preset=ppo",), marks=pytest.mark.slow),
        pytest.param(("plan.preset=grpo", "team.train=lora", "team.lora.rank=2"), marks=pytest.mark.slow),
        pytest.param(("plan.preset=dapo",), marks=pytest.mark.slow),
    ],
)
def test_killed_where_more_than_weights_must_come_back(tmp_path, overrides):
    """A frozen base or an initial policy that is not stored, and is taught again; orders and radii that depend on the
    past."""
    overrides = (*overrides, "plan.stages=2", "tiny.warmup_steps=15")
    finish(tmp_path / "whole", overrides=overrides)
    start(tmp_path / "run", overrides=overrides, die=("after_commit", 4)).join(LONG)
    finish(tmp_path / "run", overrides=overrides)
    assert_same(tmp_path / "run", killing.result(tmp_path / "whole"))


@pytest.mark.parametrize("sabotage", ["optimizer", pytest.param("weights", marks=pytest.mark.slow)])
def test_negative_control_a_resume_that_loses_state_is_seen(undisturbed, taught, tmp_path, sabotage):
    start(tmp_path / "run", taught, die=("after_log", 4)).join(LONG)
    finish(tmp_path / "run", taught, sabotage=sabotage)
    assert killing.result(tmp_path / "run")["files"] != undisturbed[0]["files"]
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "run", undisturbed[0])


@pytest.mark.slow
def test_negative_control_another_seed_is_seen(undisturbed, tmp_path):
    finish(tmp_path / "run", overrides=("seed=1",))
    assert killing.result(tmp_path / "run")["files"] != undisturbed[0]["files"]


def test_a_damaged_newest_checkpoint_is_passed_over(undisturbed, taught, tmp_path):
    """A flipped byte in the newest weights: the run goes back one update, says so, and ends the same."""
    folder = tmp_path / "run"
    changed = [r for r in undisturbed[0]["records"] if r["kind"] == "update" and r["outcome"] == "accepted"]
    report = changed[len(changed) // 2]
    start(folder, taught, die=("after_log", report["update"])).join(LONG)
    store = killing.RunFolder.read(folder)
    commit = store.checkpoints.latest()
    weights = store.checkpoints.folder_of(commit, report["agent"]) / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-5] ^= 1
    weights.write_bytes(bytes(damaged))
    finish(folder, taught)
    resumed = [r for r in store.log.read() if r["kind"] == "resume"]
    assert "passed over" in resumed[0]["skipped"][0]
    assert_same(folder, undisturbed[0])


FIRST_COMMIT = """\
import sys
import killing
from teamtr.session.train import train
for record in train(killing.team_file("team.train=lora", "team.lora.rank=2", "tiny.warmup_steps=1"), sys.argv[1]):
    break
"""


@pytest.mark.slow  # test_two_undisturbed_runs_are_the_same asks the same of two runs in one process
def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """Sets come in another order in each of them, as in every two processes."""
    paths = os.pathsep.join((*map(str, Path(__file__).parents[:2]), *sys.path))
    processes, found = [], []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen([sys.executable, "-c", FIRST_COMMIT, tmp_path / seed], env=environment))
    assert [process.wait(LONG) for process in processes] == [0, 0]
    for folder in (tmp_path / "1", tmp_path / "2"):
        stored = sorted(path for path in (folder / "checkpoints").rglob("*") if path.is_file())
        found.append({str(path.relative_to(folder)): path.read_bytes() for path in stored})
    names = {Path(name).name for name in found[0]}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "manifest.json", "team.json"} <= names
    assert found[0] == found[1]
