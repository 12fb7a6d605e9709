"""The best checkpoint by held-out success is kept and found again, and training stops when patience is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from called import invoke, last_json
from teamtr.analysis.figures import read_runs
from teamtr.analysis.report.summary import evaluated_checkpoints
from teamtr.config import load_team_file
from teamtr.errors import UserError
from teamtr.evaluation.best import best_of, out_of_patience
from teamtr.evaluation.metrics import summarise
from teamtr.records import EvalRecord, SwapRecord, encode_record
from teamtr.reports import HeldOut
from teamtr.rollout import Ledger
from teamtr.session import driver
from teamtr.session.history import History
from teamtr.session.resume import StoredRun
from teamtr.session.train import train
from teamtr.store import NoSuchCommit, RunFolder
from teamtr.sweep.cells import Cell, is_done
from teamtr.types import Verdict

TEAM = """\
name: small
task: {name: code, symbols: AB, held_out: 0.5}
team:
  {model: tabular, max_tokens: 3, agents: [{name: left, frozen: true}, {name: right, frozen: true}, {name: speaker}]}
plan: {stages: 5, problems: 2, group_size: 2, radius_nats_per_message: 0.05}
eval: {every: 1, samples: 1}
device: cpu
"""
SUCCESS = (0.1, 0.5, 0.4, 0.5, 0.2, 0.3)
"""Before each stage, and at the end: the best is that before stage 1, after one update."""


def report(success: float) -> Any:
    verdicts = [[Verdict("right" if k < round(10 * success) else "wrong", 0.0)] for k in range(10)]
    return summarise(verdicts, [["x"]] * 10, None, np.random.default_rng(0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(driver, "evaluate_team", lambda session, team, *, stage: (report(SUCCESS[stage]), Ledger()))
    (tmp_path / "team.yaml").write_text(TEAM)
    return tmp_path / "run"


def trained(folder: Path, *changes: str, until: int | None = None) -> dict[str, Any]:
    """The last record of a run, which is stopped after so many updates."""
    records: list[dict[str, Any]] = []
    team_file = load_team_file(folder.parent / "team.yaml", changes)
    for record in train(team_file, folder, stop=lambda: sum(r["kind"] == "update" for r in records) == until):
        records.append(record)
    return records[-1]


def evals(folder: Path) -> list[tuple[int, float]]:
    return [(r["stage"], r["avg_at_k"]) for r in RunFolder.read(folder).log.read() if r["kind"] == "eval"]


def found(*success: float) -> list[HeldOut]:
    return [HeldOut(3 * stage, stage, one) for stage, one in enumerate(success)]


def test_the_first_of_the_best_and_how_long_nothing_was_better() -> None:
    assert best_of([]) is None
    assert best_of(found(0.1, 0.5, 0.5, 0.2)) == HeldOut(3, 1, 0.5)
    assert [out_of_patience(found(*SUCCESS[:n]), 2) for n in range(7)] == [False] * 4 + [True] * 3
    assert not out_of_patience(found(0.5, 0.4, 0.3, 0.6), 2), "a better one at last begins anew"
    assert not out_of_patience(found(*SUCCESS), None)
    assert not out_of_patience([], 1)


def test_evaluations_before_a_swap_are_another_run_s() -> None:
    made = [EvalRecord(stage=k, updates=3 * k, report=report(0.5), tokens=0, seconds=0.0) for k in range(2)]
    history = History([made[0]])
    kept = history.as_state()
    assert kept["held_out"] == [{"updates": 0, "stage": 0, "success": 0.5}]
    history.add(SwapRecord.__new__(SwapRecord))
    assert history.as_state()["held_out"] == []
    history.add(made[1])
    assert [one.updates for one in history.held_out] == [3]
    lost = History([made[1]])
    lost.take_state(kept, None)
    assert [one.updates for one in lost.held_out] == [0, 3], "a log that has lost an evaluation decides alike"
    assert lost.evaluated == {0, 1}


def test_evaluations_on_other_problems_are_not_compared() -> None:
    def made(stage: int, success: float, problems: int) -> EvalRecord:
        asked = replace(report(success), problem_ids=tuple(f"p{k}" for k in range(problems)))
        return EvalRecord(stage=stage, updates=3 * stage, report=asked, tokens=0, seconds=0.0)

    records = [made(0, 0.5, 2), made(1, 1.0, 2), made(2, 0.6, 64), made(3, 0.7, 64)]
    history = History(records)
    assert [one.stage for one in history.held_out] == [2, 3]
    assert history.evaluated == {0, 1, 2, 3}
    assert best_of(history.held_out) == HeldOut(9, 3, 0.7), "two easy problems were all solved"
    assert evaluated_checkpoints([encode_record(record) for record in records]) == history.held_out
    resumed = History(records)
    resumed.take_state(History(records[:2]).as_state(), None)
    assert resumed.held_out == history.held_out, "nor those that the last commit before still knows"


@pytest.mark.long
def test_the_best_checkpoint_is_kept_and_evaluated(folder: Path) -> None:
    last = trained(folder)
    assert last["best"] == {"updates": 1, "stage": 1, "success": 0.5}
    assert not last["stopped_early"]
    assert RunFolder.read(folder).checkpoints.numbers() == [1, 4, 5], "the two latest, and the best"
    assert StoredRun.read(folder).commit.number == 5
    stored = StoredRun.read(folder, "best")
    assert stored.commit.number == 1
    _, team = stored.build()
    assert team.versions == stored.commit.progress["versions"], "its agents are there too"
    with pytest.raises(NoSuchCommit, match="no checkpoint 3; it holds 1, 4, 5"):
        StoredRun.read(folder, 3)
    for asked, updates in (("best", 1), ("4", 4), (None, 5)):
        options = [] if asked is None else ["--checkpoint", asked]
        told = invoke("eval", folder, "--samples", 1, "--limit", 1, *options, "--json")
        assert last_json(told)["updates"] == updates
        counted = f"checkpoint {updates}, stage {updates}\n"  # one agent: as `train` counts stages
        assert (counted in told.stderr) == (asked is not None)
    assert "it holds 1, 4, 5" in invoke("eval", folder, "--checkpoint", 3, code=2).stderr
    assert "a number of updates or best" in invoke("eval", folder, "--checkpoint", "worst", code=2).stderr
    assert (
        "--checkpoint is of a run" in invoke("eval", "--team", folder / "team.yaml", "--checkpoint", 3, code=2).stderr
    )
    (run,) = read_runs([folder])
    assert run.data["run"]["best"] == last["best"]
    assert any("Checkpoint 1 (stage 1) was best, with 50 %" in line["text"] for line in run.data["headlines"])


@pytest.mark.long
def test_patience_ends_a_run_and_a_resumed_one_decides_alike(folder: Path) -> None:
    last = trained(folder, "eval.patience=2")
    assert (last["kind"], last["stopped_early"], last["updates"]) == ("finished", True, 3)
    assert evals(folder) == list(enumerate(SUCCESS[:4])), "stopped before stage 3: two were no better than 0.5"
    other = folder.parent / "killed"
    for updates in (1, 1):
        assert trained(other, "eval.patience=2", until=updates)["kind"] == "stopped"
    assert trained(other, "eval.patience=2") == last
    assert evals(other) == evals(folder)
    weights = [StoredRun.read(run).commit.agents for run in (folder, other)]
    assert weights[0] == weights[1]
    (run,) = read_runs([folder])
    assert (run.data["run"]["state"], run.data["run"]["stopped_early"]) == ("finished", True)
    team_file = load_team_file(folder.parent / "team.yaml", ["eval.patience=2"])
    assert is_done(Cell("small", 0, folder, team_file)), "a sweep does not train it again"
    assert trained(folder, "eval.patience=2") == last, "the same command trains nothing more"
    told = invoke("train", folder.parent / "team.yaml", "eval.patience=2", "--out", folder)
    assert "stopped early after stage 3: 2 evaluations in a row" in told.stderr
    assert "best held-out success: 50 % at checkpoint 1 (stage 1), which is kept" in told.stderr
    assert trained(folder, "eval.patience=4")["updates"] == 5, "with more patience it goes on"


@pytest.mark.long
def test_the_best_is_known_when_the_log_has_lost_it(folder: Path) -> None:
    trained(folder, until=2)
    run = RunFolder.read(folder)
    lines = [line for line in run.log.path.read_bytes().splitlines(keepends=True) if b'"kind":"eval"' not in line]
    run.log.path.write_bytes(b"".join(lines))
    assert StoredRun.read(folder, "best").commit.number == 1
    assert trained(folder)["best"] == {"updates": 1, "stage": 1, "success": 0.5}
    assert 1 in RunFolder.read(folder).checkpoints.numbers()


@pytest.mark.long
def test_a_resumed_run_keeps_the_best_before_it_evaluates_again(folder: Path) -> None:
    trained(folder, "eval.every=2", until=3)
    assert evals(folder) == [(0, 0.1), (2, 0.4)]
    trained(folder, "eval.every=2", until=1)
    assert RunFolder.read(folder).checkpoints.numbers() == [2, 3, 4]


@pytest.mark.long
def test_a_run_that_was_never_evaluated_has_no_best(folder: Path) -> None:
    assert trained(folder, "eval.every=0", "plan.stages=1")["best"] is None
    assert RunFolder.read(folder).checkpoints.numbers() == [0, 1]
    with pytest.raises(UserError, match="never evaluated"):
        StoredRun.read(folder, "best")
    told = invoke("check", folder.parent / "team.yaml", "eval.every=0", "eval.patience=1", code=2).stderr
    assert "eval.patience counts evaluations" in told


def test_what_is_kept_gives_way_to_a_better_one(tmp_path: Path) -> None:
    def save(name: str, into: Path) -> None:
        (into / "weights").write_text(name)

    with RunFolder.open(tmp_path / "run", keep_commits=1) as run:
        for number in range(6):
            run.checkpoints.kept = {0: None, 1: 0, 2: 0, 3: 2, 4: 2, 5: 2}[number]
            run.checkpoints.commit(number, {"a": f"{number:04x}"}, save, {})
            expected = {0: [0], 1: [0, 1], 2: [0, 2], 3: [2, 3], 4: [2, 4], 5: [2, 5]}[number]
            assert run.checkpoints.numbers() == expected
        assert run.checkpoints.at(2).agents == {"a": "0002"}
        assert (tmp_path / "run" / "checkpoints" / "agents" / "a" / "0002" / "weights").exists()
        assert replace(run.checkpoints.at(5)) == run.checkpoints.latest()
