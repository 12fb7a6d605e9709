"""What a report says of runs that were paused, swapped or measured in other units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_run import changed, eval_record, made_run, probed, swap_record, update_record, write_log
from teamtr.analysis.report import reading, report_text
from teamtr.analysis.report.reading import read_run
from teamtr.analysis.report.summary import summarise


def begun(kind: str, time: float, **more: Any) -> dict[str, Any]:
    agents = ["left", "right", "speaker"]
    return {"kind": kind, "name": "made", "stages": 4, "agents": agents, "threads": 1, "time": time, **more}


def summary_of(folder: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    write_log(made_run(folder), records)
    return summarise(read_run(folder))


def test_pauses_are_no_time_of_a_run_and_evaluations_after_its_last_update_are(tmp_path: Path) -> None:
    records = [
        begun("start", 1000.0),
        eval_record(0, 0.2, seconds=5.0),
        update_record(1, 0, 0, "left", time=1010.0),
        begun("resume", 90_000.0),  # the next day
        update_record(2, 0, 1, "right", time=90_020.0),
        eval_record(1, 0.4, seconds=7.0),
    ]
    data = summary_of(tmp_path / "run", records)
    assert data["run"]["seconds"] == pytest.approx(10.0 + 20.0 + 7.0)
    assert data["run"]["seconds"] - data["cost"]["eval_seconds"] == pytest.approx(5.0 + 20.0), "of training alone"


def test_a_log_of_which_only_some_stages_are_kept_tells_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(first: int, time: float) -> list[dict[str, Any]]:
        return [update_record(k, k - 1, 0, "left", time=time + k) for k in range(first, first + 14)]

    records = [begun("start", 1000.0), *some(1, 1000.0), begun("resume", 50_000.0), *some(15, 50_000.0)]
    whole = summary_of(tmp_path / "whole", records)
    monkeypatch.setattr(reading, "HELD_BYTES", sum(len(str(record)) for record in records) // 8)
    part = summary_of(tmp_path / "part", records)
    assert len(part["updates"]) < len(whole["updates"])
    assert part["run"]["seconds"] == whole["run"]["seconds"] == 14 + 28


def test_a_run_that_goes_on_after_a_swap_in_the_middle_of_a_stage_can_finish(tmp_path: Path) -> None:
    def stage(k: int) -> list[dict[str, Any]]:
        return [update_record(3 * k + 1, k, 0, "left"), {"kind": "stage", "stage": k, "updates": 3 * k + 1}]

    left = update_record(4, 1, 0, "left")
    records = [begun("start", 1e9), *stage(0), left, swap_record(2), begun("resume", 1e9), *stage(2), *stage(3)]
    run = summary_of(tmp_path / "run", records)["run"]
    assert (run["state"], run["stages_done"], run["stages"]) == ("finished", 4, 4)


def test_a_swap_ends_a_matched_budget(tmp_path: Path) -> None:
    planned = {"rollouts": 100, "messages": 300, "updates": 9}
    budget = {"match": "rollouts", "stages": 3, "problems": 4, "group_size": 4, "planned": planned}
    start = begun("start", 1e9, budget={**budget, "reference": planned})
    update = update_record(1, 0, 0, "left")
    assert summary_of(tmp_path / "before", [start, update])["budget"]["tokens"]["planned"] == 1000
    swapped = [start, update, swap_record(1), begun("resume", 1e9, budget=None), update_record(2, 1, 0, "left")]
    assert summary_of(tmp_path / "after", swapped)["budget"] is None


def test_a_kl_per_message_is_no_multiple_of_a_radius_per_token(tmp_path: Path) -> None:
    run = probed(made_run(tmp_path / "run"))
    assert "0.6 radii" in report_text(summarise(read_run(run)))

    def per_token(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "unit": "token"} if record["kind"] == "update" else record

    text = report_text(summarise(read_run(changed(run, per_token))))
    assert "Mass and flips" in text
    assert "0.6 radii" not in text


def test_success_on_other_problems_is_no_improvement(tmp_path: Path) -> None:
    def asked(stage: int, success: float, problems: int) -> dict[str, Any]:
        return eval_record(stage, success, problem_ids=[f"p{k}" for k in range(problems)])

    def learned(name: str, *evals: dict[str, Any]) -> dict[str, Any]:
        data = summary_of(tmp_path / name, [begun("start", 1e9), *evals])
        [found] = [answer for answer in data["headlines"] if answer["question"] == "Does it improve?"]
        return found

    changed_once = learned("once", asked(0, 0.1, 2), asked(10, 0.6, 16), asked(20, 0.65, 16))
    assert (changed_once["tone"], changed_once["headline"]) == ("plain", "+5 points")
    assert "went from 60 % (55 to 65) to 65 % (60 to 70) in 10 stages" in changed_once["text"]
    at_the_end = learned("end", asked(0, 0.1, 2), asked(10, 0.6, 16))
    assert at_the_end["tone"] == "plain"
    assert "different problems" in at_the_end["text"]
    assert learned("same", asked(0, 0.1, 16), asked(10, 0.6, 16))["tone"] == "good"


def test_a_run_without_any_certificate_does_not_say_that_some_are_missing(tmp_path: Path) -> None:
    def none(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "certificates": []} if record["kind"] == "update" else record

    run = made_run(tmp_path / "run", reused=True)
    assert "6 of 9 kept updates without a certificate" in report_text(summarise(read_run(run)))
    text = report_text(summarise(read_run(changed(run, none))))
    assert "none of 9 kept updates has a certificate" in text
    assert "6 of 9 kept updates" not in text
