"""A run moves: with its data and model, or to where they lie under other names; other data or weights are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import killing
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.config import load_team_file, loads
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.session.resume import StoredRun, places
from teamtr.session.train import train
from teamtr.store import Checkpoints, RunFolder
from teamtr.store.atomic import TEMPORARY

ROWS = [{"question": f"say {letter}", "answer": letter} for letter in "abcdefghij"]
REWARD = """\
def reward(prompts, completions, **columns):
    return [len(set(text)) / 3 for text in completions]
"""
TEAM = """\
name: moving
task: {name: data, path: data/rows.jsonl, grader: 'python:reward.py:reward', held_out: 0.3}
team:
  model: model
  max_tokens: 3
  agents: [{name: solver, train: lora, lora: {rank: 2}}, {name: checker, train: full}]
plan: {stages: 2, problems: 3, group_size: 3, radius_nats_per_message: 0.5, reference_kl: 0.1}
eval: {every: 0}
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that a run needs, ``whole``, a run that nobody disturbed, and ``run``: what the disk held when
    two of its four updates were committed and the second was not in the log, which is what a kill leaves."""
    folder = tmp_path_factory.mktemp("first") / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "reward.py").write_text(REWARD)
    (folder / "team.yaml").write_text(TEAM)
    model, tokenizer = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=3)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    commit = Checkpoints.commit

    def commit_and_copy(self: Checkpoints, number: int, *args: Any) -> None:
        commit(self, number, *args)
        if number == 2:
            removed_meanwhile = shutil.ignore_patterns(f"{TEMPORARY}*")
            shutil.copytree(folder / "whole", folder / "run", ignore=removed_meanwhile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "commit", commit_and_copy)
        for _ in train(load_team_file(folder / "team.yaml"), folder / "whole"):
            continue
    logged = [record for record in RunFolder.read(folder / "run").log.read() if record["kind"] == "update"]
    assert len(logged) == 1
    return folder


@pytest.fixture
def moved(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy at another place; the first one is away meanwhile."""
    place = tmp_path / "another" / "place"
    shutil.copytree(first, place)
    away = first.rename(first.with_name("away"))
    monkeypatch.chdir(tmp_path)
    yield place
    away.rename(first)


def teamtr(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, words)))
    return result.exit_code, result.output


def all_bytes(folder: Path) -> dict[str, bytes]:
    """But for what a killed run had not yet removed, which the next one does."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    names = {str(path.relative_to(folder)): path for path in files}
    return {name: path.read_bytes() for name, path in names.items() if TEMPORARY not in name}


@pytest.mark.long
def test_a_killed_run_moves_with_its_data_and_model_and_ends_with_the_same_bits(moved: Path) -> None:
    code, said = teamtr("train", moved / "run")
    assert code == 0, said
    assert killing.result(moved / "run") == killing.result(moved / "whole")
    for file in (moved / "run" / "team.yaml", *(moved / "run").rglob("adapter_config.json")):
        assert str(moved.parent) not in file.read_text(), file
        assert "first" not in file.read_text(), file


@pytest.mark.long
def test_data_and_model_may_lie_under_other_names(moved: Path, tmp_path: Path) -> None:
    (moved / "model").rename(tmp_path / "weights")
    (moved / "data" / "rows.jsonl").rename(tmp_path / "questions.jsonl")
    (tmp_path / "code").mkdir()
    (moved / "reward.py").rename(tmp_path / "code" / "reward.py")
    code, said = teamtr("train", moved / "run")
    assert code == 2, said
    told = " ".join(said.split())
    assert f"teamtr train {moved / 'run'} task.grader=python:PATH:reward task.path=PATH team.model=PATH" in told, said
    here = ["team.model=./weights", "task.path=questions.jsonl", "task.grader=python:code/reward.py:reward"]
    code, said = teamtr("train", moved / "run", *here, "device=cpu")
    assert code == 0, said
    found, expected = killing.result(moved / "run"), killing.result(moved / "whole")
    assert found["agents"] == expected["agents"]
    assert found["records"] == expected["records"]
    assert found["episodes"] == expected["episodes"]
    assert set(places(StoredRun.read(moved / "run").team_file).values()) == {
        str(tmp_path / "weights"),
        str(tmp_path / "questions.jsonl"),
        f"python:{tmp_path / 'code' / 'reward.py'}:reward",
    }, "the run remembers where they are"


def other_rows(place: Path) -> list[str]:
    rows = [{**row, "answer": "z"} for row in ROWS]
    (place / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"task.path={place / 'other.jsonl'}"]


def other_weights(place: Path) -> list[str]:
    shutil.copytree(place / "model", place / "other")
    file = place / "other" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-3
    save_file(weights, file, metadata={"format": "pt"})
    return [f"team.model={place / 'other'}"]


def other_code(place: Path) -> list[str]:
    (place / "other.py").write_text(REWARD.replace("/ 3", "/ 4"))
    return [f"task.grader=python:{place / 'other.py'}:reward"]


REFUSED = {
    "data": (other_rows, "problems of train: some of the"),
    "weights": (other_weights, "agent solver: the weights of its base model have changed"),
    "weights of a whole model": (other_weights, "agent checker: the weights that it began with are other ones"),
    "code": (other_code, "task.grader: the code has changed"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSED)
def test_others_behind_the_new_path_are_refused_and_nothing_is_lost(moved: Path, case: str) -> None:
    harm, told = REFUSED[case]
    before = all_bytes(moved / "run")
    code, said = teamtr("train", moved / "run", *harm(moved))
    assert code == 3, said
    assert told in said
    assert all_bytes(moved / "run") == before
    if case == "data":
        assert teamtr("train", moved / "run")[0] == 0
        assert killing.result(moved / "run") == killing.result(moved / "whole")


@pytest.mark.long
def test_a_moved_run_is_evaluated_reported_and_exported(moved: Path, tmp_path: Path) -> None:
    run = moved / "whole"
    code, said = teamtr("eval", run, "device=cpu", "--samples", 1, "--json")
    assert code == 0, said
    first_played = json.loads(said.splitlines()[-1])
    assert first_played["tokens"] > 0
    (moved / "model").rename(tmp_path / "weights")
    assert teamtr("eval", run, "--samples", 1)[0] == 2
    code, said = teamtr("eval", run, "team.model=weights", "--samples", 1, "--json")
    assert code == 0, said
    again = json.loads(said.splitlines()[-1])
    assert again["folder"] == first_played["folder"], "the replies are those of the same team"
    assert again["tokens"] == 0
    (tmp_path / "weights").rename(moved / "model")
    code, said = teamtr("report", run, "--out", tmp_path / "report.html")
    assert code == 0, said
    assert (tmp_path / "report.html").stat().st_size > 10_000
    code, said = teamtr("export", run, tmp_path / "out", "--agent", "solver")
    assert code == 0, said
    stored = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(moved / "model")


@pytest.mark.long
def test_a_run_of_an_earlier_version_kept_absolute_paths_and_moves_with_them_said(moved: Path, first: Path) -> None:
    file = moved / "run" / "team.yaml"
    file.write_text(file.read_text().replace("../", f"{first}/"))
    code, said = teamtr("train", moved / "run")
    assert code == 2, said
    here = [f"team.model={moved}/model", f"task.path={moved}/data/rows.jsonl"]
    code, said = teamtr("train", moved / "run", *here, f"task.grader=python:{moved}/reward.py:reward")
    assert code == 0, said
    assert killing.result(moved / "run")["agents"] == killing.result(moved / "whole")["agents"]


@pytest.mark.long
def test_what_a_card_settled_on_is_float32_on_a_cpu(moved: Path) -> None:
    commit = RunFolder.read(moved / "run").checkpoints.latest()
    assert commit is not None
    progress = {**commit.progress, "precisions": {"solver": "fp16", "checker": "fp32"}}
    shutil.rmtree(moved / "run" / "checkpoints" / "commits" / f"{commit.number:06}")
    with RunFolder.open(moved / "run") as run:
        run.checkpoints.commit(commit.number, commit.agents, lambda name, folder: None, progress, commit.record)
    records = train(load_team_file(moved / "run" / "team.yaml"), moved / "run")
    resumed = next(records)
    records.close()
    assert resumed["precisions"] == {"solver": "fp32", "checker": "fp32"}
    assert "agent solver: computed in fp32 on this device, was fp16" in resumed["changes"]


def test_paths_are_kept_as_seen_from_the_run_and_names_as_they_are(tmp_path: Path) -> None:
    text = TEAM.replace("model: model", "model: OWNER/NAME\n  revision: v2").replace(
        "train: full}", "train: full, model: /models/own}"
    )
    settings = loads(text, "x").anchored(tmp_path)
    kept = settings.seen_from(tmp_path / "runs" / "one")
    assert kept.task.path == "../../data/rows.jsonl"
    assert kept.task.grader == "python:../../reward.py:reward"
    assert kept.team.agents[0].source == ("OWNER/NAME", "v2")
    assert kept.team.agents[1].source == ("/models/own", None), "a place of the machine, which no run moves"
    assert kept.anchored(tmp_path / "runs" / "one") == settings
    assert settings.seen_from(tmp_path).task.path == "./data/rows.jsonl", "no hub id"


def test_another_hub_id_is_another_run_and_a_folder_may_be_the_same_model(tmp_path: Path) -> None:
    from teamtr.session.resume import OtherRun, require_same

    def named(model: str) -> object:
        return loads(TEAM.replace("model: model", f"model: {model}"), "x").anchored(tmp_path)

    require_same(tmp_path, named("OWNER/NAME\n  revision: v2"), named("/models/name"))
    require_same(tmp_path, named("/models/name"), named("/elsewhere/name"))
    with pytest.raises(OtherRun, match=r"team\.lora\.start"):
        require_same(tmp_path, named("OWNER/NAME"), named("OWNER/NAME\n  lora: {start: /adapters/one}"))
    other = loads(TEAM.replace("path: data", "question: asked, path: data"), "x").anchored(tmp_path)
    with pytest.raises(OtherRun, match=r"task\.question"):
        require_same(tmp_path, loads(TEAM, "x").anchored(tmp_path), other)
    for model in ("OWNER/OTHER", "tiny"):
        with pytest.raises(OtherRun, match=r"team\.model"):
            require_same(tmp_path, named("OWNER/NAME"), named(model))


@pytest.mark.long
def test_the_folder_of_a_model_does_not_change_the_policy_that_a_reference_is_taken_to(moved: Path) -> None:
    """A fresh adapter is drawn by the name of its model, and says what its base says."""
    torch.set_num_threads(1)
    shutil.copytree(moved / "model", moved / "copy")
    found = []
    for model in ("model", "copy"):
        settings = load_team_file(moved / "team.yaml", [f"team.model={model}"])
        next(train(settings, moved / f"begun-{model}"))
        commit = RunFolder.read(moved / f"begun-{model}").checkpoints.latest()
        assert commit is not None
        found.append(commit.progress["references"])
    assert found[0] == found[1]
