"""``teamtr grade``: stored replies of every benchmark, by id and by their own fields, and the golden files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from own_rows import DATA, OWN, write_rows
from teamtr.cli import app
from teamtr.tasks import benchmark

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no benchmark data in {DATA}; set TEAMTR_DATA")


def grade(name: str, rows: list[dict[str, Any]], folder: Path, *more: object, code: int = 0) -> Any:
    """The rows that come out, or the message when it fails."""
    responses, out = write_rows(folder, rows, "replies.jsonl"), folder / "graded.jsonl"
    result = CliRunner().invoke(
        app, ["grade", name, "--responses", str(responses), "--out", str(out), *map(str, more), "--json"]
    )
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    if code:
        assert not out.exists()
        assert not list(folder.glob(".tmp-*"))
        return result.stderr
    graded = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [{k: v for k, v in row.items() if k not in ("verdict", "reward", "extracted")} for row in graded] == rows
    told = json.loads(result.stdout.strip().splitlines()[-1])
    assert told["rows"] == len(rows)
    assert told["accuracy"] == pytest.approx(np.mean([row["verdict"] == "right" for row in graded]))
    return graded


def answers(name: str) -> list[tuple[dict[str, Any], str, bool]]:
    """(row, reply, whether it is right) for each of our own rows: the gold answer, then the wrong ones."""
    task = benchmark(name)
    rng = np.random.default_rng(0)
    known = []
    for row in OWN[name][:3]:
        problem = task.problem(row)
        known.append((row, task.gold(problem), True))
        known += [(row, each.reply, False) for each in task.wrong(problem, rng)]
    task.close()
    return known


def own_id(row: dict[str, Any]) -> Any:
    return next(row[key] for key in ("id", "instance_id", "idx", "index") if key in row)


@pytest.mark.long
@pytest.mark.parametrize("name", OWN)
def test_replies_are_graded_by_id_and_by_their_own_fields(name: str, tmp_path: Path) -> None:
    known = answers(name)
    data = write_rows(tmp_path, OWN[name], "data.jsonl")
    by_fields = grade(name, [{**row, "response": reply} for row, reply, _ in known], tmp_path)
    by_id = grade(name, [{"response": r, "id": own_id(row)} for row, r, _ in known], tmp_path, "--data", data)
    rights = [is_right for _, _, is_right in known]
    assert [row["verdict"] == "right" for row in by_fields] == rights
    assert [(row["verdict"], row["reward"], row["extracted"]) for row in by_id] == [
        (row["verdict"], row["reward"], row["extracted"]) for row in by_fields
    ]


@pytest.mark.slow
def test_questions_of_the_gym_are_graded_by_fields_and_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teamtr.tasks.benchmarks.gym.SIZES", {"train": 4, "test": 4})
    task = benchmark("gym:chain_sum")
    problem = task.problems("test")[0]
    entry, gold = problem.columns["entry"], task.gold(problem)
    task.close()
    rows = [{**entry, "response": gold}, {**entry, "response": "<answer>no</answer>"}, {**entry, "response": ""}]
    assert [row["verdict"] for row in grade("gym:chain_sum", rows, tmp_path)] == ["right", "wrong", "unparsed"]
    by_id = grade("gym:chain_sum", [{"id": problem.id, "response": gold}], tmp_path)
    assert by_id[0]["verdict"] == "right"


@pytest.mark.long
def test_more_rows_than_a_chunk_keep_their_order(tmp_path: Path) -> None:
    rows = [{"answer": n, "response": f"\\boxed{{{n + n % 2}}}"} for n in range(1300)]
    graded = grade("math", rows, tmp_path)
    assert [row["verdict"] for row in graded] == ["right", "wrong"] * 650
    assert graded[7]["extracted"] == "8"


@pytest.mark.long
def test_the_grader_can_be_chosen(tmp_path: Path) -> None:
    rows = [{"answer": "1,-2", "response": "\\boxed{-2,1}"}]
    assert grade("math", rows, tmp_path)[0]["verdict"] == "right"
    assert grade("math", rows, tmp_path, "--grader", "deepscaler")[0]["verdict"] == "wrong"
    (tmp_path / "graded.jsonl").unlink()
    assert 'must be one of default, deepscaler, dapo, last_number, official, got "deep"' in grade(
        "math", rows, tmp_path, "--grader", "deep", code=2
    )
    assert "task planbench has no option 'grader'" in grade("planbench", rows, tmp_path, "--grader", "x", code=2)


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (
            [{"answer": 1, "response": "1"}, {"answer": 1}],
            (),
            "line 2: 'response' must be the reply as text",
        ),
        ([{"answer": 1, "response": ["1"]}], (), "line 1: 'response' must be the reply as text"),
        ([{"response": "1"}], (), "line 1: no answer"),
        ([], (), "there is no row to grade"),
        ([{"id": "p99", "response": "1"}], ("--data", "DATA"), "line 1: no problem 'p99' in"),
        ([{"id": "p1", "response": "1"}], ("--data", "DATA", "--data", "DATA"), "the name of several problems"),
        ([{"id": "p1", "response": "1"}], ("--data", "nowhere.jsonl"), "there is no such data file"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_nothing_written(
    rows: list[dict[str, Any]], more: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    data = write_rows(tmp_path, OWN["math"], "data.jsonl")
    given = [str(data) if each == "DATA" else each for each in more]
    assert message in " ".join(grade("math", rows, tmp_path, *given, code=2).split())


def test_the_second_problem_of_a_name_is_called_as_the_task_calls_it(tmp_path: Path) -> None:
    data = write_rows(tmp_path, [{"id": "x", "answer": "1"}, {"id": "x", "answer": "2"}], "data.jsonl")
    rows = [{"id": "x", "response": "\\boxed{1}"}, {"id": "x-2", "response": "\\boxed{2}", "level": "of no matter"}]
    assert [row["verdict"] for row in grade("math500", rows, tmp_path, "--data", data)] == ["right", "right"]


def test_unknown_names_are_told_with_the_nearest(tmp_path: Path) -> None:
    assert "the nearest is 'zebralogic'" in grade("zebra", [], tmp_path, code=2)


def test_a_reward_that_is_no_number_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from teamtr.tasks.benchmarks.math import Math
    from teamtr.types import Verdict

    monkeypatch.setattr(Math, "grade_replies", lambda self, replies: [Verdict("crash", math.nan) for _ in replies])
    assert grade("math", [{"answer": 1, "response": "1"}], tmp_path)[0]["reward"] is None


# -- the golden files, through the command ---------------------------------------------------------------------


def golden(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]


def renamed(row: dict[str, Any], column: str) -> dict[str, Any]:
    return {("response" if key == column else key): value for key, value in row.items()}


@pytest.mark.long
@needs_data
def test_gsm8k_agrees_with_its_golden_file(tmp_path: Path) -> None:
    rows = [
        {"question": row["question"], "ground_truth": row["ground_truth"], "response": v["solution"], "want": v}
        for row in golden("gsm8k/golden_example_model_solutions.jsonl")
        for v in row.values()
        if isinstance(v, dict)
    ]
    graded = grade("gsm8k", rows, tmp_path)
    assert [row["verdict"] == "right" for row in graded] == [row["want"]["is_correct"] for row in graded]


@pytest.mark.long
@needs_data
def test_zebralogic_agrees_with_its_golden_file(tmp_path: Path) -> None:
    rows = [renamed(row, "output") for row in golden("zebralogic/golden_llama3.1-405b_sambanova.jsonl")]
    graded = grade("zebralogic", rows, tmp_path, "--data", DATA / "zebralogic" / "zebralogic_grid_1000.jsonl")
    assert [row["verdict"] == "right" for row in graded] == [row["official_correct"] for row in graded]


@pytest.mark.long
@needs_data
def test_planbench_agrees_with_its_golden_file_of_two_domains(tmp_path: Path) -> None:
    rows = [renamed(row, "llm_raw_response") for row in golden("planbench/golden_llm_responses.jsonl")]
    files = [DATA / "planbench" / f"{domain}.jsonl" for domain in ("blocksworld", "mystery_blocksworld")]
    graded = grade("planbench", rows, tmp_path, "--data", files[0], "--data", files[1])
    gpt = [row for row in graded if row["engine"].startswith("gpt-4")]
    assert len(gpt) > 200
    assert [row["verdict"] == "right" for row in gpt] == [row["llm_correct"] for row in gpt]


@pytest.mark.long
@needs_data
def test_the_mirror_agrees_with_the_labelled_pairs(tmp_path: Path) -> None:
    pairs = golden("math500/golden_deepscaler_grader_pairs.jsonl")
    rows = [{**pair, "response": f"\\boxed{{{pair['given']}}}"} for pair in pairs]
    graded = grade("math", rows, tmp_path, "--grader", "deepscaler")
    assert [row["verdict"] == "right" for row in graded] == [row["correct"] for row in graded]


def test_a_score_that_can_be_hacked_is_warned_of(tmp_path: Path) -> None:
    story = {"surface": "Why?", "bottom": "Because of old owls.", "response": "eeeooo"}
    responses, out = write_rows(tmp_path, [story], "replies.jsonl"), tmp_path / "graded.jsonl"
    result = CliRunner().invoke(app, ["grade", "arbench:sp", "--responses", str(responses), "--out", str(out)])
    assert result.exit_code == 0
    assert "warning: arbench:sp: score: characters" in " ".join(result.stderr.split())
