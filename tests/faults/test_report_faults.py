"""A run folder that is torn, half gone or newer than this version still opens, and the report says what is missing."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from made_run import made_run, probe_record, update_record, write_log
from teamtr.analysis.report import build_report, compare_runs, reading, report_page, report_text
from teamtr.store import Log, StoreError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


def opened(run: Path) -> dict:
    """The data of the report, after every form of it was made."""
    report = build_report(run)
    assert report_page(report).startswith("<!doctype html>")
    assert report_text(report.data).startswith("# ")
    return dict(report.data)


def notes(data: dict) -> str:
    return " ".join(data["notes"])


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_torn_last_line(run, cut):
    path = run / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    data = opened(run)
    assert len(data["updates"]) == 9
    assert len(data["evals"]) == 3
    assert "last line of the log is torn" in notes(data)


def test_a_damaged_line_in_the_middle(run):
    path = run / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b'{"kind": "upda\x00\xff\n'
    lines[3] = b"[1, 2]\n"
    path.write_bytes(b"".join(lines))
    data = opened(run)
    assert len(data["updates"]) == 7
    assert "Line 3 of the log" in notes(data)
    assert "Line 4 of the log" in notes(data)


def test_a_missing_checkpoint(run):
    shutil.rmtree(run / "checkpoints")
    data = opened(run)
    assert "No checkpoint can be read" in notes(data)
    assert data["cost"]["complete"] is False
    assert data["cost"]["seconds"]["left"] == {"score": pytest.approx(0.3), "train": pytest.approx(1.5)}
    assert data["cost"]["overhead"]["token_ratio"] == pytest.approx(3.0)
    assert data["cost"]["overhead"]["seconds_ratio"] is None


@pytest.mark.long
def test_a_damaged_checkpoint_gives_way_to_an_older_one(run):
    newer = run / "checkpoints" / "commits" / "000002"
    newer.mkdir()
    (newer / "team.json").write_bytes(b"\x00\x00")
    data = opened(run)
    assert "Checkpoint 2 cannot be read" in notes(data)
    assert data["cost"]["complete"] is True


def test_newer_kinds_and_fields(run):
    records = Log(run / "log.jsonl").read()
    records.insert(3, {"kind": "telepathy", "stage": {"deep": [1]}})
    for record in records:
        record["a_newer_field"] = {"x": [None, "text", {"y": 1}]}
    records[5] |= {
        "certificates": "elsewhere",
        "measured_before": 7,
        "exact_success": "no",
        "seconds": [1],
        "tokens": 3,
    }
    records[2] |= {"radius": {"new": 1}, "kl_full": "0.1", "agent": None, "outcome": None, "stage": "x"}
    write_log(run, records)
    data = opened(run)
    assert "telepathy" in notes(data)
    assert len(data["updates"]) == 9
    assert compare_runs([run, run])["runs"][0]["updates"] == 9


@pytest.mark.parametrize("agents", [7, {"left": 1}, "left", [], None])
def test_agents_of_another_form_are_read_from_the_updates(run, agents):
    records = Log(run / "log.jsonl").read()
    write_log(run, [{**r, "agents": agents} if r["kind"] == "start" else r for r in records])
    assert opened(run)["run"]["agents"] == ["left", "right", "speaker"]


def test_rows_of_a_probe_that_are_no_numbers_are_left_out(run):
    records = Log(run / "log.jsonl").read()
    probes = {1: probe_record(), 2: probe_record(), 3: probe_record()}
    probes[1]["token_shift"]["moved_R"][2] = "much"
    probes[2]["token_shift"]["stretched"]["moved_R"][0] = math.nan
    write_log(run, [{**r, "probe": probes[r["update"]]} if r.get("update") in probes else r for r in records])
    shifts = [probe["shift"] for probe in opened(run)["probes"]["updates"]]
    assert shifts[0] is None
    assert shifts[1]["stretched"] is None
    assert shifts[2]["stretched"]["moved_R"] == [0.9, 0.8, 0.7, 0.1]


def test_a_newer_team_file(run):
    path = run / "team.yaml"
    path.write_text(path.read_text() + "telepathy: {range: 3}\n")
    report = build_report(run)
    assert "team file is not understood" in notes(dict(report.data))
    held = next(iter(report.conversations.values()))
    assert held["episodes"][0]["advantage"] is None
    assert "telepathy" in report.data["reproduce"]["team_file"]


@pytest.mark.parametrize("name", ["team.yaml", "log.jsonl", "episodes", "checkpoints"])
def test_anything_may_be_missing(run, name):
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert opened(run)["notes"]


def test_a_damaged_batch_is_left_out(run):
    first = min((run / "episodes").iterdir())
    first.unlink()
    first.write_bytes(b"not gzip")
    data = opened(run)
    assert first.name in notes(data)
    assert data["sample"]["batches"] == 8


def test_numbers_that_are_none(run):
    records = Log(run / "log.jsonl").read()
    records[2] |= {
        "kl_full": math.nan,
        "kl_upper": math.inf,
        "reward": math.nan,
        "success": math.nan,
        "beta": -math.inf,
    }
    records[1] |= {"avg_interval": [math.nan, None], "mean_reward": math.nan}
    write_log(run, records)
    data = opened(run)
    assert data["updates"][0]["kl_full"] is None
    assert data["updates"][0]["outside"]  # a bound that is infinite is not within the radius
    assert data["evals"][0]["low"] is None


def test_numbers_beyond_all_measure(run):
    """The longest whole numbers that a log may hold, and counts that no memory holds."""
    records = Log(run / "log.jsonl").read()
    records[0] |= {"floors": {"left": 10**300}, "threads": 10**300}
    probe = probe_record()
    probe["gap"]["problems"] = 1e300
    records[2] |= {"probe": probe, "exact_success": [0.5, 10**300], "beta": 1e308}
    write_log(run, records)
    assert opened(run)["probes"]["updates"][0]["gap"]["error"] > 0.0


@pytest.mark.parametrize("number", ['{"$int": "0x1' + "0" * 333 + '"}', "1" + "0" * 400])
def test_a_number_that_no_float_holds_costs_its_line_alone(run, number):
    before = opened(run)
    with open(run / "log.jsonl", "ab") as log:
        log.write(b'{"kind": "eval", "stage": ' + number.encode() + b"}\n")
    data = opened(run)
    assert data["evals"] == before["evals"]
    assert "cannot be read and was left out" in notes(data)


def test_a_line_of_the_log_that_is_too_long_is_left_out(run, monkeypatch):
    """It is read past, not into the memory; the next look goes on behind it."""
    path = run / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(reading, "LONGEST_LINE", max(map(len, lines)))
    long = b'{"kind": "eval", "stage": "' + b"x" * (3 * reading.LONGEST_LINE) + b'"}\n'
    path.write_bytes(b"".join(lines[:-1]) + long)
    tail = reading.LogTail(path)
    assert tail.poll()
    assert [what.split()[1] for what in tail.damaged] == [str(len(lines))]
    with open(path, "ab") as log:
        log.write(lines[-1])
    assert tail.poll()
    assert len(tail.records) == len(lines)
    assert tail.generation == 1  # what was read is not read again
    with open(path, "ab") as log:
        log.write(long[:-1])
    assert not tail.poll()
    assert tail.torn_bytes == len(long) - 1


def test_a_run_that_has_just_begun(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_bytes(b"")
    data = opened(run)
    assert data["updates"] == []
    assert data["headlines"][1]["headline"] == "not known"


def test_every_update_was_lost(tmp_path):
    run = made_run(tmp_path / "run", stages=1)
    lost = [update_record(k + 1, 0, k, "left", outcome="restored", reason="x", certificates=[]) for k in range(3)]
    write_log(run, lost)
    data = opened(run)
    assert data["headlines"][2]["headline"] == "no update kept"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no run folder"):
        build_report(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="not a run folder"):
        build_report(tmp_path / "empty")
