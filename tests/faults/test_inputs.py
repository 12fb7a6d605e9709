"""A run knows its inputs: what has changed since it began is told, and refused where it changes what is learnt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teamtr.config import load_team_file
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.presets import PRESETS
from teamtr.session.environment import git_revision
from teamtr.session.export import export
from teamtr.session.inputs import Inputs, OtherInputs, changes
from teamtr.session.own_sources import object_digest, program_digest
from teamtr.session.resume import StoredRun
from teamtr.session.train import train
from teamtr.store import Log, RunFolder, StoreError

ROWS = [{"question": f"say {letter}", "answer": letter} for letter in "abcdefghij"]
REWARD = """\
from helper import SCALE

def reward(prompts, completions, **columns):
    return [SCALE * len(set(text)) for text in completions]
"""
TEAM = """\
name: known
task: {name: data, path: rows.jsonl, grader: 'python:reward.py:reward', held_out: 0.3}
team:
  model: model
  max_tokens: 3
  agents: [{name: solver, train: lora, lora: {rank: 2}}, {name: checker, train: full}]
plan: {stages: 3, problems: 3, group_size: 3, radius_nats_per_message: 0.5}
"""


def write_rows(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A folder with a team file, data, a reward with a helper, a model, and a run of one update in ``run``."""
    folder = tmp_path_factory.mktemp("known")
    write_rows(folder, ROWS)
    (folder / "reward.py").write_text(REWARD)
    (folder / "helper.py").write_text("SCALE = 1.0\n")
    (folder / "team.yaml").write_text(TEAM)
    model, tokenizer = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=3)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    proceed(folder, updates=1)
    return folder


def proceed(folder: Path, *, updates: int = 99, **options: bool) -> list[dict]:
    """Train for so many updates; returns the records."""
    records: list[dict] = []

    def stop() -> bool:
        return sum(record["kind"] == "update" for record in records) >= updates

    # The paths of a team file are absolute once it is read; a copy of the folder would mean the first one.
    settings = load_team_file(folder / "team.yaml")
    for record in train(settings, folder / "run", stop=stop, **options):
        records.append(record)
    return records


@pytest.fixture
def here(begun: Path) -> Path:
    """The folder as it was after one update: what a test does to it is undone."""
    kept = begun.with_name(begun.name + "-kept")
    if not kept.exists():
        shutil.copytree(begun, kept)
    shutil.rmtree(begun)
    shutil.copytree(kept, begun)
    return begun


def change_row(folder: Path) -> None:
    write_rows(folder, [{**row, "answer": "z"} if row["answer"] == "a" else row for row in ROWS])


def flip_reward(folder: Path) -> None:
    (folder / "reward.py").write_text(REWARD.replace("SCALE *", "-SCALE *"))


def flip_helper(folder: Path) -> None:
    (folder / "helper.py").write_text("SCALE = -1.0\n")


def exchange_ids(folder: Path) -> None:
    file = folder / "model" / "tokenizer.json"
    body = json.loads(file.read_text())
    vocabulary = body["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(body))


def change_template(folder: Path) -> None:
    jinja = folder / "model" / "chat_template.jinja"
    jinja.write_text(jinja.read_text() + "{# #}")


def change_norm(folder: Path) -> None:
    file = folder / "model" / "config.json"
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, "rms_norm_eps": 1e-3}))


def change_base(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name] + torch.full_like(tensors[name], 0.01)}, file, {"format": "pt"})


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a row changed": (change_row, "problems of train: some of the"),
    "a row removed": (lambda folder: write_rows(folder, ROWS[1:]), "problems of train: there are"),
    "rows reordered": (lambda folder: write_rows(folder, ROWS[::-1]), "problems of train: the .* in another order"),
    "a reward's sign": (flip_reward, "task.grader: the code has changed"),
    "a file that the reward imports": (flip_helper, "task.grader: the code has changed"),
    "ids of the tokenizer": (exchange_ids, "agent checker: its tokenizer has changed"),
    "the template": (change_template, "agent checker: its chat template has changed"),
    "the configuration": (change_norm, "agent checker: the configuration of its model has changed"),
    "the base": (change_base, "agent solver: the weights of its base model have changed"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSED)
def test_what_changes_what_is_learnt_is_refused(here: Path, case: str) -> None:
    harm, told = REFUSED[case]
    harm(here)
    before = sorted((here / "run").rglob("*")), (here / "run" / "log.jsonl").read_bytes()
    with pytest.raises(OtherInputs, match=told) as refused:
        proceed(here)
    assert "--accept-changes" in str(refused.value)
    assert (sorted((here / "run").rglob("*")), (here / "run" / "log.jsonl").read_bytes()) == before


@pytest.mark.long
def test_a_preset_that_another_version_changed_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The team file of the run names it, and says nothing of its values."""
    preset = PRESETS["teamtr"]
    changed = replace(preset, region=replace(preset.region, beta=7.0))
    monkeypatch.setitem(PRESETS, "teamtr", changed)
    with pytest.raises(OtherInputs, match=r"plan\.beta: its preset says 7\.0 in this version, and said 0\.1"):
        proceed(here)
    assert proceed(here, updates=1, accept_changes=True)[0]["changes"] == [
        "plan.beta: its preset says 7.0 in this version, and said 0.1"
    ]


def test_a_run_that_was_begun_before_plans_were_kept_goes_on() -> None:
    old = {name: value for name, value in Inputs().as_record().items() if name != "plan"}
    assert changes(Inputs.of_record(old), Inputs(plan={"beta": 0.1})) == []


@pytest.mark.long
def test_what_is_accepted_is_told_once_and_then_known(here: Path) -> None:
    flip_reward(here)
    first = proceed(here, updates=1, accept_changes=True)[0]
    assert first["changes"] == ["task.grader: the code has changed"]
    assert proceed(here, updates=1)[0]["changes"] == []
    logged = [record for record in Log(here / "run" / "log.jsonl").read() if record["kind"] == "resume"]
    assert logged[0]["changes"] == first["changes"]


@pytest.mark.long
def test_nothing_changed_is_nothing_told(here: Path) -> None:
    assert proceed(here, updates=1)[0]["changes"] == []


@pytest.mark.long
def test_what_does_not_change_what_is_learnt_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (here / "rows.jsonl").open("a") as file:
        file.write("\n")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    told = proceed(here, updates=1)[0]["changes"]
    assert any("task.path: the file has changed, and the problems in it have not" in text for text in told)
    assert any(text.startswith("threads: 64, was") for text in told)


@pytest.mark.long
def test_a_held_out_row_is_told(here: Path) -> None:
    stored = StoredRun.read(here / "run")
    session, _ = stored.build()
    held = {problem.prompt for problem in session.task.problems("test")}
    write_rows(here, [{**row, "answer": "z"} if row["question"] in held else row for row in ROWS])
    told = proceed(here, updates=1)[0]["changes"]
    assert any(text.startswith("problems of test: some") for text in told)


@pytest.mark.parametrize("harm", [exchange_ids, change_template, change_norm])
def test_a_team_is_not_evaluated_with_other_models(here: Path, harm: Callable[[Path], None]) -> None:
    harm(here)
    with pytest.raises(OtherInputs, match="are not those that were trained"):
        StoredRun.read(here / "run").build()


@pytest.mark.long
def test_a_run_of_the_first_version_has_no_inputs_and_goes_on(here: Path) -> None:
    file = next((here / "run" / "checkpoints" / "commits").glob("*1/team.json"))
    body = json.loads(file.read_text())
    for key in ("inputs", "history", "log"):
        del body["progress"][key]
    run = RunFolder.read(here / "run")
    commit = run.checkpoints.latest()
    assert commit is not None
    shutil.rmtree(file.parent)
    with RunFolder.open(here / "run") as writing:
        writing.checkpoints.commit(1, commit.agents, lambda name, folder: None, body["progress"], commit.record)
    assert [record["kind"] for record in proceed(here, updates=1)][:2] == ["resume", "update"]


# -- the log is no state -------------------------------------------------------------------------------------

BY_GAIN = """\
name: gains
task: {name: code, symbols: AB, half_length: 1, held_out: 0.5}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
team: {model: tiny, max_tokens: 2, agents: [{name: left}, {name: right}, {name: speaker}]}
plan: {stages: 3, problems: 4, group_size: 4, radius_nats_per_message: 0.5, order: largest_gain, allocate: gain}
"""


def versions(folder: Path) -> dict[str, str]:
    commit = RunFolder.read(folder).checkpoints.latest()
    assert commit is not None
    return dict(commit.agents)


@pytest.mark.long
def test_a_log_that_lost_its_lines_is_told_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text(BY_GAIN)
    proceed(tmp_path, updates=5)
    shutil.copytree(tmp_path / "run", tmp_path / "whole" / "run")
    shutil.copy(tmp_path / "team.yaml", tmp_path / "whole" / "team.yaml")
    proceed(tmp_path / "whole")
    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:2]))
    records = proceed(tmp_path)
    assert any("log.jsonl has lost 5 of the 7 records" in text for text in records[0]["changes"]), records[0]["changes"]
    assert versions(tmp_path / "run") == versions(tmp_path / "whole" / "run")


@pytest.mark.long
def test_a_log_with_other_lines_is_told(here: Path) -> None:
    log = here / "run" / "log.jsonl"
    first, *rest = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(first.replace(b'"known"', b'"knows"') + b"".join(rest))
    told = proceed(here, updates=1)[0]["changes"]
    assert any("log.jsonl has other records than those" in text for text in told)


@pytest.mark.long
def test_a_digit_exchanged_after_the_last_commit_is_told(here: Path) -> None:
    log = here / "run" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    assert b'"kind":"update"' in lines[-1], "which the commit's hash does not cover"
    log.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(b'"reward":', b'"reward":1', 1))
    told = proceed(here, updates=1)[0]["changes"]
    assert any(f"log.jsonl is damaged: what was written in line {len(lines)} is other now" in text for text in told)


def test_commits_that_are_gone_are_no_fresh_start(here: Path) -> None:
    log = (here / "run" / "log.jsonl").read_bytes()
    shutil.rmtree(here / "run" / "checkpoints" / "commits")
    with pytest.raises(StoreError, match="has a log and no checkpoint"):
        proceed(here)
    assert (here / "run" / "log.jsonl").read_bytes() == log


@pytest.mark.long
@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_folder_that_goes_while_a_run_writes_to_it_stops_the_run(here: Path, how: str) -> None:
    run, away = here / "run", here / "away"
    records = train(load_team_file(here / "team.yaml"), run)
    while next(records)["kind"] != "update":
        continue
    run.rename(away)
    if how == "removed":
        shutil.rmtree(away)
    if how == "replaced":
        run.mkdir()
        (run / "mine.txt").write_text("somebody's")
    with pytest.raises(StoreError, match="was moved, removed or replaced"):
        list(records)
    assert [path.name for path in run.rglob("*")] == (["mine.txt"] if how == "replaced" else [])
    if how == "moved":
        away.rename(run)
        assert proceed(here, updates=1)[0]["kind"] == "resume"


# -- hashes of code ------------------------------------------------------------------------------------------

FACTOR = 2.0


def uses_a_global(text: str) -> float:
    return FACTOR * len(text)


def test_values_that_a_function_uses_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_factor(factor: float) -> Callable[[str], float]:
        return lambda text: factor * len(text)

    assert object_digest(with_factor(1.0)) == object_digest(with_factor(1.0))
    assert object_digest(with_factor(1.0)) != object_digest(with_factor(-1.0))
    before = object_digest(uses_a_global)
    monkeypatch.setitem(globals(), "FACTOR", -2.0)
    assert object_digest(uses_a_global) != before


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions: list[str]) -> list[float]:
        return [self.factor * len(text) for text in completions]


def scaled(completions: list[str], factor: float) -> list[float]:
    return Scaled(factor)(completions)


@pytest.mark.parametrize("made", [Scaled, lambda factor: partial(scaled, factor=factor)])
def test_objects_among_reward_functions_count_with_their_values(made: Callable[[float], Any]) -> None:
    assert object_digest(((made(1.0),), 1.0)) == object_digest(((made(1.0),), 1.0))
    assert object_digest(((made(1.0),), 1.0)) != object_digest(((made(2.0),), 1.0))


def test_an_object_is_not_taken_for_one_that_is_gone() -> None:
    """What was read is known by its place in memory, which must not be given to something else meanwhile."""
    rewards = [tuple(partial(scaled, factor=factor) for factor in factors) for factors in ((1.0, 2.0), (1.0, 3.0))]
    assert object_digest(rewards[0]) != object_digest(rewards[1])


@pytest.mark.parametrize("reward", [scaled, partial(scaled, factor=1.0)])
def test_what_reward_functions_call_in_their_module_counts(reward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = object_digest(((reward,), 1.0))
    monkeypatch.setattr(Scaled, "__call__", lambda self, completions: [0.0] * len(completions))
    assert object_digest(((reward,), 1.0)) != before


def test_a_function_without_a_source_has_a_hash() -> None:
    made: dict = {}
    exec("def f(x): return x\ndef g(x): return -x", made)
    again: dict = {}
    exec("def f(x): return x", again)
    assert object_digest(made["f"]) == object_digest(again["f"])
    assert object_digest(made["f"]) != object_digest(made["g"])


def test_files_that_are_imported_count_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b\nfrom c.d import e\nimport a\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "__init__.py").write_text("")
    (tmp_path / "c" / "d.py").write_text("e = 1\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    first = program_digest(tmp_path / "a.py")
    (tmp_path / "other.py").write_text("x = 2\n")
    assert program_digest(tmp_path / "a.py") == first
    for name in ("b.py", "c/d.py"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "# other\n")
        assert program_digest(tmp_path / "a.py") != first, name
        (tmp_path / name).write_text(text)
    (tmp_path / "a.py").write_text("this is no Python (")
    assert program_digest(tmp_path / "a.py") != first


def test_the_revision_of_a_repository(tmp_path: Path) -> None:
    assert git_revision(tmp_path / "deep") is None or (Path("/.git").exists() or Path("/tmp/.git").exists())
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n" + "1" * 40 + " refs/heads/main\n")
    (tmp_path / "deep").mkdir()
    assert git_revision(tmp_path / "deep") == "1" * 40
    (git / "refs" / "heads" / "main").write_text("2" * 40 + "\n")
    assert git_revision(tmp_path) == "2" * 40
    (git / "HEAD").write_text("3" * 40 + "\n")
    assert git_revision(tmp_path) == "3" * 40


def test_inputs_come_back_from_a_commit_as_they_were(here: Path) -> None:
    stored = StoredRun.read(here / "run")
    then = Inputs.of_record(stored.commit.progress["inputs"])
    assert changes(then, Inputs.of_record(then.as_record())) == []
    assert {"solver", "checker"} == set(then.models)
    assert then.models["solver"].base
    assert not then.models["checker"].base
    assert {"torch", "teamtr", "threads"} <= set(then.environment)
    assert export(here / "run", here / "out", agent="solver")
