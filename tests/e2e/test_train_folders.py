"""Which folder ``teamtr train`` takes, which it refuses, and what a failed start leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.records import accepted
from teamtr.session import models
from teamtr.store import RunFolder

pytestmark = pytest.mark.long

TEAM = """\
name: small
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.9}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 5, warmup_learning_rate: 1e-2}
team: {model: tiny, max_tokens: 3, agents: [{name: left}, {name: right}, {name: speaker}]}
plan: {stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.05}
eval: {every: 0}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team.yaml").write_text(TEAM)
    return tmp_path


def teamtr(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def updates(folder: Path) -> int:
    return sum(r["kind"] == "update" for r in RunFolder.read(folder).log.read())


@pytest.mark.parametrize("named", ["moved/team.yaml", "moved"])
def test_a_team_file_in_a_run_folder_trains_that_run(here: Path, named: str) -> None:
    """Not ``runs/NAME``: a swapped run has the old one's name, and both would be trained in one folder."""
    assert teamtr("train", "team.yaml", "--out", "moved")[0] == 0
    code, said = teamtr("train", named, "plan.stages=2")
    assert code == 0, said
    assert updates(here / "moved") == 6
    assert not (here / "runs").exists()


def test_somebody_s_own_checkpoints_beside_a_team_file_are_no_run(here: Path) -> None:
    for inside in ("", "llama"):
        (here / "checkpoints" / inside).mkdir(parents=True, exist_ok=True)
        code, said = teamtr("train", "team.yaml")
        assert code == 0, said
        assert updates(here / "runs" / "small") == 3
        assert not (here / "log.jsonl").exists()


def test_training_into_an_unfinished_swap_is_refused(here: Path) -> None:
    request = here / "out" / "swap" / "request.json"
    request.parent.mkdir(parents=True)
    request.write_text("{}")
    (here / "out" / "checkpoints").mkdir()
    code, said = teamtr("train", "team.yaml", "--out", "out")
    assert code == 3, said
    assert "holds an unfinished swap" in said
    assert request.read_text() == "{}"
    assert not (here / "out" / "team.yaml").exists()


def test_a_start_that_fails_leaves_no_folder_and_takes_none_away(here: Path) -> None:
    (here / "kept").mkdir()
    for out in ("new", "kept"):
        code, said = teamtr("train", "team.yaml", "team.model=./nowhere", "--out", out)
        assert code == 2, said
    assert not (here / "new").exists()
    assert (here / "kept").is_dir()


@pytest.mark.parametrize(("train", "times"), [("full", 0), ("lora", 1)])
def test_going_on_teaches_the_base_again_only_where_adapters_rest_on_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, train: str, times: int
) -> None:
    assert teamtr("train", "team.yaml", f"team.train={train}", "--out", "run")[0] == 0
    taught = []
    teach = models.teach_once
    monkeypatch.setattr(models, "teach_once", lambda *a, **k: [taught.append(1), teach(*a, **k)])
    assert teamtr("train", "run", "plan.stages=2")[0] == 0
    assert len(taught) == times
    assert updates(here / "run") == 6


def test_other_settings_are_named_by_the_agent(here: Path) -> None:
    assert teamtr("train", "team.yaml", "--out", "run")[0] == 0
    code, said = teamtr("train", "team.yaml", "team.agents.right.max_tokens=5", "--out", "run")
    assert code == 3, said
    assert "team.agents.right.max_tokens" in said
    assert "`--out FOLDER`" in said, "the way to a new run"
    way_back = re.search(r"`teamtr (train \S+)`", said)
    assert way_back is not None, "and the way to the one that is there"
    code, said = teamtr(*way_back[1].split())
    assert code == 0, said


def test_a_run_that_learnt_nothing_says_why(here: Path) -> None:
    (here / "rows.jsonl").write_text('{"question": "1+1", "answer": "never"}\n{"question": "1+2", "answer": "ever"}\n')
    team = TEAM.replace("{name: code, symbols: AB, held_out: 0.5, skill: 0.9}", "{name: data, path: rows.jsonl}")
    (here / "team.yaml").write_text(team)
    code, said = teamtr("train", "team.yaml", "--out", "run")
    assert code == 0, said
    assert "nothing was learned: in every group, all episodes got the same reward" in said


REWARD = """\
def reward(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 2) for text in completions]
"""


def test_a_resumed_run_that_learns_nothing_more_is_not_told_that_it_never_did(here: Path) -> None:
    """The reward tells episodes apart at first, and is the same for all once the run is resumed."""
    (here / "rows.jsonl").write_text("".join(f'{{"question": "1+{k}", "answer": "x"}}\n' for k in range(4)))
    (here / "reward.py").write_text(REWARD)
    task = "{name: data, path: rows.jsonl, grader: 'python:reward.py:reward'}"
    (here / "team.yaml").write_text(TEAM.replace("{name: code, symbols: AB, held_out: 0.5, skill: 0.9}", task))
    code, said = teamtr("train", "team.yaml", "plan.group_size=8", "--out", "run")
    assert code == 0, said
    kept = sum(accepted(r) for r in RunFolder.read(here / "run").log.read() if r["kind"] == "update")
    assert kept > 0
    (here / "reward.py").write_text(REWARD.replace("% 2", "* 0"))
    code, said = teamtr("train", "run", "plan.stages=2", "--accept-changes")
    assert code == 0, said
    told = f"nothing was learned since the run was resumed (it kept {kept} update{'s' * (kept > 1)} before): in every"
    assert told in " ".join(said.split())


def test_updates_without_a_signal_are_counted_at_the_end(here: Path) -> None:
    """Small groups: often all episodes are right, or none."""
    code, said = teamtr("train", "team.yaml", "plan.problems=2", "plan.group_size=4", "plan.stages=4", "--out", "run")
    assert code == 0, said
    lines = [json.loads(line) for line in (here / "run" / "log.jsonl").read_text().splitlines()]
    outcomes = [line["outcome"] for line in lines if line["kind"] == "update"]
    silent = outcomes.count("skipped_no_signal")
    assert 0 < silent < len(outcomes)
    assert f"{silent} of {len(outcomes)} updates had no signal" in said


def test_the_line_of_successes_goes_on_where_the_run_does(here: Path) -> None:
    assert teamtr("train", "team.yaml", "eval.every=1", "--out", "run")[0] == 0
    code, said = teamtr("train", "run", "plan.stages=2")
    assert code == 0, said
    [line] = [line for line in said.splitlines() if "held-out success" in line and "best" not in line]
    assert len(line.split("  ")[-1]) == 3, "two of before and one of now"
