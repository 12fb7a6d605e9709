"""A run of the version before, whose log carries no version: it is read, shown and gone on with; a newer one is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from teamtr.analysis.report import read_run
from teamtr.analysis.report.summary import summarise
from teamtr.cli import app
from teamtr.config import ConfigError, changed, loads, loads_stored, recipe_text
from teamtr.records import LOG_VERSION, NewerLog
from teamtr.session import train as run
from teamtr.session.export import export
from teamtr.store import Log, RunFolder, StoreError
from teamtr.store.log import decode, encode, unsealed
from teamtr.swap import Request, swap

FIXTURE = Path(__file__).parents[1] / "fixtures" / "old_run"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "old"))


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def go_on(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    team_file = loads((folder / "team.yaml").read_text(), "team", overrides)
    return list(run.train(team_file, folder))


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def change_log(folder: Path, **values: object) -> None:
    """Give the newest record that a command began with these fields."""
    records = Log(folder / "log.jsonl").read()
    place = max(k for k, record in enumerate(records) if record["kind"] in ("start", "resume"))
    records[place] |= values
    (folder / "log.jsonl").write_bytes(b"".join(encode(record, "record") + b"\n" for record in records))


def test_an_old_run_is_summarised_and_reported(old):
    data = summarise(read_run(old))
    assert (len(data["updates"]), len(data["evals"]), len(data["swaps"])) == (12, 5, 1)
    assert not any("version" in note for note in data["notes"])
    logged = [record for record in Log(old / "log.jsonl").read() if record["kind"] == "update"]
    assert [row["kept"] for row in data["updates"]] == [r["outcome"] == "accepted" for r in logged]
    assert [row["skipped"] for row in data["updates"]] == [r["outcome"] == "skipped_no_signal" for r in logged]
    result = command("report", old)
    assert result.exit_code == 0, result.output
    assert (old / "report.html").is_file()


@pytest.mark.long
def test_an_old_run_goes_on(old):
    before = (old / "log.jsonl").read_bytes()
    records = go_on(old, "plan.stages=5")
    kinds = [record["kind"] for record in records]
    assert kinds == ["resume", "update", "update", "update", "stage", "eval", "finished"]
    assert records[0]["log_version"] == LOG_VERSION
    assert (records[0]["updates"], records[0]["evals"]) == (12, [0.0] * 5)
    log = (old / "log.jsonl").read_bytes()
    assert log.startswith(before), "what is there keeps its bytes"
    assert [decode(unsealed(line)[0])["kind"] for line in log[len(before) :].splitlines()] == kinds[:-1]
    assert [record["kind"] for record in go_on(old, "plan.stages=5")] == ["resume", "finished"]
    assert len(summarise(read_run(old))["updates"]) == 15


@pytest.mark.long
def test_an_agent_of_an_old_run_is_exported_and_swapped(old, tmp_path):
    assert export(old, tmp_path / "left", agent="left")
    request = Request(agent="left", model="tiny", mode="direct", probes=8, eval_problems=2, eval_samples=1)
    *_, last = swap(old, request, tmp_path / "swapped")
    assert (last["kind"], last["log_version"]) == ("swap", LOG_VERSION)
    copied = Log(tmp_path / "swapped" / "log.jsonl").read()
    assert copied[:-1] == Log(old / "log.jsonl").read()
    RunFolder.read(tmp_path / "swapped").log.require_known()


@pytest.mark.long
@pytest.mark.parametrize("change", [{"log_version": LOG_VERSION + 1}, {"kind": "telepathy"}])
def test_a_newer_log_is_refused_where_a_run_goes_on_and_noted_where_it_is_shown(old, tmp_path, change):
    change_log(old, **change)
    there = contents(old)
    told = "telepathy" if "kind" in change else f"version {LOG_VERSION + 1}"
    with pytest.raises(NewerLog, match=rf"log\.jsonl .*{told}.*teamtr report"):
        go_on(old, "plan.stages=5")
    result = command("train", old, "plan.stages=5")
    assert result.exit_code == 3
    assert told in result.output
    request = Request(agent="left", model="tiny", mode="direct")
    with pytest.raises(NewerLog, match=told):
        next(swap(old, request, tmp_path / "swapped"))
    assert not (tmp_path / "swapped").exists()
    assert contents(old) == there
    notes = summarise(read_run(old))["notes"]
    assert any(told in note for note in notes)
    assert command("report", old).exit_code == 0


def test_damage_that_no_run_can_go_on_from_is_named(old):
    change_log(old, evals="many")
    with pytest.raises(StoreError, match=r"log\.jsonl, line \d+ .*evals"):
        go_on(old, "plan.stages=5")
    assert summarise(read_run(old))["updates"]


@pytest.mark.long
def test_a_run_reads_its_log_only_when_it_goes_on(tmp_path, monkeypatch):
    reads = []
    read = Log.read

    def counted(self: Log) -> list[dict[str, Any]]:
        reads.append(self.path)
        return read(self)

    monkeypatch.setattr(Log, "read", counted)
    overrides = ["team.agents=[{name: a1, sees: blind}, {name: a2, sees: blind}]", "plan.stages=3", "plan.problems=3"]
    overrides += ["plan.group_size=4", "plan.order=largest_gain", "plan.allocate=certified", "eval.problems=2"]
    team_file = loads(recipe_text("roles"), "roles", overrides)
    list(run.train(team_file, tmp_path / "run"))
    assert not reads
    list(run.train(team_file, tmp_path / "run"))
    assert len(reads) == 2, "once whether it is known, once what it says"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  preset: no_normalisation", "plan.preset=no_normalization"),
        ("  preset: teamtr\n  normalise: false", "plan.normalize=false"),
        ("  preset: teamtr\n  ratio: length_normalised", "plan.ratio=length_normalized"),
    ],
)
def test_names_of_earlier_versions_in_a_stored_team_file_mean_what_they_did(old: str, new: str) -> None:
    """In a stored copy alone: written anew, an old name is a mistake that says what is meant."""
    text = "name: old\ntask:\n  name: code\nteam:\n  agents:\n  - name: left\n  - name: right\n  - name: speaker\n"
    text += "  model: tiny\nplan:\n"
    stored = loads_stored(f"{text}{old}\n", "stored", Path())
    assert stored == loads(f"{text}  preset: teamtr\n", "now", [new])
    with pytest.raises(ConfigError, match="normali"):
        loads(f"{text}{old}\n", "written")


@pytest.mark.parametrize(
    "idle",
    [
        "{allocate: gain, adapt_radius: true}",
        "{allocate: gain, dynamic_sampling: true}",
        "{preset: auto, order: together}",
        "{preset: partial, min_effective_share: 0}",
    ],
)
def test_settings_that_change_nothing_are_refused_in_a_new_file_and_read_in_an_older_run_s(
    tmp_path: Path, idle
) -> None:
    text = f"name: old\ntask: {{name: sums}}\nteam: {{model: tiny, agents: [{{name: a}}, {{name: b}}]}}\nplan: {idle}\n"
    with pytest.raises(ConfigError):
        loads(text, "new")
    stored = loads_stored(text, "stored", tmp_path)
    assert changed(stored, ["device=cpu"], "stored").device == "cpu", "its models may have moved"
    with pytest.raises(ConfigError, match="stages"):
        loads_stored(text.replace("{name: a}", "{name: a, stages: 3}"), "stored", tmp_path)
